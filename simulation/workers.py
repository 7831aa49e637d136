"""Simulated processes: one that does what comes in order, and an engine that gives turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from simulation.clock import Act, Cores

Piece = tuple[float, list[Act]]
"""Seconds of a processor, and what is done afterwards."""


class Worker:
    """A process with one thread: what it is given, in order. Having had nothing to do it takes
    `wake_s` to wake up."""

    def __init__(self, cores: Cores, wake_s: float = 0.0) -> None:
        self._cores = cores
        self._wake_s = wake_s
        self._waiting: deque[tuple[float, Act]] = deque()
        self._pieces: Iterator[Piece] | None = None
        self._acts: list[Act] = []
        self.busy_s = 0.0

    def give(self, seconds: float, then: Act) -> None:
        """A task of so many seconds of a processor; `then` is done afterwards."""
        self._waiting.append((seconds, then))
        self._wake()

    def work(self) -> Iterator[Piece]:
        """What there is to do now."""
        while self._waiting:
            seconds, then = self._waiting.popleft()
            yield seconds, [then]

    def finished(self) -> None:
        """The processor is done with a piece."""
        acts, self._acts = self._acts, []
        for act in acts:
            act()
        self._go_on()

    def _wake(self) -> None:
        if self._pieces is None:
            self._pieces = self.work()
            self._go_on(self._wake_s)

    def _go_on(self, more_s: float = 0.0) -> None:
        piece = None if self._pieces is None else next(self._pieces, None)
        if piece is None:
            self._pieces = None
            return
        seconds, self._acts = piece
        self.busy_s += seconds + more_s
        self._cores.start(self, seconds + more_s)


@dataclass(slots=True)
class Task:
    """An operation at an engine. Of its seconds, operations of one launch have `shared_s` only
    once; where it is 0, the operation goes by itself, after what came before it."""

    seconds: float
    shared_s: float
    then: Act
    left: int = 1
    """Slices that it has yet to be given."""


class Engine(Worker):
    """Gives turns as the engine's scheduler does: in a round, all that has come, those that go
    together in one launch; then one slice of long work, of which each has its slice in turn."""

    def __init__(self, cores: Cores, wake_s: float, slice_s: float) -> None:
        super().__init__(cores, wake_s)
        self._slice_s = slice_s
        self._tasks: deque[Task] = deque()
        self._long: deque[Task] = deque()

    def take(self, task: Task) -> None:
        task.left = max(1, ceil(task.seconds / self._slice_s))
        self._tasks.append(task)
        self._wake()

    def work(self) -> Iterator[Piece]:
        while self._tasks or self._long:
            yield from self._turns()
            if self._long:
                task = self._long.popleft()
                task.left -= 1
                pieces = max(1, ceil(task.seconds / self._slice_s))
                yield task.seconds / pieces, [] if task.left else [task.then]
                if task.left:
                    self._long.append(task)

    def _turns(self) -> Iterator[Piece]:
        """Of all that is there as the round begins."""
        tasks, self._tasks = self._tasks, deque()
        group: list[Task] = []
        while tasks:
            task = tasks[0]
            if task.shared_s and task.left == 1:
                group.append(tasks.popleft())
                continue
            if group:
                yield launch(group)
                group = []
                if task.left > 1:  # long work waits for the next round then
                    break
            tasks.popleft()
            if task.left > 1:
                self._long.append(task)
            else:
                yield task.seconds, [task.then]
        if group:
            yield launch(group)
        self._tasks.extendleft(reversed(tasks))


def launch(group: list[Task]) -> Piece:
    """Operations that go together: what they share is taken once."""
    seconds = sum(task.seconds for task in group)
    shared = sum(task.shared_s for task in group) - max(task.shared_s for task in group)
    return seconds - shared, [task.then for task in group]
