"""Pictures of the results, as SVG: kernels, steps by place, cache and simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from bench.cache import CACHE_RESULTS
from bench.report.kernel_results import KERNEL_RESULTS
from bench.report.provenance import RESULTS, Results, read_results, workloads
from bench.report.serving_results import SERVING_RESULTS
from bench.tiers import TIERS_RESULTS

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
PLACES: Final = {
    "mps": "step, one GPU, MPS",
    "other_gpu": "step, two GPUs",
    "time_sliced": "step, one GPU, time-sliced",
}
ROAD_RESULTS: Final = RESULTS / "road-h200.json"
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
            ("flashinfer_roofline", "FlashInfer 0.7.2", "o", 4),
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


def draw_cache(results: Results, path: Path) -> None:
    """Hit rate by pool size, beside exact LRU and an unbounded cache."""
    shares = [100 * row["share"] for row in results["rows"]]
    lru, attnd = ([row[key] for row in results["rows"]] for key in ("lru_hit_rate", "hit_rate"))
    with picture(path, (5.4, 2.8)) as (axes,):
        axes.axhline(results["endless"], color=GREY, linestyle="--", label="unbounded")
        axes.plot(shares, lru, "o", color=RED, markersize=7, mfc="none", label="exact LRU")
        axes.plot(shares, attnd, ".-", color=BLUE, label="attnd")
        axes.set(xscale="log", ylim=(0, 0.7), ylabel="hit rate, by tokens")
        axes.set(xlabel="pool, in % of the trace's distinct pages")
        axes.set_xticks(shares, [f"{share:g}" for share in shares], minor=False)
        axes.minorticks_off()
        axes.legend(loc="lower right", frameon=False)
        axes.set_title(results["trace"], loc="left", fontsize=9)


def draw_road(results: Results, path: Path) -> None:
    """A layer's microseconds by the caller's place, for each batch."""
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
            axes.set_title(f"{batch} x {kv_len}", loc="left", fontsize=9)


def road_bars(rows: list[dict[str, Any]]) -> list[tuple[str, float, str]]:
    """Name, microseconds and colour of each bar; the best run where places share a figure."""
    kernels = ("kernels alone", min(row["kernels_us"] for row in rows), GREY)
    steps = [
        (PLACES[row["place"]], min(row[how]["layer_us"] for how in ("steps", "graph")), BLUE)
        for row in rows
    ]
    return [kernels, *steps, ("Client, HTTP", min(row["http_us"] for row in rows), RED)]


def draw_tiers(results: Results, path: Path) -> None:
    """Hit rates with and without tiers, by the tier that had the tokens, beside exact LRU."""
    rows = results["rows"][::-1]
    total = rows[0]["hits_checked"] / rows[0]["hit_rate"]
    with picture(path, (7.2, 1.7)) as (axes,):
        begin = [0.0] * len(rows)
        for name, colour in (("pool", BLUE), ("host", PURPLE), ("disk", GREY)):
            found = [row["hits_checked"] - row["from_host"] - row["from_disk"] for row in rows]
            counts = found if name == "pool" else [row[f"from_{name}"] for row in rows]
            shares = [count / total for count in counts]
            axes.barh(range(len(rows)), shares, 0.6, left=begin, color=colour, label=name)
            begin = [at + share for at, share in zip(begin, shares, strict=True)]
        for place, row in enumerate(rows):
            axes.plot([row["lru_hit_rate"]] * 2, [place - 0.4, place + 0.4], color=RED)
            axes.text(row["hit_rate"] + 0.01, place, f"{row['hit_rate']:.3f}", va="center")
        axes.plot([], [], color=RED, label="exact LRU")
        axes.set_yticks(range(len(rows)), [row["tiers"] for row in rows])
        axes.set(xlabel="share of tokens found", xlim=(0, 0.85))
        axes.legend(frameon=False, title="tokens from", fontsize=7, loc="lower right")


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


def draw_rack(rack: Results, path: Path) -> None:
    """Seconds to the first token, by the second in which requests started."""
    lost, seconds = rack["lost"], rack["seconds"]
    at = lost["at"]
    rows = [row for row in rack["rows"] if at - 10 <= row["second"] < seconds - 1]
    begun = [row["second"] for row in rows]
    with picture(path, (4.2, 2.4)) as (axes,):
        for name, colour in (("p99", RED), ("p50", BLUE)):
            values = [row[f"first_token_{name}_s"] for row in rows]
            axes.plot(begun, values, ".-", color=colour, label=name)
        axes.axvline(at, color=GREY, linestyle="--")
        axes.set(yscale="log", xlabel="request begun at, s", ylabel="first token after, s")
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=7)
        axes.set_title(f"{lost['engines']} of {lost['of']:,} engines lost", loc="left", fontsize=9)


def draw_all() -> None:
    """Every picture, in bench/results/pictures."""
    draw_kernels(read_results(KERNEL_RESULTS), PICTURES / "h200.svg")
    draw_road(read_results(ROAD_RESULTS), PICTURES / "road-h200.svg")
    draw_cache(read_results(CACHE_RESULTS), PICTURES / "cache-cpu.svg")
    draw_tiers(read_results(TIERS_RESULTS), PICTURES / "tiers-cpu.svg")
    for name in ("serving-cpu", "serving-cuda"):
        draw_serving(read_results(SERVING_RESULTS.with_stem(name)), PICTURES / f"{name}.svg")
    draw_rack(read_results(RESULTS / "simulation.json")["rack"], PICTURES / "simulation.svg")
