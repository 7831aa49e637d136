"""A thread that sleeps until the engine ends, and then unblocks the waiting stream."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Final

import torch

from attnd.road.connection import Connection

AGAIN_S: Final = 0.005
"""Seconds between two settings of the flags after the engine's end: the stream may reach another
wait."""


class Watch:
    """Without it a stream that waits for the engine would wait for ever, and its process with it.

    The layers' `o` is then undefined, and the session's next call raises.
    """

    def __init__(
        self, connection: Connection, device: torch.device, unblock_waits: Callable[[int], None]
    ) -> None:
        """`unblock_waits` sets all flags on a stream of `device`."""
        self._device, self._unblock_waits = device, unblock_waits
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
                self._unblock_waits(stream.cuda_stream)
