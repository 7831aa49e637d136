"""The arena that a door shares with several engines, at the door's end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from service.road.caller_end.slots import Mapping, Slot, Slots

READ_BYTES: Final = 2**16


class OwnArena:
    """Slots for all of a door's sessions.

    The slots of a call are free once its engine has answered. The slots of an abandoned session are
    free at the end of its connection, which an engine closes when it has answered all calls or
    dies: a stopped process may still write there.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.slots = Slots(mapping)
        self.leaving: dict[socket.socket, asyncio.AbstractEventLoop] = {}
        """Connections of abandoned sessions that their engines have not closed yet."""

    def leave(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, slots: Sequence[Slot]
    ) -> None:
        """Abandon a session; its slots are freed when the engine closes the connection."""

        def on_readable() -> None:
            try:
                if sock.recv(READ_BYTES):
                    return  # answers of abandoned calls
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                pass
            self.forget(sock)
            for slot in slots:
                slot.free()

        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        self.leaving[sock] = loop
        loop.add_reader(sock, on_readable)

    def forget(self, sock: socket.socket) -> None:
        self.leaving.pop(sock).remove_reader(sock)
        sock.close()

    def close(self) -> None:
        """Close the arena: no more slots can be taken."""
        for sock in list(self.leaving):
            self.forget(sock)
        self.mapping.close()
