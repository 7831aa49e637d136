"""Draws results as pictures beside them: h200, road-h200, cache-cpu, simulation.

Of the simulation: long sequences over many engines, and a lost rack, for light and for dark pages.
Of the cache: hit rate against pool size, beside exact LRU and a cache without end. Of the road: a
layer's time by how its caller is placed, beside the kernels alone and HTTP. Of the kernels:
a bar is the roofline fraction of a workload, a dot that of FlashInfer on the same kind of machine,
each by the ceilings of its own run; a line is what is required. A dagger marks a row that was
measured with other kernels than those here, as in the README.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from bench.cache import CACHE_RESULTS
from bench.kernel_results import KERNEL_RESULTS
from bench.provenance import RESULTS, read_results, workloads
from simulation.tables import short

COLOURS: Final = {
    "decode": "#3b6ea5",
    "cascade": "#4c956c",
    "prefill": "#b07d3c",
    "append": "#7d6b91",
    "merge": "#7d6b91",
}
OTHER: Final = "#8a8a8a"
STEPS: Final = "#3b6ea5"
PLACES: Final = {
    "mps": "step, one GPU, MPS",
    "other_gpu": "step, two GPUs",
    "time_sliced": "step, one GPU, time-sliced",
}
ROAD_RESULTS: Final = RESULTS / "road-h200.json"
MARKS: Final[dict[str, dict[str, Any]]] = {
    "flashinfer_roofline": {
        "marker": "o",
        "linestyle": "",
        "color": "#c44536",
        "markersize": 4,
        "label": "FlashInfer 0.7.2",
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


DARK: Final = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#d0d7de"
) | dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#0d1117")
"""What a picture for dark pages has in place of black on white."""


@contextmanager
def picture(
    path: Path, size: tuple[float, float], panels: int = 1, *, dark: bool = False
) -> Iterator[Sequence[Any]]:
    """Axes side by side, `size` in inches together; saved as SVG, the same bytes each time."""
    style: dict[Any, Any] = {"svg.hashsalt": "attnd", "svg.fonttype": "none", "font.size": 8}
    with plt.rc_context(style | (DARK if dark else {})):
        figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
        yield axes[0]
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def draw_kernels(results: dict[str, Any], path: Path) -> None:
    """The picture of a results file's rows, in their order, as SVG at `path`."""
    known = {row["name"]: row for row in workloads()}
    rows = results["rows"][::-1]  # the first row is the topmost
    names = [row["name"] for row in rows]
    heights = range(len(rows))
    with picture(path, (7.2, 0.22 * len(rows) + 0.9)) as (axes,):
        colours = [COLOURS.get(name.split("/")[0], OTHER) for name in names]
        axes.barh(heights, [row["roofline"] for row in rows], 0.66, color=colours)
        for row, height in zip(rows, heights, strict=True):
            axes.text(1.08, height, f"{row['roofline']:.2f}", ha="right", va="center")
        for key, style in MARKS.items():
            values = [known.get(name, {}).get(key) for name in names]
            marks = [(value, h) for value, h in zip(values, heights, strict=True) if value]
            axes.plot([x for x, _ in marks], [y for _, y in marks], **style)
        axes.set(xlim=(0, 1.08), xlabel="fraction of the roofline", ylim=(-0.7, len(rows) - 0.3))
        axes.set_yticks(heights, names)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
        axes.set_title(f"attnd on one {results['device']}", loc="left", fontsize=9)


def draw_cache(results: dict[str, Any], path: Path) -> None:
    """Hit rate against pool size, as SVG at `path`."""
    shares = [100 * row["share"] for row in results["rows"]]
    with picture(path, (5.4, 2.8)) as (axes,):
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


