"""The committed measurements belong to the committed kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.machine import workloads
from bench.plot import draw
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
    assert {row["name"] for row in workloads()} <= rows


def test_the_picture_shows_every_row_and_its_fraction(tmp_path: Path) -> None:
    results = json.loads(RESULTS.read_text())
    drawn = tmp_path / "now.svg"
    draw(results, drawn)
    for picture in (drawn, RESULTS.with_suffix(".svg")):
        text = picture.read_text()
        for row in results["rows"]:
            assert f">{row['name']}<" in text, f"{row['name']} is not in {picture.name}"
        shown = sorted(re.findall(r">(\d\.\d\d)<", text))
        assert shown == sorted(f"{row['roofline']:.2f}" for row in results["rows"]), picture.name
