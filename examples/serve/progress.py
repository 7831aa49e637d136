"""Progress of the start, on standard error. In vLLM and SGLang: lines of the log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Report the stage under way, and every two seconds its time."""
    over, begun = threading.Event(), time.monotonic()

    def watch() -> None:
        while not over.wait(2.0):
            print(f"{text}: {time.monotonic() - begun:.0f} s", file=sys.stderr)

    print(text, file=sys.stderr)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
