"""Engines and clusters, simulated event by event from measured tables and a trace.

    python -m simulation --trace FILE [--engines 2400 3000] [--per-s 10000]
    python -m simulation --quick        # a small run, only printed

docs/simulation.md lists every assumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from bench.cases.trace import TraceRequest, multiplied, trace_of
from bench.report.provenance import RESULTS, command_line, provenance, publish
from simulation.fleet import Fleet, Simulation
from simulation.gpu_costs import GpuCosts
from simulation.tables import fleet_table

SIMULATION: Final = RESULTS / "simulation.json"
WARM: Final = 2 / 3
"""The share of the seconds that is warm-up: pools start empty."""


def fleet_row(requests: Sequence[TraceRequest], fleet: Fleet, seconds: float) -> dict[str, Any]:
    """A fleet's hit rate and times, of the requests after the warm-up."""
    run = Simulation(fleet, GpuCosts.measured()).run(requests)
    counted = [one for one in run.outcomes if one.begun >= WARM * seconds]
    if not counted:
        raise SystemExit("no request came after the warm-up: raise --per-s or --seconds")
    tokens = sum(one.request.tokens for one in counted)
    first = np.percentile([one.first_s for one in counted], (50, 99))
    steps = 1e3 * np.percentile(run.steps_s, (50, 99))
    ends = max(one.ended for one in run.outcomes)
    row = {
        "engines": fleet.engines,
        "requests": len(counted),
        "hit_rate": round(sum(one.cached for one in counted) / tokens, 4),
        "first_token_p50_s": round(float(first[0]), 3),
        "first_token_p99_s": round(float(first[1]), 3),
        "answer_p50_s": round(median(one.answer_s for one in counted), 2),
        "step_p50_ms": round(float(steps[0]), 2),
        "step_p99_ms": round(float(steps[1]), 2),
        "busy": round(run.busy_s / fleet.engines / ends, 3),
        "refused": run.refused,
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = command_line(__doc__ or "", trace=True)
    parser.add_argument("--engines", type=int, nargs="+", default=(2400, 3000))
    parser.add_argument("--per-s", type=float, default=10_000.0)
    parser.add_argument("--seconds", type=float, default=45.0)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.engines, chosen.per_s = (80,), 100.0
    every = multiplied(trace_of(chosen.trace, 2000), chosen.per_s, chosen.seconds)
    rows = [fleet_row(every, Fleet(engines=count), chosen.seconds) for count in chosen.engines]
    load = {"per_s": chosen.per_s, "seconds": chosen.seconds}
    results = provenance(["numpy"]) | load | {"rows": rows}
    publish(results, fleet_table(results), SIMULATION, chosen)


if __name__ == "__main__":
    main()
