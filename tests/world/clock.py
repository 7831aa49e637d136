"""Virtual time and repeatable randomness, in place of the system's, for one run of the world."""

from __future__ import annotations

import os
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

TICK_S: Final = 2e-6
"""Time that passes at every look at the clock, so that no loop waits for ever."""
STALLS_S: Final = (1e-4, 1e-3, 5e-3, 0.03, 0.2)
"""Pauses of a process in the middle of its work, between two looks at the clock."""


class Clock:
    """The world's time, in seconds. It moves when it is read, and by `advance`."""

    def __init__(self, order: random.Random, stalls: float) -> None:
        """`stalls`: the share of looks at the clock before which the process paused."""
        self.now = 1000.0
        self._order, self._stalls = order, stalls

    def monotonic(self) -> float:
        self.now += TICK_S
        if self._order.random() < self._stalls:
            self.now += self._order.choice(STALLS_S)
        return self.now

    def advance(self, to: float) -> None:
        self.now = max(self.now, to)

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.0)


@contextmanager
def replaced(*every: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes (owner, name, value) are replaced within the block."""
    with ExitStack() as stack:
        for owner, name, value in every:
            stack.enter_context(patch.object(owner, name, value))
        yield


@contextmanager
def virtual(clock: Clock, order: random.Random) -> Iterator[None]:
    """Every clock and every source of randomness of the process belongs to the world.

    The service reads them from the modules `time`, `secrets`, `uuid` and `random` alone.
    """
    state = random.getstate()
    random.seed(order.getrandbits(64))
    randbytes: Callable[[int], bytes] = order.randbytes
    try:
        with replaced(
            (time, "monotonic", clock.monotonic),
            (time, "perf_counter", clock.monotonic),
            (time, "time", lambda: clock.monotonic() + 1.7e9),
            (time, "time_ns", lambda: int((clock.monotonic() + 1.7e9) * 1e9)),
            (time, "sleep", clock.sleep),
            (secrets, "token_bytes", lambda size=32: randbytes(size)),
            (secrets, "token_hex", lambda size=32: randbytes(size).hex()),
            (uuid, "uuid4", lambda: uuid.UUID(bytes=randbytes(16), version=4)),
            (os, "urandom", randbytes),
        ):
            yield
    finally:
        random.setstate(state)
