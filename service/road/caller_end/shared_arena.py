"""The arena that a door has with several engines, at the door's end."""

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

    What a call has of it may be used again when its engine is done with it. Of a session that was
    given up, the end of the connection tells that: an engine closes it when it has answered all, or
    dies. A process that was only stopped may still write there.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.slots = Slots(mapping)
        self.leaving: dict[socket.socket, asyncio.AbstractEventLoop] = {}
        """Connections of sessions that were given up, whose engines have not gone yet."""

    def leave(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, slots: Sequence[Slot]
    ) -> None:
        """Tell an engine that nobody waits any more; free the slots when it has gone."""

        def on_readable() -> None:
            try:
                if sock.recv(READ_BYTES):
                    return  # answers that nobody waits for
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
        """Give up the memory: nobody takes slots of it any more."""
        for sock in list(self.leaving):
            self.forget(sock)
        self.mapping.close()
