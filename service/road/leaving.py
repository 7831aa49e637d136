"""The last of a session whose arena was brought: what its calls have of that may be used again when
the engine does not touch it any more."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from service.road.slots import Slot

READ_BYTES: Final = 2**16


def leave(loop: asyncio.AbstractEventLoop, sock: socket.socket, slots: Sequence[Slot]) -> None:
    """Tell the engine that nobody waits any more; free the slots when it has closed its side, which
    it does once it is done with them, or dies. A process that was stopped may still write there."""

    def left() -> None:
        sock.close()
        for slot in slots:
            slot.free()

    def on_readable() -> None:
        try:
            if sock.recv(READ_BYTES):
                return  # answers that nobody waits for
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        loop.remove_reader(sock)
        left()

    if not slots:
        left()
        return
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    loop.add_reader(sock, on_readable)
