"""Engines and clusters simulated, event by event, from measured tables and a trace.

    python -m simulation --trace FILE --compare            # beside what bench.cluster measured
    python -m simulation --trace FILE --cluster 16         # the router's rule, so many times
    python -m simulation --trace FILE --fleet [--engines 1200 1600 2000] [--per-s 10000]
    python -m simulation --trace FILE --rack 1600          # a rack is lost on the way
    python -m simulation --long                            # sequences over many engines
    python -m simulation --tables                          # into docs/simulation.md

--compare tells whether the model of calls is within 15 % of one and of two real engines. Each of
the others keeps its figures in bench/results/simulation.json. What is assumed stands in a table of
docs/simulation.md, a line for each number.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.cases.trace import Request, generated_trace, multiplied, read_trace, shortened
from bench.cluster import CALIBRATION, CLUSTER_RESULTS, LONGEST, WORKERS
from bench.provenance import RESULTS, provenance, write_results
from simulation.calls import CallCosts
from simulation.cluster import Clustered
from simulation.comparison import MOST_OFF, compare, replays
from simulation.fleet import Fleet, Outcome, Simulation, Told
from simulation.gpu_costs import GpuCosts
from simulation.long_sequences import Links, Setting, long_rows
from simulation.tables import write_tables

SIMULATION: Final = RESULTS / "simulation.json"
SECONDS: Final = 45.0
WARM: Final = 2 / 3
"""Of the seconds, before anything counts: pools begin empty."""


def as_measured(requests: Sequence[Request]) -> tuple[dict[str, Any], CallCosts, list[Request]]:
    """What bench.cluster measured, what calls cost then, and the requests that it played."""
    measured = json.loads(CLUSTER_RESULTS.read_text(encoding="utf-8"))
    costs = CallCosts.told(json.loads(CALIBRATION.read_text(encoding="utf-8")))
    return measured, costs, shortened(requests[-measured["requests"] :], LONGEST)


def compared(requests: Sequence[Request]) -> dict[str, Any]:
    """Every figure of bench.cluster's replays, measured and simulated."""
    measured, costs, played = as_measured(requests)
    rows = compare(measured, costs, played)
    for row in rows:
        print(
            f"{row.replay:9} {row.figure:15} {row.measured:10} ± {row.spread / 2:5.1%} "
            f"{row.simulated:10} {row.off:+7.1%}"
        )
    holds = all(row.holds for row in rows)
    print(f"{'within' if holds else 'NOT within'} {MOST_OFF:.0%}")
    return {
        "rows": [asdict(row) | {"off": round(row.off, 4)} for row in rows],
        "holds": holds,
        "most_off": MOST_OFF,
        "measured": measured["date"],
    }


def clustered(requests: Sequence[Request], times: int) -> dict[str, Any]:
    """What the cluster is held to, simulated so many times: what calls take differs by chance."""
    measured, costs, played = as_measured(requests)
    every: dict[str, list[float]] = {}
    for seed in range(times):
        for name, value in once(measured, costs, played, seed).items():
            every.setdefault(name, []).append(value)
    rows = [
        {
            "figure": name,
            "mean": round(sum(values) / times, 3),
            "least": min(values),
            "most": max(values),
        }
        for name, values in every.items()
    ]
    for row in rows:
        print(row)
    return {"rows": rows, "times": times, "measured": measured["date"]}


def once(
    measured: dict[str, Any], costs: CallCosts, requests: Sequence[Request], seed: int
) -> dict[str, float]:
    """One service, separate ones and a cluster, all with the same chance."""
    engines = measured["engines"]
    one, separate = replays(measured, costs, requests, seed).values()
    pools = [measured["pages_each"]] * engines
    whole = Clustered(costs, measured["cores"], pools, seed).replay(requests, WORKERS * engines)
    return {
        "throughput_of_separate": round(whole["requests_per_s"] / separate["requests_per_s"], 3),
        "hit_rate_of_one": round(whole["hit_rate"] / max(1e-9, one["hit_rate"]), 3),
        "p50_of_separate": round(whole["p50_ms"] / separate["p50_ms"], 3),
        "p99_of_separate": round(whole["p99_ms"] / separate["p99_ms"], 3),
    }


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """What requests met, those that began in some stretch of time."""
    if not outcomes:
        return {}
    first = np.percentile([one.first_s for one in outcomes], (50, 99))
    pace = [one.whole_s - one.first_s for one in outcomes]
    return {
        "requests": len(outcomes),
        "hit_rate": round(sum(o.cached for o in outcomes) / sum(o.tokens for o in outcomes), 4),
        "first_token_p50_s": round(float(first[0]), 3),
        "first_token_p99_s": round(float(first[1]), 3),
        "answer_p50_s": round(float(np.median(pace)), 2),
    }


