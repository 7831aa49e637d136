"""Which measurements a change makes stale: those of what it changes, and no others."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from bench import stale as stale_module
from bench.digests import digests_of
from bench.launches import Machine, row_launches
from bench.machine import workloads, write_results
from bench.stale import recorded, stale_rows
from kernels.compile import SOURCES
from kernels.cuda.attention import kernels as attention_kernels
from kernels.cuda.narrow import variants as narrow
from kernels.cuda.wide import variants as wide

H200 = Machine("sm_90a", 132)
Results = dict[str, Any]
StaleAfter = Callable[[str, str, str], dict[str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every workload as if measured now."""
    cache = tmp_path_factory.mktemp("kernels")
    rows = [
        {"name": row["name"], "digests": digests_of(row_launches(row, H200), H200, cache=cache)}
        for row in workloads()
    ]
    return {"arch": H200.arch, "multiprocessors": H200.multiprocessors, "rows": rows}


@pytest.fixture
def stale_after(tmp_path: Path, results: Results) -> StaleAfter:
    """What is stale once `old` in the CUDA sources that a glob names is `new`."""

    def changed(files: str, old: str, new: str) -> dict[str, str]:
        sources = tmp_path / "sources"
        shutil.copytree(SOURCES, sources)
        texts = {path: path.read_text() for path in sources.glob(files)}
        assert any(old in text for text in texts.values()), f"no {files} has {old}"
        for path, text in texts.items():
            path.write_text(text.replace(old, new))
        return stale_rows(results, sources=sources, cache=tmp_path / "cache")

    return changed


def rows_that_run(results: Results, *entries: str) -> set[str]:
    return {
        row["name"]
        for row in results["rows"]
        if any(name.startswith(entries) for name in row["digests"]["kernels"])
    }


def test_nothing_is_stale_while_nothing_changes(results: Results, tmp_path: Path) -> None:
    assert stale_rows(results, cache=tmp_path) == {}
    assert not list(tmp_path.iterdir()), "something was compiled to find that out"


def test_comments_and_white_space_change_nothing(
    stale_after: StaleAfter,
) -> None:
    assert stale_after("**/*.cu*", "{\n", "{  // a comment,\n\n  /* and\nanother */\n") == {}


def test_another_name_in_a_source_changes_nothing(
    stale_after: StaleAfter,
) -> None:
    assert stale_after("**/*.cu*", "kLn2", "kNaturalLogarithmOfTwo") == {}


def test_a_constant_makes_the_rows_stale_whose_code_has_it(
    stale_after: StaleAfter, results: Results
) -> None:
    stale = stale_after("common/state.cuh", "kLog2E = 1.4426950408889634f", "kLog2E = 1.5f")
    using = rows_that_run(results, "merge_states")
    assert stale.keys() == using
    assert using < {row["name"] for row in results["rows"]}, "attention kernels take it by argument"
    for name, why in stale.items():
        assert why.startswith("machine code of "), f"{name}: {why}"
        assert why.endswith(" changed"), f"{name}: {why}"


def test_a_constant_of_a_format_that_no_row_writes_changes_nothing(
    stale_after: StaleAfter,
) -> None:
    assert (
        stale_after("common/formats.cuh", "kLargest = kFour ? 448.0f", "kLargest = kFour ? 440.0f")
        == {}
    )


def test_another_launch_of_the_wide_kernel_makes_its_rows_stale(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide, "heads_together", lambda *_: 1)
    stale = stale_rows(results)
    single = {row["name"] for row in workloads() if row.get("num_kv_heads") == 1}
    assert stale.keys() == rows_that_run(results, "attend_wide") - single
    assert set(stale.values()) == {"work arrays changed"}


def test_another_division_of_keys_makes_rows_stale_that_divide_them(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "NARROW_RUN", 8192)
    stale = stale_rows(results)
    assert "decode/1x32k" in stale
    assert stale.keys() <= rows_that_run(results, "attend_narrow")
    assert not any(name.startswith(("prefill/", "append/", "merge/")) for name in stale)


