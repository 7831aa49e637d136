"""The tables of docs/simulation.md: `python -m simulation --tables`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from bench.provenance import RESULTS
from bench.tables import measured
from simulation.calls import SPREAD
from simulation.fleet import Fleet
from simulation.gpu_costs import GpuCosts
from simulation.long_sequences import PREFILL_CHUNK, Links

CLUSTER: Final = RESULTS / "cluster-cpu.json"
PAGE: Final = RESULTS.parents[1] / "docs" / "simulation.md"
FIGURES: Final = {
    "requests_per_s": "requests a second",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "hit_rate": "token hit rate",
}
REPLAYS: Final = {"one": "one service", "separate": "two services, perfect split"}
HELD_TO: Final = {
    "throughput_of_separate": ("throughput beside separate services", "0.9"),
    "hit_rate_of_one": ("token hit rate beside one engine", "0.95"),
    "p50_of_separate": ("p50 beside separate services", ""),
    "p99_of_separate": ("p99 beside separate services", ""),
}
"""What the cluster is held to."""
ROW: Final = "| {} |"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [ROW.format(" | ".join(head)), ROW.format(" | ".join("---" for _ in head))]
    lines[1] = lines[1].replace("| ", "|").replace(" |", "|")
    return "\n".join([*lines, *(ROW.format(" | ".join(row)) for row in rows)])


def provenance_of(results: dict[str, Any]) -> str:
    return f"\n\n{measured(results)}"


def compare_table(results: dict[str, Any]) -> str:
    rows = [
        [
            REPLAYS[row["replay"]],
            FIGURES[row["figure"]],
            f"{row['measured']:g}",
            f"{row['spread']:.0%}",
            f"{row['simulated']:g}",
            f"{row['off']:+.1%}",
        ]
        for row in results["rows"]
    ]
    verdict = "All within" if results["holds"] else "**Not all within**"
    head = ["replay", "figure", "measured", "from round to round", "simulated", "off"]
    return f"{table(head, rows)}\n\n{verdict} {results['most_off']:.0%}.{provenance_of(results)}"


def clustered_table(results: dict[str, Any]) -> str:
    rows = [
        [
            HELD_TO[row["figure"]][0],
            f"{row['mean']:.3f}",
            f"{row['least']:.3f} to {row['most']:.3f}",
            HELD_TO[row["figure"]][1],
        ]
        for row in results["rows"]
    ]
    head = ["the cluster, simulated", f"mean of {results['times']}", "from to", "at least"]
    return table(head, rows) + provenance_of(results)


def cluster_table(results: dict[str, Any]) -> str:
    """What bench.cluster measured, and what the cluster is held to."""
    names = REPLAYS | {"cluster": "the cluster"}
    head = ["replayed on", *FIGURES.values(), "small calls a second", "others used"]
    rows = [
        [
            names[row["name"]],
            *(f"{row[figure]:g} ± {row['spread'][figure] / 2:.0%}" for figure in FIGURES),
            f"{row['small_per_s']:,.0f}",
            f"at most {max(told['others'] for told in row['rounds']):.1%}",
        ]
        for row in results["rows"]
    ]
    alone, through = results["call_ms"]
    held = [
        [HELD_TO[name][0], f"{results[name]:.3f}", HELD_TO[name][1]]
        for name in ("throughput_of_separate", "hit_rate_of_one")
    ]
    held += [
        ["calls routed a second by one door", f"{results['calls_routed_per_s']:,.0f}", "1,500"],
        ["added to a small call, p50 ms", f"{results['added_ms']:+.2f}", "1"],
    ]
    told = f"{table(head, rows)}\n\n{table(['the cluster', 'measured', 'at least'], held)}"
    about = (
        f"\n\nMedians of {len(results['rows'][0]['rounds'])} rounds and half of what lies between "
        f"them; a small call took {alone:.2f} ms through a service's door and {through:.2f} ms "
        f"through the cluster's. {results['requests']} requests, pools of "
        f"{results['pages_each']:,} pages each, {results['share']:.0%} of the distinct ones in all."
    )
    return told + about + provenance_of(results)


def long_table(results: dict[str, Any]) -> str:
    head = ["tokens", "engines", "of each pool", "decode ms a token", "prefill s"]
    head.append("prefill s, merged in pieces")
    rows = [
        [
            short(row["tokens"]),
            str(row["engines"]),
            f"{row['pool_share']:.1%}",
            f"{row['decode_ms']:.2f}",
            f"{row['prefill_s']:,.0f}",
            f"{row['prefill_in_pieces_s']:,.0f}",
        ]
        for row in results["rows"]
    ]
    return table(head, rows) + provenance_of(results)


def short(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 2**10}k"


def fleet_table(results: dict[str, Any]) -> str:
    head = [
        "engines",
        "token hit rate",
        "first token p50, p99 s",
        "then, p50 s",
        "step p50, p99 ms",
    ]
    head.append("engines busy")
    rows = [
        [
            f"{row['engines']:,}",
            f"{row['hit_rate']:.3f}",
            f"{row['first_token_p50_s']:.2f}, {row['first_token_p99_s']:.2f}",
            f"{row['answer_p50_s']:.2f}",
            f"{row['step_p50_ms']:.1f}, {row['step_p99_ms']:.0f}",
            f"{row['busy']:.0%}",
        ]
        for row in results["rows"]
    ]
    told = f"\n\n{results['per_s']:,.0f} requests a second for {results['seconds']:.0f} s."
    return table(head, rows) + told + provenance_of(results)


def rack_table(results: dict[str, Any]) -> str:
    at = results["lost"]["at"]
    stretches = {
        "5 s before": (at - 5, at),
        "the second of the loss": (at, at + 1),
        "4 s after it": (at + 1, at + 5),
        "the rest": (at + 5, float("inf")),
    }
    rows = []
    for name, (begin, end) in stretches.items():
        some = [row for row in results["rows"] if begin <= row["second"] < end]
        count = sum(row["requests"] for row in some)
        hit = sum(row["hit_rate"] * row["requests"] for row in some) / max(1, count)
        worst = max((row["first_token_p99_s"] for row in some), default=0.0)
        half = max((row["first_token_p50_s"] for row in some), default=0.0)
        rows.append([name, f"{count:,}", f"{hit:.3f}", f"{half:.2f}", f"{worst:.2f}"])
    head = ["requests that began", "how many", "token hit rate"]
    head += ["first token p50 s, worst second", "p99 s, worst second"]
    lost, anew = results["lost"], results["requests_begun_anew"]
    told = (
        f"\n\n{lost['engines']} of {lost['of']:,} engines are lost at once at second {at:.0f} of "
        f"{results['seconds']:.0f}; {anew:,} requests begin anew elsewhere."
    )
    return table(head, rows) + told + provenance_of(results)


def assumed_table(_: dict[str, Any]) -> str:
    """Every number that the simulation takes for granted, and where it comes from."""
    fleet, links, costs = Fleet(), Links.measured(), GpuCosts.measured(fp8=True)
    model = fleet.model
    heads = f"{model.num_qo_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    rows = [
        ["model", f"{model.num_layers} layers, {heads}, fp8 pools", "assumed: an 8B model"],
        ["its own part of a step", f"{1e3 * fleet.model_s:g} ms, on other GPUs", "assumed"],
        ["pool of an engine", f"{fleet.pool_bytes / 1e9:g} GB of an H200's 141", "assumed"],
        ["decode, a layer", line(costs.decode, "B of KV"), "measured: `decode/*` rows, fp8"],
        ["prefill, a layer", line(costs.prefill, "flop"), "measured: `prefill/*-paged` rows"],
        ["append, a layer", line(costs.append, "B"), "measured: `append/8192`, half of it fixed"],
        ["merge of states", line(costs.merge, "B"), "measured: `merge/*` rows"],
        ["hand-over of a layer", f"{1e6 * costs.hand_over_s:.1f} µs", "measured: two GPUs"],
        ["prefill beside a step", f"at most {fleet.chunk} tokens", "assumed"],
        ["router and doors", f"{1e3 * fleet.router_s:g} ms a request", "required of the cluster"],
        [
            "placing",
            "the router's own rule; every engine and its pace are known at once",
            "as built",
        ],
        ["what calls take", f"log-normal, {SPREAD:.0%}, in the cluster alone", "assumed"],
        ["blocks", "512 tokens, found again once they are held", "the trace's"],
        ["answers", "as long as the trace says, one token a step", "the trace's"],
        ["many users", "copies of the trace at its pace, sharing nothing", "assumed"],
        [
            "a rack",
            f"{fleet.engines_per_rack} engines, back empty after {fleet.back_s:g} s",
            "assumed",
        ],
        ["lost requests", "begin anew at once, elsewhere, with their whole prompt", "assumed"],
        [
            f"link between engines, up to {links.engines_per_host}",
            f"{1e6 * links.host_s:.1f} µs one way, {links.host_bytes_per_s / 1e9:g} GB/s",
            "measured with two of one host; the rate is assumed",
        ],
        [
            "link between hosts",
            f"{1e6 * links.net_s:g} µs one way, {links.net_bytes_per_s / 1e9:g} GB/s an engine",
            "assumed: 400 Gbit/s",
        ],
        ["long prompts", f"in chunks of {PREFILL_CHUNK} tokens", "assumed"],
    ]
    return table(["what", "how much", "from"], rows)


def line(costs: Any, unit: str) -> str:
    prefix = "T" if costs.per_s >= 1e12 else "G"
    rate = costs.per_s / (1e12 if prefix == "T" else 1e9)
    return f"{1e6 * costs.fixed_s:.1f} µs + 1/({rate:.3g} {prefix}{unit}/s)"


TABLES: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "compare": compare_table,
    "clustered": clustered_table,
    "long": long_table,
    "fleet": fleet_table,
    "rack": rack_table,
}


def put(text: str, name: str, content: str) -> str:
    """`text` with `content` between the marks of a table; ValueError unless they are there once."""
    begin, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    changed, count = pattern.subn(lambda _: f"{begin}\n{content}\n{end}", text)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for table {name}, expected 1")
    return changed


def write_tables(results: dict[str, Any]) -> None:
    """Put the tables of what there is between their marks."""
    text = put(PAGE.read_text(encoding="utf-8"), "assumed", assumed_table({}))
    for name, render in TABLES.items():
        if name in results:
            text = put(text, name, render({"commit": results["commit"]} | results[name]))
    if CLUSTER.exists():
        measured = json.loads(CLUSTER.read_text(encoding="utf-8"))
        text = put(text, "cluster", cluster_table(measured))
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
