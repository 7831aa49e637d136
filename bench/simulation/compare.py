"""Simulated beside measured: one CPU engine and two, on the requests that were replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.cluster import WORKERS
from bench.simulation.calls import CallCosts, Replay
from bench.simulation.trace import Request, split

HELD_TO: Final = ("requests_per_s", "p50_ms", "p99_ms", "hit_rate")
MOST_OFF: Final = 0.15
"""A simulation that is further off, by any of these, is not to be believed about more."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one replay; `off` is the simulated one's distance, as a share, and `spread` how
    far the measured rounds, of which this is the median, lie apart."""

    replay: str
    figure: str
    measured: float
    spread: float
    simulated: float

    @property
    def off(self) -> float:
        return self.simulated / self.measured - 1 if self.measured else 0.0

    @property
    def holds(self) -> bool:
        return abs(self.off) <= MOST_OFF


def compare(
    measured: dict[str, Any], costs: CallCosts, requests: Sequence[Request]
) -> list[Compared]:
    """Every figure of the replays on one service, and on separate ones."""
    each, engines, rows = measured["pages_each"], measured["engines"], measured["rows"]
    told = {row["name"]: row for row in rows}
    found = []
    for name, pools in (("one", [each * engines]), ("separate", [each] * engines)):
        run = Replay(costs, measured["cores"], pools)
        workers = WORKERS * engines // len(pools)
        simulated = run.run(split(requests, len(pools)), workers)
        row = told[name]
        found += [
            Compared(name, key, row[key], row["spread"][key], simulated[key]) for key in HELD_TO
        ]
    return found
