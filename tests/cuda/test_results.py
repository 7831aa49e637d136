"""The committed measurements belong to the committed kernels."""

from __future__ import annotations

import json
from pathlib import Path

from kernels.compile import kernels_digest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "h200.json"


def test_the_results_were_measured_with_these_kernels() -> None:
    measured = json.loads(RESULTS.read_text())["kernels_digest"]
    assert measured == kernels_digest(), (
        f"{RESULTS.relative_to(ROOT)} was measured with other files under kernels/: measure again "
        "on a H200 (python bench/kernels.py --results bench/results/h200.json), commit the file"
    )


def test_every_workload_has_its_row() -> None:
    rows = {row["name"] for row in json.loads(RESULTS.read_text())["rows"]}
    wanted = json.loads((ROOT / "bench" / "workloads.json").read_text())["rows"]
    assert {row["name"] for row in wanted} <= rows
