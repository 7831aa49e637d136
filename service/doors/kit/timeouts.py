"""Deadlines of calls to engines that do not reply. One timer checks all: a timer for each
call would cost as much as choosing its engine."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from service.errors import DeadlineExceeded

CHECK_S: Final = 0.25
GRACE_S: Final = 5.0
"""An engine keeps deadlines itself. A call fails when the engine is silent this long after one."""


class Timeouts:
    """Calls in flight, by task, with the time of the loop at which each expires."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ends: dict[asyncio.Task[Any], float] = {}
        self.cancelled: set[asyncio.Task[Any]] = set()
        self.timer: asyncio.TimerHandle | None = None

    def limit(self, deadline_s: float) -> CallTimeout:
        """A `with` block around a call of the current task. Raises DeadlineExceeded `GRACE_S`
        after the deadline."""
        return CallTimeout(self, deadline_s + GRACE_S)

    def check(self) -> None:
        """Cancel the calls whose time is over, and check again while calls are in flight."""
        now = self.loop.time()
        for task, end in self.ends.items():
            if now > end and task not in self.cancelled:
                self.cancelled.add(task)
                task.cancel()
        self.timer = self.loop.call_later(CHECK_S, self.check) if self.ends else None

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class CallTimeout:
    """The time limit of one call in flight."""

    def __init__(self, timeouts: Timeouts, seconds: float) -> None:
        self._timeouts, self._seconds = timeouts, seconds

    def __enter__(self) -> None:
        timeouts = self._timeouts
        task = asyncio.current_task(timeouts.loop)
        if task is None:
            raise RuntimeError("a call outside of any task: this is a bug")
        self._task = task
        timeouts.ends[task] = timeouts.loop.time() + self._seconds
        if timeouts.timer is None:
            timeouts.timer = timeouts.loop.call_later(CHECK_S, timeouts.check)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        timeouts, task = self._timeouts, self._task
        del timeouts.ends[task]
        if task not in timeouts.cancelled:
            return
        only_ours = isinstance(error, asyncio.CancelledError) and task.cancelling() == 1
        timeouts.cancelled.discard(task)
        task.uncancel()
        if only_ours:
            raise DeadlineExceeded(
                f"no engine replied within {self._seconds:g} s; the operation may have been applied"
            ) from None
