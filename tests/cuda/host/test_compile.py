"""Every specialisation compiles for every architecture without a GPU, and none spills."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kernels import compile as compile_module
from kernels.__main__ import main
from kernels.backend import DType
from kernels.compile import (
    ARCHITECTURES,
    Compiled,
    CompileError,
    Spec,
    compile_all,
    compile_spec,
    nvrtc_version,
    spec,
)
from kernels.cuda.common.kernel import HEAD_DIMS
from kernels.cuda.specs import service_specs
from tests.cuda.compiled import chosen

pytestmark = pytest.mark.long

POOLS: tuple[DType, ...] = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
PAGE_SIZES = (16, 5, 8, 32, 64)
"""The sizes that Hopper's kernels know, and one that they do not; no others matter to kernels."""


def every_spec(arch: str) -> list[Spec]:
    """All kernels of all sets, of every pool and of both numerics."""
    sizes = PAGE_SIZES if arch == "sm_90a" else PAGE_SIZES[:1]
    pools = product(HEAD_DIMS, POOLS, sizes, ("fast", "invariant"))
    return list(dict.fromkeys(made for pool in pools for made in service_specs(arch, *pool)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_specialisation_compiles_without_spills(arch: str) -> None:
    spilled = []
    for compiled in compile_all(chosen(every_spec(arch), 120), arch, cache=None, workers=2):
        resources = compiled.resources
        print(f"{arch} {resources.registers:3} registers  {compiled.spec}")
        if resources.spill_bytes or resources.stack_bytes:
            spilled.append(f"{compiled.spec}: {resources}")
    assert not spilled, "\n".join([f"{arch} puts registers into local memory:", *spilled])


def test_a_source_that_does_not_compile_shows_the_compiler_log() -> None:
    with pytest.raises(CompileError, match=r"(?s)HEAD_DIM=17.*whole matrix fragments"):
        compile_spec(
            spec(
                "tile/attend_tile",
                HEAD_DIM=17,
                BF16=0,
                FP8=0,
                GENERAL=0,
                ROW_TILES=1,
                WARPS=4,
                BLOCKS=1,
                STAGES=2,
            ),
            "sm_80",
        )


def test_a_compiled_kernel_is_found_in_the_cache(tmp_path: Path) -> None:
    wanted = spec("rows/rows", HEAD_DIM=64, TENSOR=0, STORE=0)
    (first,) = compile_all([wanted], "sm_80", tmp_path)
    (cubin,) = tmp_path.rglob("*.cubin")
    cubin.write_bytes(b"cached bytes")
    (again,) = compile_all([wanted], "sm_80", tmp_path)
    assert again.cubin == b"cached bytes"
    assert again.resources == first.resources
    assert not list(tmp_path.rglob("tmp*")), "a temporary file was left"
    assert {file.stat().st_mode & 0o777 for file in tmp_path.rglob("*.cubin")} == {0o644}
    cubin.write_bytes(b"")  # of a machine that lost power
    (again,) = compile_all([wanted], "sm_80", tmp_path)
    assert (again.cubin, again.path) == (first.cubin, cubin)


@pytest.fixture
def no_spare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel was kept from the cache so far."""
    made: list[TemporaryDirectory[str]] = []
    monkeypatch.setattr(compile_module, "SPARE", made)
    yield
    for spare in made:
        spare.cleanup()


@pytest.mark.usefixtures("no_spare")
def test_kernels_that_cannot_be_cached_are_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    wanted = spec("rows/rows", HEAD_DIM=64, TENSOR=0, STORE=0)
    (first,) = compile_all([wanted], "sm_80", file / "cache")
    monkeypatch.setattr(compile_module, "compile_spec", lambda *_: pytest.fail("compiled again"))
    (again,) = compile_all([wanted], "sm_80", file / "cache")
    assert again == first
    assert first.path is not None
    assert first.path.read_bytes() == first.cubin
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("planted", ["link", "mode"])
def test_a_kernel_that_another_user_can_have_written_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    wanted = spec("rows/rows", HEAD_DIM=64, TENSOR=0, STORE=0)
    monkeypatch.setattr(
        compile_module, "compile_spec", lambda *_: Compiled(wanted, "sm_80", b"compiled", "log")
    )
    path = compile_all([wanted], "sm_80", tmp_path)[0].path
    assert path is not None
    path.write_bytes(b"planted")
    if planted == "link":
        path.rename(tmp_path / "other")
        path.symlink_to(tmp_path / "other")
    else:
        path.chmod(0o666)
    (again,) = compile_all([wanted], "sm_80", tmp_path)
    assert again.cubin == b"compiled"
    assert not path.is_symlink()
    assert path.read_bytes() == again.cubin


def test_a_disk_that_is_full_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(compile_module.os, "fchmod", full)
    with pytest.raises(OSError, match="no space left"):
        compile_module.write_whole(tmp_path / "kernel", b"cubin")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_spare")
def test_a_user_without_a_home_can_compile() -> None:
    (made,) = compile_all(
        [spec("rows/rows", HEAD_DIM=64, TENSOR=0, STORE=0)], "sm_80", Path("~no-such-user/cache")
    )
    assert made.path is not None
    assert made.path.is_file()


def test_an_empty_log_leaves_what_python_shares_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [o for o in compile_module.compiler_options() if o != "--ptxas-options=-v"]
    monkeypatch.setattr(compile_module, "compiler_options", lambda: options)
    compiled = compile_spec(spec("rows/rows", HEAD_DIM=64, TENSOR=0, STORE=0), "sm_80")
    assert compiled.log == ""
    assert [bytes([code])[0] for code in range(256)] == list(range(256))
    with pytest.raises(ValueError, match="no register count"):
        _ = compiled.resources


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--head-dim", "64,abc"], "'abc': expected any of 64"),
        (["--head-dim", "100"], "'100': expected any of 64"),
        (["--dtype", "float16"], "'float16': expected any of fp32, fp16"),
        (["--page-size", "0"], "'0': expected numbers of tokens"),
        (["--page-size", "16,"], "'16,': expected numbers of tokens"),
    ],
)
def test_an_argument_that_names_no_kernel_is_refused(
    capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compile", *given])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_without_a_compiler_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc_version.cache_clear()
    assert main(["compile", "--arch", "sm_80", "--cache", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "install the extra cuda" in line
