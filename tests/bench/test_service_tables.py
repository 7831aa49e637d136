"""What is made of the measurements: differences, ratios, tables."""

from __future__ import annotations

from typing import Any

import pytest

from bench import fairness, steps
from bench.load import Run, Sample
from bench.service import BESIDE, added, figures
from bench.service_table import COSTS, reached, table

RUN: dict[str, Any] = {
    "date": "2027-01-02T03:04:05Z",
    "machine": "a machine",
    "command": "python -m bench.service",
}
START: dict[str, Any] = {
    "ready_s": 4.0,
    "imports_s": 3.0,
    "pss_mib": 610.0,
    "processes": [{"name": "service.engine", "rss": 300.0, "pss": 250.0}],
}


def run(*milliseconds: float, backend: float = 0.0) -> Run:
    samples = tuple(Sample(ms / 1e3, backend / 1e3) for ms in milliseconds)
    return Run(samples, sum(milliseconds) / 1e3)


def way(cost: float, per_s: float) -> dict[str, float]:
    times = {"p50_ms": cost + 1, "p99_ms": cost + 2, "cost_p50_ms": cost, "backend_p50_ms": 1.0}
    return times | {"per_s": per_s, "crowd_per_s": per_s}


@pytest.fixture
def results() -> dict[str, Any]:
    ways = {name: way(0.1, 100.0) for name in (*COSTS, "before_http", "before_client")}
    ways["http"] = way(0.4, 120.0)
    rows = [
        {"batch": 1, "q_bytes": size, "ways": ways, "added_us": dict.fromkeys(BESIDE, 140.0)}
        for size in (8192, 65536)
    ]
    measured = {"kv_len": 64, "connections": 8, "start": START, "rows": rows}
    return RUN | measured


def test_what_a_way_adds_is_the_median_of_the_repeats_differences() -> None:
    runs = {
        "http": [run(3.0, backend=1.0), run(13.0, backend=1.0), run(4.0, backend=1.0)],
        "http_echo": [run(1.0), run(10.0), run(2.0)],
    }
    assert added(runs) == {"http": pytest.approx(1000.0)}


def test_the_cost_of_a_way_leaves_the_backends_own_time_out() -> None:
    found = figures([run(2.0, 3.0, 4.0, backend=1.5)], [10.0, 30.0, 20.0])
    assert found["p50_ms"] == 3.0
    assert found["cost_p50_ms"] == found["backend_p50_ms"] == 1.5
    assert found["crowd_per_s"] == 20.0


def test_the_table_has_a_row_for_each_case_in_both_of_its_parts(results: dict[str, Any]) -> None:
    lines = table(results).splitlines()
    assert sum(line.startswith("| 1 | 8 KiB |") for line in lines) == 2
    widths = {line.count("|") for line in lines[:4]}
    assert len(widths) == 1, "rows and head have as many columns"
    assert "610 MiB" in lines[-1]


def test_a_table_without_another_version_has_no_columns_for_it(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        row["ways"] = {name: row["ways"][name] for name in COSTS}
    assert "before" not in table(results)


def test_what_falls_short_is_told_and_what_does_not(results: dict[str, Any]) -> None:
    told = reached(results).splitlines()
    short = [line for line in told if line.startswith("SHORT")]
    assert len(short) == 2
    assert "1.20 times, at least 1.5" in short[0]
    assert "610 MiB, at most 600" in short[1]


def test_a_layer_is_a_share_of_whole_steps_only() -> None:
    whole = run(*[1.0] * steps.LAYERS, *[3.0] * steps.LAYERS, 100.0)
    assert list(steps.whole_steps(whole)) == pytest.approx([0.032, 0.096])
    assert steps.figures([whole])["layer_ms"] == 2.0


@pytest.mark.parametrize(
    ("device", "name"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100")]
)
def test_results_of_a_device_are_named_after_it(device: str, name: str) -> None:
    assert steps.short(device) == name


def test_steps_are_shown_beside_the_kernels_alone() -> None:
    ways = {name: {"layer_ms": ms} for name, ms in (("kernels", 0.2), ("session", 0.3))}
    row = {"batch": 64, "kv_len": 4096, "ways": ways}
    lines = steps.table(RUN | {"device": "NVIDIA H200", "rows": [row]}).splitlines()
    assert lines[2] == "| 64 x 4096 | 0.200 | 0.300 (1.50 x) |"


def test_fairness_tells_the_99th_percentile_in_slices() -> None:
    small = run(*[1.0] * 98, 60.0, 60.0, 60.0)
    p50, p99 = fairness.percentiles(small)
    row = {
        "version": "now",
        "way": "road",
        "neighbour": "46 MiB prefills",
        "neighbour_s": 2.0,
        "alone_p50_ms": 1.0,
        "alone_p99_ms": 2.0,
        "p50_ms": p50,
        "p99_ms": p99,
        "p99_slices": p99 / fairness.SLICE_MS,
    }
    told = fairness.table(RUN | {"slice_ms": 20.0, "most_slices": 5, "rows": [row]})
    assert "| 2.00 | 1.00 | 2.00 | 1.00 | **60.0** | 3.0 |" in told
