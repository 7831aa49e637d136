"""Simulated time: what happens next, and processors that several workers share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

Act = Callable[[], None]


class Clock:
    """Runs what is due, in order of time, then of when it was asked for."""

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


class Cores:
    """So many processors for any number of workers, each of which does one thing at a time: where
    more of them work than there are processors, all are as much slower. Processors that share a
    core have only a share `together` of their speed when more than one works."""

    def __init__(self, clock: Clock, count: float, together: float = 1.0) -> None:
        self._clock = clock
        self._count = count
        self._together = together
        self._left: dict[Worker, float] = {}
        self._since = 0.0
        self._round = 0

    def start(self, worker: Worker, seconds: float) -> None:
        """The worker begins what takes so many seconds of a processor."""
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
        """Look again when the first worker is done, if nothing changes before."""
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


class Worker:
    """A process with one thread: short tasks in order of arrival, long ones a slice at a time, in
    turn, whenever no short one waits. Short tasks that wait one behind the other take what they
    share only once."""

    def __init__(self, cores: Cores, slice_s: float = float("inf")) -> None:
        self._cores = cores
        self._slice_s = slice_s
        self._short: deque[tuple[float, float, Act]] = deque()
        self._long: deque[tuple[float, Act]] = deque()
        self._doing: tuple[float, list[Act]] | None = None
        self.busy_s = 0.0

    def give(self, seconds: float, then: Act, shared: float = 0.0) -> None:
        """A task of so many seconds of a processor, of which it may share some with its like;
        `then` is done afterwards."""
        if seconds <= self._slice_s:
            self._short.append((seconds, shared, then))
        else:
            self._long.append((seconds, then))
        if self._doing is None:
            self._next()

    def finished(self) -> None:
        """The cores are done with the tasks, or with a slice of one."""
        if self._doing is None:
            raise RuntimeError("a worker that does nothing is done: this is a bug")
        left, acts = self._doing
        self._doing = None
        if left > 0:
            self._long.append((left, acts[0]))
        else:
            for act in acts:
                act()
        if self._doing is None:
            self._next()

    def _next(self) -> None:
        if self._short:
            self._take_short()
        elif self._long:
            seconds, then = self._long.popleft()
            self._begin(min(seconds, self._slice_s), max(0.0, seconds - self._slice_s), [then])

    def _take_short(self) -> None:
        """The first short task, and those right behind it that share something with it."""
        seconds, shared, then = self._short.popleft()
        acts = [then]
        while shared and self._short and self._short[0][1]:
            more, of_it, act = self._short.popleft()
            seconds += more - min(shared, of_it)
            acts.append(act)
        self._begin(seconds, 0.0, acts)

    def _begin(self, seconds: float, left: float, acts: list[Act]) -> None:
        self._doing = (left, acts)
        self.busy_s += seconds
        self._cores.start(self, seconds)
