"""The bounded queue between the event loop and the worker: what waits, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from threading import Condition, Lock
from typing import Final

from service.engine.operations import Operation, Reply
from service.errors import NotReady, Overloaded

LEAST_RETRY_S: Final = 0.05
MOST_RETRY_S: Final = 30.0
PACE_WEIGHT: Final = 0.1
"""Share of the latest operation in the running mean of seconds per operation."""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """An operation on its way to the worker; `arrived` and `deadline` are `time.monotonic()`.

    `future` belongs to its event loop: other threads may only ask whether it was cancelled.
    """

    operation: Operation
    future: asyncio.Future[Reply]
    arrived: float
    deadline: float


class Inbox:
    """Tickets that wait for the worker. Closed, it takes no more, but gives out what it holds."""

    def __init__(self, depth: int, reason: str) -> None:
        self._depth = depth
        self._tickets: deque[Ticket] = deque()
        self._changed = Condition(Lock())
        self._closed: str | None = reason
        self._ended = False
        self._seconds_per_operation = 0.0

    def open(self) -> bool:
        """Take tickets from now on; False when it was closed for good meanwhile."""
        with self._changed:
            if not self._ended:
                self._closed = None
            return not self._ended

    def close(self, reason: str) -> None:
        """Take no more tickets, ever; `reason` is what callers are told."""
        with self._changed:
            self._closed = reason
            self._ended = True
            self._changed.notify()

    def put(self, ticket: Ticket) -> None:
        """Let a ticket wait; `wake` must follow. Raises `Overloaded`, `NotReady` when closed."""
        with self._changed:
            if self._closed is not None:
                raise NotReady(self._closed)
            if len(self._tickets) >= self._depth:
                raise Overloaded(
                    f"{self._depth} operations wait already: retry later, send larger batches, "
                    "or raise server.queue_depth",
                    retry_after_s=self._retry_after_s(),
                )
            self._tickets.append(ticket)

    def wake(self) -> None:
        """Let the worker see what was put."""
        with self._changed:
            self._changed.notify()

    def discard(self, ticket: Ticket) -> bool:
        """Drop a waiting ticket; False when the worker has it already."""
        with self._changed:
            try:
                self._tickets.remove(ticket)
            except ValueError:
                return False
            return True

    def take(self, wait: bool) -> list[Ticket]:
        """All that waits, in order. With `wait`, none means: closed, and nothing left."""
        with self._changed:
            while wait and not self._tickets and not self._ended:
                self._changed.wait()
            taken = list(self._tickets)
            self._tickets.clear()
            return taken

    @property
    def num_waiting(self) -> int:
        return len(self._tickets)

    def paced(self, operations: int, seconds: float) -> None:
        """The worker needed `seconds` for so many operations."""
        mean = seconds / operations
        self._seconds_per_operation += PACE_WEIGHT * (mean - self._seconds_per_operation)

    def _retry_after_s(self) -> float:
        """When half of what waits should be done, so that a retry finds room."""
        half = 0.5 * len(self._tickets) * self._seconds_per_operation
        return round(min(max(half, LEAST_RETRY_S), MOST_RETRY_S), 3)