def draw_road(results: dict[str, Any], path: Path) -> None:
    """A layer's microseconds by place, for each batch, as SVG at `path`."""
    sizes = list(dict.fromkeys((row["batch"], row["kv_len"]) for row in results["rows"]))
    found = {(row["batch"], row["kv_len"], row["place"]): row for row in results["rows"]}
    with picture(path, (7.2, 1.7), len(sizes)) as panels:
        for axes, (batch, kv_len) in zip(panels, sizes, strict=True):
            bars = road_bars([found[batch, kv_len, place] for place in PLACES])
            names, values, colours = zip(*reversed(bars), strict=True)
            axes.barh(names, values, 0.66, color=colours)
            for height, value in enumerate(values):
                axes.text(value * 1.1, height, f"{value:.0f}", va="center")
            axes.set(xscale="log", xlim=(4, 6000), xlabel="µs a layer")
            axes.tick_params("y", labelleft=axes is panels[0])
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(f"{batch} x {kv_len}", loc="left", fontsize=9)


def road_bars(rows: list[dict[str, Any]]) -> list[tuple[str, float, str]]:
    """Name, microseconds and colour of each bar: kernels alone, steps by place, HTTP; the best of
    the places' runs for those that all of them measured."""
    kernels = ("kernels alone", min(row["kernels_us"] for row in rows), OTHER)
    steps = [
        (PLACES[row["place"]], min(row[how]["layer_us"] for how in ("steps", "graph")), STEPS)
        for row in rows
    ]
    return [kernels, *steps, ("Client, HTTP", min(row["http_us"] for row in rows), "#c44536")]


def draw_simulation(results: dict[str, Any], path: Path, dark: bool) -> None:
    """Decode of long sequences by engines, and first tokens around the loss of a rack."""
    with picture(path, (7.2, 2.8), 2, dark=dark) as (left, right):
        lengths = list(dict.fromkeys(row["tokens"] for row in results["long"]["rows"]))
        for at, tokens in enumerate(lengths):
            rows = [row for row in results["long"]["rows"] if row["tokens"] == tokens]
            engines = [row["engines"] for row in rows]
            colour = plt.get_cmap("viridis")(0.15 + 0.7 * at / max(1, len(lengths) - 1))
            values = [row["decode_ms"] for row in rows]
            left.plot(engines, values, ".-", color=colour, label=short(tokens))
        left.set(xscale="log", yscale="log", xlabel="engines", ylabel="attention of a token, ms")
        counts = sorted({row["engines"] for row in results["long"]["rows"]})
        left.set_xticks(counts, [str(count) for count in counts])
        left.legend(frameon=False, title="tokens", fontsize=7)
        left.set_title("one sequence over many engines", loc="left", fontsize=9)
        if "rack" in results:
            draw_rack(results["rack"], right)
        for axes in (left, right):
            axes.minorticks_off()
            axes.spines[["top", "right"]].set_visible(False)


def draw_rack(rack: dict[str, Any], axes: Any) -> None:
    """Seconds to the first token by the second in which requests began."""
    at, seconds = rack["lost"]["at"], rack["seconds"]
    rows = [row for row in rack["rows"] if at - 10 <= row["second"] < seconds - 1]
    begun = [row["second"] for row in rows]
    for name, colour in (("p99", "#c44536"), ("p50", COLOURS["decode"])):
        values = [row[f"first_token_{name}_s"] for row in rows]
        axes.plot(begun, values, ".-", color=colour, label=name)
    axes.axvline(at, color=OTHER, linestyle="--")
    axes.set(yscale="log", xlabel="request begun at, s", ylabel="first token after, s")
    axes.legend(frameon=False, fontsize=7)
    lost = rack["lost"]
    axes.set_title(f"{lost['engines']} of {lost['of']:,} engines lost", loc="left", fontsize=9)


def draw_all() -> None:
    """Every picture, beside its results."""
    draw_kernels(read_results(KERNEL_RESULTS), KERNEL_RESULTS.with_suffix(".svg"))
    draw_road(read_results(ROAD_RESULTS), ROAD_RESULTS.with_suffix(".svg"))
    draw_cache(read_results(CACHE_RESULTS), CACHE_RESULTS.with_suffix(".svg"))
    simulated = read_results(RESULTS / "simulation.json")
    for dark, name in ((False, "simulation.svg"), (True, "simulation-dark.svg")):
        draw_simulation(simulated, RESULTS / name, dark)
