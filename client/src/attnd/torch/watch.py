"""A thread that sleeps until the engine is gone, and then lets the waiting stream go on."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Final

import torch

from attnd.road.connection import Connection

AGAIN_S: Final = 0.005
"""How often flags are set once nobody else will: the stream may come to another wait."""


class Watch:
    """Without it a stream that waits for the engine would wait for ever, and its process with it.

    What the layers then find in `o` is worth nothing; the next call of the session raises.
    """

    def __init__(
        self, connection: Connection, device: torch.device, free_waits: Callable[[int], None]
    ) -> None:
        """`free_waits` sets all flags on a stream of `device`."""
        self._device, self._free_waits = device, free_waits
        self._fd = os.dup(connection.fileno())
        self._woken, self._wake = os.pipe()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attnd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        os.write(self._wake, b"\0")
        self._thread.join()
        for fd in (self._fd, self._woken, self._wake):
            os.close(fd)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        poll.register(self._woken, select.POLLIN)
        poll.poll()
        if self._closed.is_set():
            return
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            while not self._closed.wait(AGAIN_S):
                self._free_waits(stream.cuda_stream)
