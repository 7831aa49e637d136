"""The simulation beside measurements: one CPU engine and two, on the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.cases.trace import Request, split
from bench.cluster import WORKERS
from simulation.calls import CallCosts, Replay

COMPARED: Final = ("requests_per_s", "p50_ms", "p99_ms", "hit_rate")
MOST_OFF: Final = 0.15
"""Relative error of any figure beyond which the model must not be trusted."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a replay: the median of the measured rounds, their range, and simulated.

    `off` is the simulation's relative error.
    """

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
    rows = {row["name"]: row for row in measured["rows"]}
    return [
        Compared(name, key, rows[name][key], rows[name]["spread"][key], simulated[key])
        for name, simulated in replays(measured, costs, requests).items()
        for key in COMPARED
    ]


def replays(
    measured: dict[str, Any], costs: CallCosts, requests: Sequence[Request]
) -> dict[str, dict[str, float]]:
    """Simulated on one service and on separate ones with a perfect split, as measured."""
    each, engines = measured["pages_each"], measured["engines"]
    return {
        name: Replay(costs, measured["cores"], pools).run(
            split(requests, len(pools)), WORKERS * engines // len(pools)
        )
        for name, pools in (("one", [each * engines]), ("separate", [each] * engines))
    }
