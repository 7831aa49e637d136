"""Time that a test lets pass, in place of waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves `time.monotonic` ahead by some seconds, for all threads."""
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])

    def jump(seconds: float) -> None:
        ahead[0] += seconds

    return jump
