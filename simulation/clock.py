"""Simulated time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Act = Callable[[], None]


class Clock:
    """Runs actions in order of time; actions of the same time in the order of their scheduling."""

    __slots__ = ("_due", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._number = 0

    def at(self, when: float, act: Act) -> None:
        self._number += 1
        heappush(self._due, (when, self._number, act))

    def after(self, seconds: float, act: Act) -> None:
        self.at(self.now + seconds, act)

    def run(self, until: float = float("inf")) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, act = heappop(self._due)
            act()
