"""Limits the bytes that a door receives in one pass of its loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from service.doors.http.protocol.connection import Connection

PASS_BYTES: Final = 2 * 2**20
"""Received in a pass, over all connections: some milliseconds, as new pages of shared memory are
slow to write."""
LEAST_BYTES: Final = 16 * 2**10
"""Received at once from each further connection in the same pass. Less is not counted."""


class ReadBudget:
    """Sixteen connections with 8 MiB each in the system's buffers would stall a loop for 0.2 s."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = PASS_BYTES
        self._paused: list[Connection] = []
        """Connections that have received their part of a pass."""

    def room(self, view: memoryview) -> memoryview:
        """The part of a body's room that may be filled now."""
        return view[: max(self._left, LEAST_BYTES)]

    def is_spent(self, nbytes: int, connection: Connection) -> bool:
        """Counts received bytes. If True the connection must pause until the next pass."""
        if self._left == PASS_BYTES:
            self._loop.call_soon(self._renew)
        self._left -= nbytes
        if self._left > 0:
            return False
        self._paused.append(connection)
        return True

    def _renew(self) -> None:
        self._left = PASS_BYTES
        paused, self._paused = self._paused, []
        for connection in paused:
            connection.read_again()