def run_fleet(
    requests: Sequence[Request], fleet: Fleet, lose_rack_at: float | None = None
) -> tuple[Told, float]:
    """A run, and the seconds that it took here."""
    begun = time.perf_counter()
    told = Simulation(fleet, GpuCosts.measured(fp8=True)).run(requests, lose_rack_at)
    return told, time.perf_counter() - begun


def fleet_row(requests: Sequence[Request], fleet: Fleet, seconds: float) -> dict[str, Any]:
    told, took_s = run_fleet(requests, fleet)
    counted = [one for one in told.outcomes if one.begun >= WARM * seconds]
    steps = 1e3 * np.percentile(told.steps_s, (50, 99))
    ends = max(one.begun + one.whole_s for one in told.outcomes)
    row = {
        "engines": fleet.engines,
        **figures(counted),
        "step_p50_ms": round(float(steps[0]), 2),
        "step_p99_ms": round(float(steps[1]), 2),
        "busy": round(told.busy_s / fleet.engines / ends, 3),
        "refused": told.refused,
    }
    print(f"{row}  ({took_s:.0f} s)", flush=True)
    return row


def rack_rows(requests: Sequence[Request], fleet: Fleet, seconds: float) -> dict[str, Any]:
    """A rack lost once pools are warm: what requests met by the second in which they began."""
    at = WARM * seconds
    told, took_s = run_fleet(requests, fleet, at)
    by_second: dict[int, list[Outcome]] = {}
    for one in told.outcomes:
        by_second.setdefault(int(one.begun), []).append(one)
    rows = [{"second": second, **figures(by_second[second])} for second in sorted(by_second)]
    print(f"{len(told.lost)} requests lost their engine  ({took_s:.0f} s)")
    lost = {"engines": fleet.engines_per_rack, "of": fleet.engines, "at": at}
    return {"lost": lost, "requests_begun_anew": len(told.lost), "rows": rows}


def with_others(rows: list[dict[str, Any]], given: dict[str, float]) -> list[dict[str, Any]]:
    """These rows and those of earlier runs of the same load with other engines."""
    earlier = kept().get("fleet", {})
    same = all(earlier.get(name) == value for name, value in given.items())
    counts = {row["engines"] for row in rows}
    others = [row for row in earlier.get("rows", ()) if row["engines"] not in counts]
    return sorted(rows + (others if same else []), key=lambda row: int(row["engines"]))


def kept() -> dict[str, Any]:
    """The figures so far."""
    if not SIMULATION.exists():
        return {}
    held: dict[str, Any] = json.loads(SIMULATION.read_text(encoding="utf-8"))
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--made-up", type=int, default=2000, metavar="COUNT")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--cluster", type=int, metavar="TIMES")
    parser.add_argument("--fleet", action="store_true")
    parser.add_argument("--engines", type=int, nargs="+", default=(1200, 1600, 2000))
    parser.add_argument("--per-s", type=float, default=10_000.0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rack", type=int, metavar="ENGINES")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a small run of everything, not kept")
    args = parser.parse_args()
    if args.quick:
        args.compare = args.fleet = args.long = True
        args.cluster, args.engines, args.per_s, args.rack = 1, (80,), 100.0, 80
    trace = read_trace(args.trace) if args.trace else generated_trace(args.made_up)
    about = provenance(["numpy"])
    if args.trace:
        about["command"] = about["command"].replace(str(args.trace), args.trace.name)
    found: dict[str, Any] = {}
    given = {"per_s": args.per_s, "seconds": args.seconds}
    if args.compare:
        found["compare"] = about | compared(trace)
    if args.cluster:
        found["clustered"] = about | clustered(trace, args.cluster)
    if args.fleet:
        every = multiplied(trace, args.per_s, args.seconds)
        rows = [fleet_row(every, Fleet(engines=count), args.seconds) for count in args.engines]
        found["fleet"] = about | given | {"rows": with_others(rows, given)}
    if args.rack:
        every = multiplied(trace, args.per_s, args.seconds)
        fleet = Fleet(engines=args.rack)
        found["rack"] = about | given | rack_rows(every, fleet, args.seconds)
    if args.long:
        fleet, links = Fleet(), Links.measured()
        setting = Setting(GpuCosts.measured(fp8=True), fleet.model, links, fleet.pool_bytes)
        found["long"] = about | {"rows": [asdict(row) for row in long_rows(setting)]}
    if found and not args.quick:
        write_results(SIMULATION, kept() | found)
    if args.tables:
        write_tables(kept())


if __name__ == "__main__":
    main()
