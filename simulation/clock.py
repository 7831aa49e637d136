"""Simulated time, and processors that several workers share."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

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


class Works(Protocol):
    """A worker that the processors notify as its work is done."""

    def finished(self) -> None: ...


class Cores:
    """`count` processors for any number of workers, each of which does one thing at a time.

    More workers than processors share them evenly. `together` is the relative speed of processors
    as soon as two workers are active, because they share memory.
    """

    def __init__(self, clock: Clock, count: float, together: float = 1.0) -> None:
        self._clock = clock
        self._count = count
        self._together = together
        self._left: dict[Works, float] = {}
        self._since = 0.0
        self._round = 0

    def start(self, worker: Works, seconds: float) -> None:
        """A worker starts work of `seconds` seconds of a processor."""
        self._pass_time()
        self._left[worker] = seconds
        self._plan()

    def _speed(self) -> float:
        working = len(self._left)
        if working <= 1:
            return 1.0
        return min(1.0, self._count / working) * self._together

    def _pass_time(self) -> None:
        done = (self._clock.now - self._since) * self._speed()
        self._since = self._clock.now
        for worker in self._left:
            self._left[worker] -= done

    def _plan(self) -> None:
        """Schedule the moment when the first worker is done, unless something changes before."""
        self._round += 1
        if self._left:
            due = max(0.0, min(self._left.values())) / self._speed()
            number = self._round
            self._clock.after(due, lambda: self._look(number))

    def _look(self, number: int) -> None:
        if number != self._round:
            return
        self._pass_time()
        least = min(self._left.values())
        done = [worker for worker, left in self._left.items() if left <= least + 1e-12]
        for worker in done:
            del self._left[worker]
        self._plan()
        for worker in done:
            worker.finished()