def test_another_specialisation_is_named(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "NARROW_BLOCKS", {1: ((8, 1),), 2: ((8, 1),)})
    why = stale_rows(results)["decode/64x4k"]
    assert "no longer runs attend_narrow(" in why
    assert "now runs attend_narrow(" in why


def test_a_device_of_other_multiprocessors_is_given_other_work(results: Results) -> None:
    (row,) = [r for r in workloads() if r["name"] == "decode/1x32k"]
    works = {row_launches(row, Machine("sm_90a", count)).work_digest for count in (114, 132)}
    assert len(works) == 2


def test_no_address_is_part_of_what_is_digested() -> None:
    for row in workloads():
        for call in row_launches(row, H200).calls:
            for launched in call.all:
                numbers = [value for value in launched.values if isinstance(value, int)]
                assert max(numbers) < 1 << 32, f"{row['name']}: {launched.entry}"


def test_another_compiler_alone_makes_nothing_stale(results: Results, tmp_path: Path) -> None:
    assert stale_rows(of_release(results, "12.8.93"), cache=tmp_path) == {}


def test_code_of_another_compiler_is_compared_by_its_source(
    results: Results, tmp_path: Path
) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources)
    rows_cu = sources / "rows/rows.cu"
    rows_cu.write_text(rows_cu.read_text() + "\nconstexpr int kUnused = 7;\n")
    older = of_release(results, "12.8.93")
    stale = stale_rows(older, sources=sources, cache=tmp_path / "cache")
    assert stale.keys() == {"append/8192"}
    assert "on record of NVRTC 12.8.93, not of" in stale["append/8192"]
    assert stale_rows(results, sources=sources, cache=tmp_path / "cache") == {}


def test_recording_adds_the_code_of_this_compiler_to_rows_that_hold(
    results: Results, tmp_path: Path
) -> None:
    older = of_release(results, "12.8.93")
    held, other = older["rows"][0], older["rows"][1]
    stale = {row["name"]: "for a test" for row in older["rows"] if row is not held}
    now = recorded(older, stale, cache=tmp_path)["rows"]
    assert now[1] == other
    for name, kernel in now[0]["digests"]["kernels"].items():
        assert "12.8.93" in kernel["code"] and len(kernel["code"]) == 2, name


def test_rows_without_a_measurement_a_digest_or_a_workload_are_stale(results: Results) -> None:
    first, second, *rest = results["rows"]
    rows = [{"name": second["name"]}, {"name": "decode/of-old"}, *rest]
    assert stale_rows(results | {"rows": rows}) == {
        first["name"]: "never measured",
        second["name"]: "never measured with a digest",
        "decode/of-old": "workloads.json has no such row",
    }


def test_a_row_measured_elsewhere_is_judged_by_its_own_machine(results: Results) -> None:
    first, *rest = results["rows"]
    elsewhere = first | {"run": {"multiprocessors": 114}}
    stale = stale_rows(results | {"rows": [elsewhere, *rest]})
    assert stale.keys() == {first["name"]}


@pytest.mark.parametrize(
    ("options", "status"), [([], 0), (["--strict"], 1)], ids=["plain", "strict"]
)
def test_the_command_prints_a_line_for_a_stale_row(
    results: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    status: int,
) -> None:
    first, *rest = results["rows"]
    work = first["digests"] | {"work": "of another planner"}
    write_results(tmp_path / "r.json", results | {"rows": [first | {"digests": work}, *rest]})
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["stale", str(tmp_path / "r.json"), *options])
    assert stale_module.main() == status
    assert capsys.readouterr().out == f"{first['name']}: work arrays changed\n"


def of_release(results: Results, release: str) -> Results:
    """The same results, had another release of the compiler made the code."""
    rows = []
    for row in results["rows"]:
        kernels = {
            name: kernel | {"code": {release: "of that compiler"}}
            for name, kernel in row["digests"]["kernels"].items()
        }
        rows.append(row | {"digests": row["digests"] | {"kernels": kernels}})
    return results | {"rows": rows}
