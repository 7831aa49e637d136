"""Deadlines of calls to engines that do not reply. One timer checks all: a timer for each
call would cost as much as choosing its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def limit(self, deadline_s: float) -> Iterator[None]:
        """A `with` block around a call of the current task. Raises DeadlineExceeded `GRACE_S`
        after the deadline."""
        task, seconds = asyncio.current_task(self.loop), deadline_s + GRACE_S
        if task is None:
            raise RuntimeError("a call outside of any task: this is a bug")
        self.ends[task] = self.loop.time() + seconds
        if self.timer is None:
            self.timer = self.loop.call_later(CHECK_S, self.check)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self.cancelled or task.cancelling() > 1:
                raise
            raise DeadlineExceeded(
                f"no engine replied within {seconds:g} s; the operation may have been applied"
            ) from None
        finally:
            del self.ends[task]
            if task in self.cancelled:
                self.cancelled.remove(task)
                task.uncancel()

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
