"""Simulated beside measured: one CPU engine and two, on the requests that were replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.cases.trace import Request, split
from bench.cluster import WORKERS
from simulation.calls import CallCosts, Replay

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
    told = {row["name"]: row for row in measured["rows"]}
    return [
        Compared(name, key, told[name][key], told[name]["spread"][key], simulated[key])
        for name, simulated in replays(measured, costs, requests).items()
        for key in HELD_TO
    ]


def replays(
    measured: dict[str, Any], costs: CallCosts, requests: Sequence[Request], seed: int | None = None
) -> dict[str, dict[str, float]]:
    """Simulated on one service with all the memory, and on separate ones with a perfect split, as
    large as those that were measured."""
    each, engines = measured["pages_each"], measured["engines"]
    return {
        name: Replay(costs, measured["cores"], pools, seed).run(
            split(requests, len(pools)), WORKERS * engines // len(pools)
        )
        for name, pools in (("one", [each * engines]), ("separate", [each] * engines))
    }
