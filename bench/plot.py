"""Draws bench/results/h200.json as bench/results/h200.svg: `python -m bench.plot`.

A bar is the roofline fraction of a workload on the committed kernels, a dot FlashInfer's on the
same kind of machine, each by the ceilings of its own run; a line is what is required.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from bench.machine import RESULTS, workloads

COLOURS: Final = {
    "decode": "#3b6ea5",
    "cascade": "#4c956c",
    "prefill": "#b07d3c",
    "append": "#7d6b91",
    "merge": "#7d6b91",
}


def draw(results: dict[str, Any], path: Path) -> None:
    """The picture of a results file's rows, in their order, as SVG at `path`."""
    known = {row["name"]: row for row in workloads()}
    rows = results["rows"][::-1]  # the first row is the topmost
    names = [row["name"] for row in rows]
    heights = range(len(rows))
    with plt.rc_context({"svg.hashsalt": "attnd", "svg.fonttype": "none", "font.size": 8}):
        figure, axes = plt.subplots(figsize=(7.2, 0.22 * len(rows) + 0.9), layout="constrained")
        colours = [COLOURS[name.split("/")[0]] for name in names]
        axes.barh(heights, [row["roofline"] for row in rows], 0.66, color=colours)
        for row, height in zip(rows, heights, strict=True):
            axes.text(1.08, height, f"{row['roofline']:.2f}", ha="right", va="center")
        theirs = [known[name]["flashinfer_roofline"] for name in names]
        axes.plot(theirs, heights, "o", color="#c44536", markersize=4, label="FlashInfer 0.6.13")
        required = [known[name]["at_least"] for name in names]
        marks = [(least, h) for least, h in zip(required, heights, strict=True) if least]
        axes.plot(*zip(*marks, strict=True), "|", color="black", markersize=9, label="required")
        axes.set(xlim=(0, 1.08), xlabel="fraction of the roofline", ylim=(-0.7, len(rows) - 0.3))
        axes.set_yticks(heights, names)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
        axes.set_title(f"attnd on one {results['device']}", loc="left", fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    results = json.loads((RESULTS / "h200.json").read_text(encoding="utf-8"))
    draw(results, RESULTS / "h200.svg")


if __name__ == "__main__":
    main()
