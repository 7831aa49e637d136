"""The results file and its table: rows of several runs, and marks on what is stale."""

from __future__ import annotations

from typing import Any

import pytest

from bench.kernel_results import read_results, replaced, run_of
from bench.machine import workloads
from bench.readme import DAGGER, STALE, kernels_table, put

RUN: dict[str, Any] = {
    "date": "2027-01-02T03:04:05Z",
    "machine": "a machine",
    "command": "python bench/kernels.py --only append",
    "versions": {},
    "device": "NVIDIA H100",
    "arch": "sm_90a",
    "multiprocessors": 114,
    "ceilings": {"read_tbps": 3.0, "matmul_tflops": 600},
}
APPEND: dict[str, Any] = {
    "name": "append/8192",
    "ms": 0.5,
    "tbps": 1.0,
    "tflops": 0.0,
    "floor_ms": 0.25,
    "roofline": 0.5,
    "digests": {"work": "0", "kernels": {}},
}


@pytest.fixture
def results() -> dict[str, Any]:
    """The committed results, all of one run."""
    whole = read_results()
    rows = [{k: v for k, v in row.items() if k != "run"} for row in whole["rows"]]
    cpu = {
        batch: {k: v for k, v in times.items() if k != "run"}
        for batch, times in whole["cpu_us"].items()
    }
    return whole | {"rows": rows, "cpu_us": cpu}


def table_rows(table: str) -> list[str]:
    """The rows of the kernels' table."""
    return [line for line in table.split("\n\n")[0].splitlines() if "/" in line.split("|")[1]]


def test_every_workload_has_a_row_and_none_is_marked_while_nothing_is_stale(
    results: dict[str, Any],
) -> None:
    table = kernels_table(results, {})
    names = [line.split("|")[1].strip() for line in table_rows(table)]
    assert names[: len(workloads())] == [row["name"] for row in workloads()]
    assert DAGGER not in table


def test_a_stale_row_is_marked_and_the_mark_explained(results: dict[str, Any]) -> None:
    table = kernels_table(results, {"append/8192": "work arrays changed"})
    marked = [line for line in table_rows(table) if DAGGER in line]
    assert [line.split("|")[1].strip() for line in marked] == [f"{DAGGER} append/8192"]
    assert table.count(STALE) == 1


def test_a_workload_that_was_never_measured_has_a_row_without_figures(
    results: dict[str, Any],
) -> None:
    rows = [row for row in results["rows"] if row["name"] != "append/8192"]
    table = kernels_table(results | {"rows": rows}, {"append/8192": "never measured"})
    (line,) = [line for line in table_rows(table) if "append/8192" in line]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[:6] == [f"{DAGGER} append/8192", "", "", "", "", "0.775"]


def test_a_run_of_some_rows_leaves_the_others_as_they_were(results: dict[str, Any]) -> None:
    changed = replaced(results, RUN, [APPEND], {})
    before = {row["name"]: row for row in results["rows"]}
    assert [row["name"] for row in changed["rows"]] == list(before)
    for row in changed["rows"]:
        if row["name"] == "append/8192":
            assert row["ms"] == 0.5
            assert run_of(changed, row) == RUN
        else:
            assert row == before[row["name"]]
            assert run_of(changed, row)["date"] == results["date"]
    assert changed["cpu_us"] == results["cpu_us"]


def test_a_row_that_the_file_lacks_is_added(results: dict[str, Any]) -> None:
    changed = replaced(results, RUN, [APPEND | {"name": "append/new"}], {})
    assert len(changed["rows"]) == len(results["rows"]) + 1
    assert changed["rows"][-1]["name"] == "append/new"


def test_the_table_says_what_rows_of_another_run_were_measured_on(results: dict[str, Any]) -> None:
    (batch, *_) = results["cpu_us"]
    times = {"cold_plan_us": 1.0, "cached_launch_us": 2.0}
    told = kernels_table(replaced(results, RUN, [APPEND], {batch: times}), {})
    assert told.endswith(
        f"append/8192, CPU, {batch}: NVIDIA H100; 2027-01-02; "
        "`python bench/kernels.py --only append`; ceilings of the same run: 3.00 TB/s read, "
        "600 TFLOP/s."
    )
    assert told.count(results["device"]) == 1


def test_a_table_goes_between_its_marks_and_nowhere_else() -> None:
    text = "a\n<!-- table:x -->\nold\n<!-- /table:x -->\nb\n"
    assert put(text, "x", "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="0 places for table y"):
        put(text, "y", "new")
