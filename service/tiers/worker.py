"""Threads that do one kind of work for an owner that never waits for them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Final

LOG: Final = logging.getLogger("attnd.tiers")
Task = Callable[[], Callable[[], None]]
"""Runs in a worker's thread and returns a function that runs in the owner's."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A task, and its end once it has run; `is_ready` where no thread runs it."""

    task: Task
    is_ready: Callable[[], bool] | None = None
    end: Callable[[], None] | None = None


class Worker:
    """Runs tasks in `threads` threads; `wake` is called after each. Their ends keep their order.

    `is_full` with `most` tasks for each thread. Failures of the type `fatal` are raised in the
    owner's thread.
    """

    def __init__(
        self,
        name: str,
        most: int,
        wake: Callable[[], None],
        threads: int = 1,
        fatal: type[Exception] | tuple[()] = (),
    ) -> None:
        self._most = most * threads
        self._wake = wake
        self._fatal = fatal
        self._waiting: SimpleQueue[Ticket | None] = SimpleQueue()
        self._tickets: deque[Ticket] = deque()
        self._threads = [Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """Tasks whose end the owner has not taken."""
        return len(self._tickets)

    @property
    def is_full(self) -> bool:
        return len(self._tickets) >= self._most

    @property
    def is_polled(self) -> bool:
        """Whether the next end is of a task that no thread runs."""
        return bool(self._tickets) and self._tickets[0].is_ready is not None

    def add(self, task: Task, is_ready: Callable[[], bool] | None = None) -> None:
        """Queue a task; the owner checks `is_full` first where it can wait. A task with `is_ready`
        runs in the owner's thread, once that says so: `take_done` asks."""
        ticket = Ticket(task, is_ready)
        self._tickets.append(ticket)
        if is_ready is None:
            self._waiting.put(ticket)

    def take_done(self, most: int | None = None) -> bool:
        """Run the ends of finished tasks (up to `most`), in the order of the tasks; whether there
        were any."""
        count = 0
        while count != most and self._tickets:
            ticket = self._tickets[0]
            if ticket.end is None and ticket.is_ready is not None and ticket.is_ready():
                self._run_one(ticket)
            if ticket.end is None:
                break
            count += 1
            self._tickets.popleft()
            ticket.end()
        return count > 0

    def close(self, ends: float) -> bool:
        """Finish all tasks; whether that was done until `ends`, by `time.monotonic()`."""
        for _ in self._threads:
            self._waiting.put(None)
        for ticket in self._tickets:
            if ticket.is_ready is not None:
                self._run_one(ticket)
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (ticket := self._waiting.get()) is not None:
            self._run_one(ticket)
            self._wake()

    def _run_one(self, ticket: Ticket) -> None:
        try:
            ticket.end = ticket.task()
        except self._fatal as error:
            ticket.end = raising(error)
        except Exception:
            LOG.exception("a task of %s failed: this is a bug", self._threads[0].name)
            ticket.end = nothing


def nothing() -> None:
    """The end of a task that failed."""


def raising(error: Exception) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end
