"""The tables of docs/simulation.md, written by `python -m simulation --tables`."""

from __future__ import annotations

import re
from typing import Final

from bench.report.provenance import ROOT, Results
from bench.report.tables import table, with_stamp, wrapped
from simulation.fleet import Fleet
from simulation.gpu_costs import GpuCosts, Line

PAGE: Final = ROOT / "docs" / "simulation.md"


def fleet_table(results: Results) -> str:
    """Fleets of several sizes under the same load."""
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
    head = ["engines", "token hit rate", "first token p50, p99 s", "the other tokens, p50 s"]
    note = f"{results['per_s']:,.0f} requests a second for {results['seconds']:.0f} s"
    return with_stamp(table([*head, "step p50, p99 ms", "engines busy"], rows), results, note)


def rack_table(results: Results) -> str:
    """First tokens before, during and after the loss of a rack."""
    lost = results["lost"]
    at = lost["at"]
    spans = {
        "5 s before": (at - 5, at),
        "the second of the loss": (at, at + 1),
        "4 s after it": (at + 1, at + 5),
        "the rest": (at + 5, float("inf")),
    }
    rows = []
    for name, (begin, end) in spans.items():
        some = [row for row in results["rows"] if begin <= row["second"] < end]
        count = sum(row["requests"] for row in some)
        hit = sum(row["hit_rate"] * row["requests"] for row in some) / max(1, count)
        p50 = max((row["first_token_p50_s"] for row in some), default=0.0)
        p99 = max((row["first_token_p99_s"] for row in some), default=0.0)
        rows.append([name, f"{count:,}", f"{hit:.3f}", f"{p50:.2f}", f"{p99:.2f}"])
    head = ["requests that started", "count", "token hit rate"]
    head += ["first token p50 s, worst second", "p99 s, worst second"]
    note = (
        f"{lost['engines']} of {lost['of']:,} engines fail at second {at:.0f} of "
        f"{results['seconds']:.0f}; {results['requests_begun_anew']:,} requests restart elsewhere"
    )
    return with_stamp(table(head, rows), results, note)


def assumptions_table() -> str:
    """Every number that the simulation assumes, and its source."""
    fleet, costs = Fleet(), GpuCosts.measured()
    model = fleet.model
    heads = f"{model.num_qo_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    rows = [
        ["model", f"{model.num_layers} layers, {heads}, fp8 pools", "assumed: an 8B model"],
        ["its own time of a step", f"{1e3 * fleet.model_s:g} ms, on other GPUs", "assumed"],
        ["pool of an engine", f"{fleet.pool_bytes / 1e9:g} GB of an H200's 141", "assumed"],
        ["decode, a layer", line(costs.decode, "B of KV"), "measured: `decode/*` rows, fp8"],
        ["prefill, a layer", line(costs.prefill, "flop"), "measured: `prefill/*-paged` rows"],
        ["append, a layer", line(costs.append, "B"), "measured: `append/8192`, half of it fixed"],
        ["hand-over of a layer", f"{1e6 * costs.hand_over_s:.1f} µs", "measured: two GPUs"],
        ["prefill beside a step", f"at most {fleet.chunk} tokens", "assumed"],
        ["router and doors", f"{1e3 * fleet.router_s:g} ms a request", "required of the cluster"],
        ["placing", "the router's own rule; every engine's state is known at once", "as built"],
        ["blocks", "512 tokens, cached once they are held", "the trace's"],
        ["answers", "the trace's lengths, one token a step", "the trace's"],
        ["many users", "copies of the trace at its pace, without common blocks", "assumed"],
        [
            "a rack",
            f"{fleet.engines_per_rack} engines, back empty after {fleet.back_s:g} s",
            "assumed",
        ],
        ["lost requests", "restart at once elsewhere, with their whole prompt", "assumed"],
    ]
    return table(["assumption", "value", "source"], rows)


def line(costs: Line, unit: str) -> str:
    prefix = "T" if costs.per_s >= 1e12 else "G"
    rate = costs.per_s / (1e12 if prefix == "T" else 1e9)
    return f"{1e6 * costs.fixed_s:.1f} µs + 1/({rate:.3g} {prefix}{unit}/s)"


def write_tables(results: Results) -> None:
    """Put the tables of all results between their marks in docs/simulation.md."""
    text = put(PAGE.read_text(encoding="utf-8"), "assumed", assumptions_table())
    text = put(text, "fleet", fleet_table(results["fleet"]))
    text = put(text, "rack", rack_table(results["rack"]))
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")


def put(text: str, name: str, content: str) -> str:
    """`text` with `content` between the marks of a table; ValueError unless they are there once."""
    begin, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    changed, count = pattern.subn(lambda _: f"{begin}\n{wrapped(content)}\n{end}", text)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for table {name}, expected 1")
    return changed
