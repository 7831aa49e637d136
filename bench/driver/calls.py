"""Timed calls over any way into the service: one connection in a loop, or several in threads."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Barrier
from typing import Final, Protocol

BACKEND_STAGES: Final = ("plan", "copy_in", "kernel", "copy_out")
"""The stages of a reply's timings that are the backend's own time."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One call: seconds on the caller's clock, and the backend's share by the reply's timings."""

    seconds: float
    backend_s: float

    @property
    def cost_s(self) -> float:
        """Seconds beyond the backend's own time."""
        return self.seconds - self.backend_s


@dataclass(frozen=True, slots=True)
class Run:
    """The samples of one loop, and its length in seconds."""

    samples: tuple[Sample, ...]
    seconds: float

    @property
    def per_second(self) -> float:
        return len(self.samples) / self.seconds


Call = Callable[[int], Sample]
"""Makes the call of a turn; turns go round the load's requests."""


class Way(Protocol):
    """A load and a way to send it."""

    num_requests: int

    def connected(self) -> AbstractContextManager[Call]:
        """A connection of its own."""
        ...


def loop(way: Way, count: int, limit_s: float) -> Run:
    """Up to `count` calls in `limit_s` seconds, after each request was sent once."""
    with way.connected() as call:
        warm_up(way, call, limit_s)
        samples: list[Sample] = []
        gc.collect()
        gc.disable()
        try:
            started = time.perf_counter()
            for turn in range(count):
                samples.append(call(turn))
                if time.perf_counter() - started > limit_s:
                    break
            return Run(tuple(samples), time.perf_counter() - started)
        finally:
            gc.enable()


def crowd(way: Way, connections: int, limit_s: float) -> float:
    """Requests a second of several connections, each driven by a thread for `limit_s` seconds."""
    barrier = Barrier(connections)

    def drive(index: int) -> tuple[float, int, float]:
        """When the thread started, its number of calls, and when it ended."""
        try:
            with way.connected() as call:
                warm_up(way, call, limit_s)
                barrier.wait()
                started, count = time.perf_counter(), 0
                while time.perf_counter() - started < limit_s:
                    call(index + count)
                    count += 1
                return started, count, time.perf_counter()
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(connections) as pool:
        starts, counts, ends = zip(*pool.map(drive, range(connections)), strict=True)
    return float(sum(counts) / (max(ends) - min(starts)))


def warm_up(way: Way, call: Call, limit_s: float) -> None:
    """Send each request once, for at most a third of the measurement's time."""
    ends = time.perf_counter() + limit_s / 3
    for turn in range(way.num_requests):
        call(turn)
        if time.perf_counter() > ends:
            break
