"""Engines and clusters, simulated event by event from measured tables and a trace.

    python -m simulation --trace FILE --fleet [--engines 2400 3000] [--per-s 10000]
    python -m simulation --trace FILE --rack 3000      # a rack fails during the run
    python -m simulation --tables                      # write docs/simulation.md
    python -m simulation --quick                       # a small run of everything, only printed

The figures are kept in bench/results/simulation.json. docs/simulation.md lists every assumption.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.cases.trace import TraceRequest, generated_trace, multiplied, read_trace
from bench.report.provenance import RESULTS, Results, provenance, read_results, write_results
from simulation.fleet import Fleet, Outcome, Simulation
from simulation.gpu_costs import GpuCosts
from simulation.tables import write_tables

SIMULATION: Final = RESULTS / "simulation.json"
SECONDS: Final = 45.0
WARM: Final = 2 / 3
"""The share of the seconds that is warm-up: pools start empty."""


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Hit rate and times of requests; empty without requests."""
    if not outcomes:
        return {}
    first = np.percentile([one.first_s for one in outcomes], (50, 99))
    rest = [one.whole_s - one.first_s for one in outcomes]
    return {
        "requests": len(outcomes),
        "hit_rate": round(sum(o.cached for o in outcomes) / sum(o.tokens for o in outcomes), 4),
        "first_token_p50_s": round(float(first[0]), 3),
        "first_token_p99_s": round(float(first[1]), 3),
        "answer_p50_s": round(float(np.median(rest)), 2),
    }


def fleet_row(requests: Sequence[TraceRequest], fleet: Fleet, seconds: float) -> dict[str, Any]:
    """A fleet's figures, of the requests after the warm-up."""
    run = Simulation(fleet, GpuCosts.measured()).run(requests)
    counted = [one for one in run.outcomes if one.begun >= WARM * seconds]
    steps = 1e3 * np.percentile(run.steps_s, (50, 99))
    ends = max(one.begun + one.whole_s for one in run.outcomes)
    row = {
        "engines": fleet.engines,
        **figures(counted),
        "step_p50_ms": round(float(steps[0]), 2),
        "step_p99_ms": round(float(steps[1]), 2),
        "busy": round(run.busy_s / fleet.engines / ends, 3),
        "refused": run.refused,
    }
    print(row, flush=True)
    return row


def rack_rows(requests: Sequence[TraceRequest], fleet: Fleet, seconds: float) -> dict[str, Any]:
    """A rack that fails after the warm-up: figures by the second in which requests started."""
    at = WARM * seconds
    run = Simulation(fleet, GpuCosts.measured()).run(requests, at)
    by_second: dict[int, list[Outcome]] = {}
    for one in run.outcomes:
        by_second.setdefault(int(one.begun), []).append(one)
    rows = [{"second": second, **figures(by_second[second])} for second in sorted(by_second)]
    print(f"{len(run.lost)} requests lost their engine", flush=True)
    lost = {"engines": fleet.engines_per_rack, "of": fleet.engines, "at": at}
    return {"lost": lost, "requests_begun_anew": len(run.lost), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="without it a trace is generated")
    parser.add_argument("--fleet", action="store_true")
    parser.add_argument("--engines", type=int, nargs="+", default=(2400, 3000))
    parser.add_argument("--per-s", type=float, default=10_000.0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rack", type=int, metavar="ENGINES")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.fleet = True
        chosen.engines, chosen.per_s, chosen.rack = (80,), 100.0, 80
    elif not chosen.trace and (chosen.fleet or chosen.rack):
        parser.error("figures that are kept need the published trace: --trace FILE")
    found = run_all(chosen)
    if found and not chosen.quick:
        write_results(SIMULATION, read_results(SIMULATION) | found)
    if chosen.tables:
        write_tables(read_results(SIMULATION))


def run_all(chosen: argparse.Namespace) -> Results:
    """The figures of each requested part, with its stamp."""
    found: Results = {}
    if not chosen.fleet and not chosen.rack:
        return found
    trace = read_trace(chosen.trace) if chosen.trace else generated_trace(2000)
    every = multiplied(trace, chosen.per_s, chosen.seconds)
    stamp = provenance(["numpy"]) | {"per_s": chosen.per_s, "seconds": chosen.seconds}
    if chosen.fleet:
        rows = [fleet_row(every, Fleet(engines=count), chosen.seconds) for count in chosen.engines]
        found["fleet"] = stamp | {"rows": rows}
    if chosen.rack:
        found["rack"] = stamp | rack_rows(every, Fleet(engines=chosen.rack), chosen.seconds)
    return found


if __name__ == "__main__":
    main()
