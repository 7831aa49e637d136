"""A thread that does one kind of work in order, for an owner that never waits for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Final

LOG: Final = logging.getLogger("attnd.tiers")
Task = Callable[[], Callable[[], None]]
"""Runs in the worker's thread and returns a function that runs in the owner's."""


class Worker:
    """Runs tasks one after another, `most` waiting at a time; `wake` is called after each."""

    def __init__(self, name: str, most: int, wake: Callable[[], None]) -> None:
        self._most = most
        self._wake = wake
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._done: deque[Callable[[], None]] = deque()
        self.count = 0
        """Tasks whose end the owner has not taken."""
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self.count >= self._most

    def add(self, task: Task) -> None:
        """Queue a task; the owner checks `is_full` first where it can wait."""
        self.count += 1
        self._tasks.put(task)

    def take_done(self) -> None:
        """Run the ends of finished tasks, in order."""
        while self._done:
            self.count -= 1
            self._done.popleft()()

    def close(self, timeout_s: float) -> bool:
        """Finish all tasks; whether that was done in time."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                end = task()
            except Exception:
                LOG.exception("a task of %s failed: this is a bug", self._thread.name)
                end = nothing
            self._done.append(end)
            self._wake()


def nothing() -> None:
    """The end of a task that failed."""
