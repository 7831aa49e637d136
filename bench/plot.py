"""Draws bench/results/h200.json and cache-cpu.json as pictures beside them: `python -m bench.plot`.

Of the cache: hit rate against pool size, beside exact LRU and a cache without end. Of the kernels:
a bar is the roofline fraction of a workload, a dot that of FlashInfer on the same kind of machine,
each by the ceilings of its own run; a line is what is required. A dagger marks a row that was
measured with other kernels than those here, as in the README.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from bench.cache import CACHE_RESULTS
from bench.kernel_results import KERNEL_RESULTS, read_results
from bench.machine import workloads
from bench.readme import DAGGER
from bench.stale import stale_rows

COLOURS: Final = {
    "decode": "#3b6ea5",
    "cascade": "#4c956c",
    "prefill": "#b07d3c",
    "append": "#7d6b91",
    "merge": "#7d6b91",
}
OTHER: Final = "#8a8a8a"
MARKS: Final[dict[str, dict[str, Any]]] = {
    "flashinfer_roofline": {
        "marker": "o",
        "linestyle": "",
        "color": "#c44536",
        "markersize": 4,
        "label": "FlashInfer 0.6.13",
    },
    "at_least": {
        "marker": "|",
        "linestyle": "",
        "color": "black",
        "markersize": 9,
        "label": "required",
    },
}
"""How a figure of workloads.json is drawn, by its name there."""


def draw(results: dict[str, Any], stale: Container[str], path: Path) -> None:
    """The picture of a results file's rows, in their order, as SVG at `path`."""
    known = {row["name"]: row for row in workloads()}
    rows = results["rows"][::-1]  # the first row is the topmost
    names = [row["name"] for row in rows]
    labels = [f"{DAGGER} {name}" if name in stale else name for name in names]
    heights = range(len(rows))
    with plt.rc_context({"svg.hashsalt": "attnd", "svg.fonttype": "none", "font.size": 8}):
        figure, axes = plt.subplots(figsize=(7.2, 0.22 * len(rows) + 0.9), layout="constrained")
        colours = [COLOURS.get(name.split("/")[0], OTHER) for name in names]
        axes.barh(heights, [row["roofline"] for row in rows], 0.66, color=colours)
        for row, height in zip(rows, heights, strict=True):
            axes.text(1.08, height, f"{row['roofline']:.2f}", ha="right", va="center")
        for key, style in MARKS.items():
            values = [known.get(name, {}).get(key) for name in names]
            marks = [(value, h) for value, h in zip(values, heights, strict=True) if value]
            axes.plot([x for x, _ in marks], [y for _, y in marks], **style)
        axes.set(xlim=(0, 1.08), xlabel="fraction of the roofline", ylim=(-0.7, len(rows) - 0.3))
        axes.set_yticks(heights, labels)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
        axes.set_title(f"attnd on one {results['device']}", loc="left", fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def draw_cache(results: dict[str, Any], path: Path) -> None:
    """Hit rate against pool size, as SVG at `path`."""
    shares = [100 * row["share"] for row in results["rows"]]
    with plt.rc_context({"svg.hashsalt": "attnd", "svg.fonttype": "none", "font.size": 8}):
        figure, axes = plt.subplots(figsize=(5.4, 2.8), layout="constrained")
        axes.axhline(results["endless"], color=OTHER, linestyle="--", label="without end")
        lru = [row["lru_hit_rate"] for row in results["rows"]]
        axes.plot(shares, lru, "o", color="#c44536", markersize=7, mfc="none", label="exact LRU")
        attnd = [row["hit_rate"] for row in results["rows"]]
        axes.plot(shares, attnd, ".-", color=COLOURS["decode"], label="attnd")
        axes.set(xscale="log", ylim=(0, 0.7), ylabel="hit rate, by tokens")
        axes.set(xlabel="pool, in % of the trace's distinct pages")
        axes.set_xticks(shares, [f"{share:g}" for share in shares], minor=False)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", frameon=False)
        axes.set_title(results["trace"], loc="left", fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    results = read_results()
    draw(results, stale_rows(results), KERNEL_RESULTS.with_suffix(".svg"))
    cache = json.loads(CACHE_RESULTS.read_text(encoding="utf-8"))
    draw_cache(cache, CACHE_RESULTS.with_suffix(".svg"))


if __name__ == "__main__":
    main()
