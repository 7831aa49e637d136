"""Pictures of the results, as SVG: the kernels and the serving engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from bench.report.engine_results import ENGINE_RESULTS
from bench.report.kernel_results import KERNEL_RESULTS
from bench.report.provenance import RESULTS, Results, read_results, workloads
from bench.report.serving_results import SERVING_RESULTS

BLUE: Final = "#3b6ea5"
RED: Final = "#c44536"
PURPLE: Final = "#7d6b91"
GREY: Final = "#8a8a8a"
COLOURS: Final = {
    "decode": BLUE,
    "cascade": "#4c956c",
    "prefill": "#b07d3c",
    "append": PURPLE,
    "merge": PURPLE,
}
PICTURES: Final = RESULTS / "pictures"


@contextmanager
def picture(path: Path, size: tuple[float, float], panels: int = 1) -> Iterator[Sequence[Any]]:
    """Axes side by side, `size` in inches together; saved as SVG with reproducible bytes."""
    style: dict[Any, Any] = {"svg.hashsalt": "attnd", "svg.fonttype": "none", "font.size": 8}
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
        yield axes[0]
        for one in axes[0]:
            one.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def draw_kernels(results: Results, path: Path) -> None:
    """A bar for each row's roofline fraction, a dot for FlashInfer's, a line for the required."""
    known = {row["name"]: row for row in workloads()}
    rows = results["rows"][::-1]  # the first row is the topmost
    names = [row["name"] for row in rows]
    heights = range(len(rows))
    with picture(path, (7.2, 0.22 * len(rows) + 0.9)) as (axes,):
        colours = [COLOURS.get(name.split("/")[0], GREY) for name in names]
        axes.barh(heights, [row["roofline"] for row in rows], 0.66, color=colours)
        for row, height in zip(rows, heights, strict=True):
            axes.text(1.08, height, f"{row['roofline']:.2f}", ha="right", va="center")
        for key, label, form, size in (
            ("flashinfer_roofline", "FlashInfer 0.7.4", "o", 4),
            ("at_least", "required", "|", 9),
        ):
            marked = [h for h in heights if known.get(names[h], {}).get(key)]
            values = [known[names[h]][key] for h in marked]
            colour = RED if form == "o" else "black"
            axes.plot(values, marked, form, color=colour, markersize=size, label=label)
        axes.set(xlim=(0, 1.08), xlabel="fraction of the roofline", ylim=(-0.7, len(rows) - 0.3))
        axes.set_yticks(heights, names)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
        axes.set_title(f"attnd on one {results['device']}", loc="left", fontsize=9)


def draw_engines(results: Results, path: Path) -> None:
    """Prompts with the same tokens, and tokens that were computed, by tier and what happened."""
    names = list(dict.fromkeys(row["what"] for row in results["rows"]))[::-1]
    found = {(row["tier"], row["what"]): row for row in results["rows"]}
    with picture(path, (7.2, 3.0), 2) as (left, right):
        for offset, (tier, colour) in zip(
            (0.19, -0.19), (("fs", RED), ("attnd", BLUE)), strict=True
        ):
            label = "vLLM's fs tier" if tier == "fs" else "attnd"
            for axes, key in ((left, "same"), (right, "recomputed")):
                rows = [(at, found.get((tier, name))) for at, name in enumerate(names)]
                places = [at + offset for at, row in rows if row]
                values = [row.get(key, 0) for _, row in rows if row]
                axes.barh(places, values, 0.36, color=colour, label=label)
        left.set_yticks(range(len(names)), names)
        right.set_yticks(range(len(names)), [])
        left.set(xlabel="prompts with the same tokens, of 4")
        right.set(xlabel="tokens of the prompts that were computed")
        right.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 1.12), ncols=2)


def draw_serving(results: Results, path: Path) -> None:
    """Tokens a second and the first token's wait by way of serving, shared prompts and not."""
    ways = list(dict.fromkeys(row["way"] for row in results["rows"]))[::-1]
    with picture(path, (7.2, 2.2), 2) as (left, right):
        for offset, (group, colour) in zip((0.19, -0.19), ((4, BLUE), (1, GREY)), strict=True):
            rows = {row["way"]: row for row in results["rows"] if row["group"] == group}
            places = [at + offset for at in range(len(ways))]
            label = "shared by 4" if group > 1 else "not shared"
            for axes, key in ((left, "tokens_s"), (right, "first_ms")):
                found = [rows[way][key] for way in ways]
                values = [one[0] if isinstance(one, list) else one for one in found]
                axes.barh(places, values, 0.36, color=colour, label=label)
                for place, value in zip(places, values, strict=True):
                    axes.text(value, place, f" {value:.0f}", va="center")
        left.set(xlabel="tokens/s")
        right.set(xlabel="ms to the first token, median", yticks=[])
        left.set_yticks(range(len(ways)), ways)
        left.legend(frameon=False, title="system prompts", fontsize=7)


def draw_all() -> None:
    """Every picture, in bench/results/pictures."""
    draw_kernels(read_results(KERNEL_RESULTS), PICTURES / "h200.svg")
    draw_engines(read_results(ENGINE_RESULTS), PICTURES / "engines-cpu.svg")
    for name in ("serving-cpu", "serving-cuda"):
        draw_serving(read_results(SERVING_RESULTS.with_stem(name)), PICTURES / f"{name}.svg")
