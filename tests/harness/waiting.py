"""Waiting for a condition, in tests that run beside others on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

WAIT_S: Final = 60.0


def wait_for(condition: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    """Polls until the condition holds; fails with the name of what did not happen."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.05)
