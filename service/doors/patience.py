"""The end of calls that no engine answers. One timer looks at all: one for each would cost as much
as finding its engine."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from service.errors import DeadlineExceeded

LOOK_S: Final = 0.25
GRACE_S: Final = 5.0
"""An engine keeps deadlines itself; one that has not answered so long after is not waited for."""


def no_answer(seconds: float) -> DeadlineExceeded:
    """The error of a call that was waited for so long."""
    told = f"no engine answered within {seconds:g} s: the operation may have taken effect"
    return DeadlineExceeded(told)


class Patience:
    """Calls under way, by their tasks, and until when each is waited for."""

    __slots__ = ("cancelled", "loop", "timer", "waiting")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting: dict[asyncio.Task[Any], float] = {}
        self.cancelled: set[asyncio.Task[Any]] = set()
        self.timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> asyncio.Task[Any]:
        """The current task, which is cancelled when it has not ended by then."""
        task = asyncio.current_task(self.loop)
        if task is None:
            raise RuntimeError("a call outside of any task: this is a bug")
        self.waiting[task] = self.loop.time() + seconds
        if self.timer is None:
            self.timer = self.loop.call_later(LOOK_S, self.look)
        return task

    def is_over(self, task: asyncio.Task[Any]) -> bool:
        """Whether a task that was cancelled was so because it took too long, and only so."""
        return task in self.cancelled and task.cancelling() == 1

    def end(self, task: asyncio.Task[Any]) -> None:
        """The call is over, one way or the other."""
        del self.waiting[task]
        if task in self.cancelled:
            self.cancelled.discard(task)
            task.uncancel()

    def look(self) -> None:
        now = self.loop.time()
        for task, ends in self.waiting.items():
            if now > ends and task not in self.cancelled:
                self.cancelled.add(task)
                task.cancel()
        self.timer = self.loop.call_later(LOOK_S, self.look) if self.waiting else None

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
