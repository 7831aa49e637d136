"""Threads that look up, load and store for an engine, whose own thread never waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Literal, TypeVar

T = TypeVar("T")
Kind = Literal["lookup", "load", "store"]

LOG: Final = logging.getLogger("attnd.engines")


class Workers:
    """Jobs by kind, so that a load never waits for stores, nor a lookup for loads.

    A job that is submitted ends in one call of `done` with its result, or with None where it
    raised or was cancelled, whatever happens.
    """

    def __init__(self, threads: int) -> None:
        sizes: dict[Kind, int] = {"lookup": 1, "load": threads, "store": max(1, threads // 2)}
        self._pools = {
            kind: ThreadPoolExecutor(size, f"attnd-{kind}") for kind, size in sizes.items()
        }
        self._idle = threading.Condition()
        self._open: set[Future[Any]] = set()

    def submit(self, kind: Kind, job: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """Run `job` in a thread of its kind; `done` runs in that thread, or in the canceller's."""
        with self._idle:
            future = self._pools[kind].submit(job)
            self._open.add(future)
        future.add_done_callback(lambda ended: self._end(ended, done))

    def _end(self, ended: Future[T], done: Callable[[T | None], None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            LOG.error("a job of the cache failed", exc_info=error)
        try:
            done(None if ended.cancelled() or error is not None else ended.result())
        finally:
            with self._idle:
                self._open.discard(ended)
                self._idle.notify_all()

    def drain(self, *, cancel: bool = False) -> None:
        """Wait until no job is left. `cancel`: jobs that have not begun end as failed.

        A job that has begun is never aborted: its memory is in use until it ends.
        """
        with self._idle:
            waiting = [*self._open] if cancel else []
        for future in waiting:
            future.cancel()
        with self._idle:
            self._idle.wait_for(lambda: not self._open)

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, and end the threads."""
        self.drain(cancel=True)
        for pool in self._pools.values():
            pool.shutdown()
