"""Watchdogs of loops: log a pass longer than `LIMIT_S` with its operation, and count it in
`attnd_slow_passes_total`."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from types import FrameType
from typing import Final

from service.metrics import Metrics

LOG: Final = logging.getLogger("attnd.watchdog")
LIMIT_S: Final = 0.1
QUIET_S: Final = 60.0
"""After a line about an operation, its further passes are only counted for so long."""
BEAT_S: Final = 0.05
"""Interval of checks of an event loop."""
UNNAMED: Final = "no single operation"


class SlowPasses:
    """Counts slow passes, and logs the first of an operation in a minute."""

    def __init__(self, process: str, metrics: Metrics) -> None:
        self._process = process
        self._metrics = metrics
        self._logged: dict[str, tuple[float, int]] = {}
        """When an operation was last logged, and its passes since."""

    def add(self, operation: str, text: str, seconds: float, *details: object) -> None:
        """A pass took `seconds`. `text` has places for the process, the seconds and `details`."""
        self._metrics.slow_pass(operation)
        now = time.monotonic()
        logged, more = self._logged.get(operation, (-math.inf, 0))
        if now - logged < QUIET_S:
            self._logged[operation] = logged, more + 1
            return
        self._logged[operation] = now, 0
        since = f"; {more} more since the last line about it" if more else ""
        LOG.warning(text + since, self._process, seconds, *details)


class Watchdog:
    """For a loop that reports its work: `note` for each operation, `passed` after each pass."""

    def __init__(self, process: str, metrics: Metrics) -> None:
        self._slow = SlowPasses(process, metrics)
        self._name = UNNAMED
        self._longest_s = 0.0

    def note(self, name: str, seconds: float) -> None:
        """An operation took `seconds` in this pass."""
        if seconds > self._longest_s:
            self._name, self._longest_s = name, seconds

    def passed(self, seconds: float) -> None:
        if seconds > LIMIT_S:
            text = "a pass of the %s's loop took %.3f s; the longest operation in it was %s, %.3f s"
            self._slow.add(self._name, text, seconds, self._name, self._longest_s)
        self._name, self._longest_s = UNNAMED, 0.0


class LoopWatchdog:
    """For an asyncio loop: a timer in the loop, and a thread that inspects its stack when the
    timer is late."""

    def __init__(self, process: str, metrics: Metrics) -> None:
        """Call it in the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._slow = SlowPasses(process, metrics)
        self._thread_id = threading.get_ident()
        self._beat = time.monotonic()
        self._found = ""
        """The loop's work when it was late."""
        self._ended = threading.Event()
        self._timer = self._loop.call_later(BEAT_S, self._on_time)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._timer.cancel()

    def _on_time(self) -> None:
        """The timer, in the loop's thread."""
        now = time.monotonic()
        late_s = now - self._beat - BEAT_S
        found, self._found, self._beat = self._found, "", now
        self._timer = self._loop.call_later(BEAT_S, self._on_time)
        if late_s > LIMIT_S:
            name = found or UNNAMED
            text = "a pass of the %s's loop took %.3f s; it was at %s"
            self._slow.add(name.partition(" ")[0], text, late_s, name)

    def _watch(self) -> None:
        """The thread: inspects the stack once for every late beat."""
        while not self._ended.wait(BEAT_S):
            if self._found or time.monotonic() - self._beat < LIMIT_S:
                continue
            frame = sys._current_frames().get(self._thread_id)
            self._found = place_of(frame)


def place_of(frame: FrameType | None) -> str:
    """The operation in a stack, and its innermost function of the service."""
    place, operation = "", ""
    while frame is not None and not (place and operation):
        module = frame.f_globals.get("__name__", "")
        if not place and module.startswith("service."):
            place = f" in {module}.{frame.f_code.co_name}"
        operation = operation or operation_in(frame)
        frame = frame.f_back
    return f"{operation}{place}" if operation else f"unnamed{place}" if place else UNNAMED


def operation_in(frame: FrameType) -> str:
    """The name of the operation that a function of the doors or the router works on."""
    local = frame.f_locals
    for name in ("operation", "call", "exchange"):
        found = local.get(name)
        found = getattr(found, "operation", found)
        op = getattr(found, "op", None) or getattr(found, "name", None)
        if isinstance(op, str):
            return op
    return ""
