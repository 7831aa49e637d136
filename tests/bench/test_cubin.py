"""The digest of machine code: what must not move it, and what must."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.cubin import MachineCode, machine_code
from kernels.compile import Spec, compile_spec

TABLE = """
constexpr float kPrimes[4] = {2, 3, 5, 7};
constexpr float kUnused = 1.5f;
__constant__ float kHalves[2] = {0.5f, 1.5f};
extern "C" __global__ void look_up(float* out, int i) { out[0] = kPrimes[i] * kHalves[i & 1]; }
extern "C" __global__ void add(float* out, int i) { out[0] += i; }
"""


Code = Callable[..., MachineCode]


@pytest.fixture
def code(tmp_path: Path) -> Code:
    """The code of one of a source's kernels, the source in a folder of some name."""

    def of(entry: str, source: str = TABLE, folder: str = "here") -> MachineCode:
        sources = tmp_path / folder
        sources.mkdir(exist_ok=True)
        (sources / "probe.cu").write_text(source)
        return machine_code(compile_spec(Spec("probe", ()), "sm_90a", sources).cubin, entry)

    return of


@pytest.mark.parametrize(
    ("entry", "old", "new"),
    [
        ("look_up", "", ""),
        ("look_up", "constexpr", "// a comment\nconstexpr"),
        ("look_up", "kUnused", "kNeverUsed"),
        ("look_up", "out[0] += i", "out[0] -= i"),
        ("add", "kUnused = 1.5f", "kUnused = 2.5f"),
        ("add", "constexpr float kUnused", "constexpr int kAnother = 1;\nconstexpr float kUnused"),
        ("add", "5, 7", "5, 11"),
    ],
    ids=["same", "comment", "name", "other kernel", "unused", "one more unused", "other's table"],
)
def test_the_code_of_a_kernel_stays(code: Code, entry: str, old: str, new: str) -> None:
    assert code(entry, TABLE.replace(old, new), "some-other-folder") == code(entry)


@pytest.mark.parametrize(
    ("old", "new"),
    [("5, 7", "5, 11"), ("0.5f, 1.5f", "0.5f, 2.5f"), ("kPrimes[i] *", "2 * kPrimes[i] *")],
    ids=["table", "constant memory", "arithmetic"],
)
def test_the_code_of_a_kernel_changes(code: Code, old: str, new: str) -> None:
    assert code("look_up", TABLE.replace(old, new)).digest != code("look_up").digest


def test_the_compiler_release_is_told(code: Code) -> None:
    assert [part.isdigit() for part in code("add").release.split(".")] == [True] * 3


def test_a_kernel_that_is_not_there_is_refused(code: Code) -> None:
    with pytest.raises(ValueError, match="no kernel subtract"):
        code("subtract")
