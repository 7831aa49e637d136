"""The README and the picture show the kernels' committed measurements, and which are stale."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from bench.kernel_results import KERNEL_RESULTS, read_results
from bench.plot import draw
from bench.readme import DAGGER, README, h100_now, kernels_table, put
from bench.stale import stale_rows


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return read_results()


@pytest.fixture(scope="module")
def stale(results: dict[str, Any]) -> dict[str, str]:
    return stale_rows(results)


def test_the_readme_shows_no_stale_measurement_as_fresh(
    results: dict[str, Any], stale: dict[str, str]
) -> None:
    written = README.read_text(encoding="utf-8")
    now = put(written, "kernels", kernels_table(results, stale, h100_now()))
    assert written == now, (
        "the README's table of the kernels is not that of "
        f"{KERNEL_RESULTS.name}, h100.json and of the kernels here: run python -m bench.readme and "
        "python -m bench.plot (before that, where a row is stale only for want of this NVRTC's "
        "machine code, python -m bench.stale --record where it is not stale); "
        f"stale now: {stale or 'nothing'}"
    )


def test_the_picture_shows_every_row_its_fraction_and_whether_it_is_stale(
    results: dict[str, Any], stale: dict[str, str], tmp_path: Path
) -> None:
    drawn = tmp_path / "now.svg"
    draw(results, stale, drawn)
    for picture in (drawn, KERNEL_RESULTS.with_suffix(".svg")):
        text = picture.read_text(encoding="utf-8")
        for row in results["rows"]:
            name = row["name"]
            label = f"{DAGGER} {name}" if name in stale else name
            assert f">{label}<" in text, f"{label} is not in {picture.name}: python -m bench.plot"
        shown = sorted(re.findall(r">(\d\.\d\d)<", text))
        assert shown == sorted(f"{row['roofline']:.2f}" for row in results["rows"]), picture.name


def test_a_picture_can_be_drawn_of_rows_that_no_workload_has(
    results: dict[str, Any], tmp_path: Path
) -> None:
    row = results["rows"][0] | {"name": "other/of-old"}
    draw(results | {"rows": [row]}, {"other/of-old": "gone"}, tmp_path / "old.svg")
    assert f">{DAGGER} other/of-old<" in (tmp_path / "old.svg").read_text(encoding="utf-8")
