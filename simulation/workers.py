"""Simulated processes: a worker that does tasks in order, and an engine with turns and slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from simulation.clock import Act, Cores

Piece = tuple[float, list[Act]]
"""Seconds of a processor, and the actions after it."""


class Worker:
    """A process with one thread that does tasks in order. When idle, it wakes up in `wake_s`."""

    def __init__(self, cores: Cores, wake_s: float = 0.0) -> None:
        self._cores = cores
        self._wake_s = wake_s
        self._waiting: deque[tuple[float, Act]] = deque()
        self._pieces: Iterator[Piece] | None = None
        self._acts: list[Act] = []
        self.busy_s = 0.0

    def give(self, seconds: float, then: Act) -> None:
        """Queue a task of `seconds`; `then` runs when it is done."""
        self._waiting.append((seconds, then))
        self._wake()

    def work(self) -> Iterator[Piece]:
        """The pieces of the queued tasks."""
        while self._waiting:
            seconds, then = self._waiting.popleft()
            yield seconds, [then]

    def finished(self) -> None:
        """A piece is done: run its actions and start the next one."""
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
    """An operation of an engine.

    Operations of one launch take `shared_s` of their seconds only once. An operation with 0 runs
    alone, after all that came before it.
    """

    seconds: float
    shared_s: float
    then: Act
    left: int = 1
    """Slices that remain."""


class Engine(Worker):
    """Turns as in the engine's scheduler.

    A round runs all short operations that have arrived, with those that share a launch together,
    then one slice of long work; long operations take turns.
    """

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
        """The operations that had arrived when the round started."""
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
    """The piece of operations in one launch, whose shared time counts once."""
    seconds = sum(task.seconds for task in group)
    shared = sum(task.shared_s for task in group) - max(task.shared_s for task in group)
    return seconds - shared, [task.then for task in group]
