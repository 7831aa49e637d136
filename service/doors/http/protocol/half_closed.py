"""Detects whether a client that has closed its sending side is still there."""

from __future__ import annotations

import asyncio
import select
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from service.doors.http.protocol.connection import Connection
    from service.doors.http.protocol.exchange import Exchange

FIRST_LOOK_S: Final = 0.02
"""Most responses are sent sooner than this after the client has closed its side."""
NEXT_LOOK_S: Final = 0.1
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosed:
    """Watches a client that has closed its sending side before its response.

    The client may still read, or may have left: TCP reports it only after a send. An interim
    response may be sent at any time, and in a stream its filler.
    """

    def __init__(self, connection: Connection) -> None:
        self.has_probed = False
        loop = connection.loop
        self.timer: asyncio.TimerHandle = loop.call_later(FIRST_LOOK_S, self.look, connection)

    def look(self, connection: Connection) -> None:
        """Abort the connection if the client has left, which cancels its request."""
        exchange, transport = connection.exchange, connection.transport
        if exchange is None or transport.is_closing():
            return
        if has_hung_up(transport.get_extra_info("socket")):
            transport.abort()
            return
        if not self.has_probed:
            self.has_probed = True
            transport.write(probe_of(exchange))
        self.timer = connection.loop.call_later(NEXT_LOOK_S, self.look, connection)


def probe_of(exchange: Exchange) -> bytes:
    """Bytes that may be sent to a waiting client now."""
    if exchange.is_answered:  # by a stream
        return exchange.filler
    return CONTINUE if exchange.head is not None and exchange.head.is_http_11 else b""


def has_hung_up(sock: Any) -> bool:
    """Whether both directions are closed, as far as the system knows. Without poll(), a client that
    closed one direction counts as having left."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(sock.fileno(), 0)  # hang-ups and errors are always reported
    return bool(poll.poll(0))
