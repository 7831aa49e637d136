"""Whether a client that has closed its sending side is still there."""

from __future__ import annotations

import asyncio
import select
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from service.doors.http.protocol.connection import Connection
    from service.doors.http.protocol.exchange import Exchange

FIRST_LOOK_S: Final = 0.02
"""Most answers are out sooner than this after the client has closed its side."""
NEXT_LOOK_S: Final = 0.1
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Watch:
    """Looks after a client that has closed its side while its answer is not there yet.

    It may still read, or not: TCP tells only when something is sent to it, and an interim response
    is what may be sent at any time, or in a stream its filler.
    """

    __slots__ = ("connection", "has_probed", "look_again")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.has_probed = False
        first = connection.loop.call_later(FIRST_LOOK_S, self.look)
        self.look_again: asyncio.TimerHandle = first

    def look(self) -> None:
        """Take back the work of a client that is gone."""
        connection = self.connection
        exchange, transport = connection.exchange, connection.transport
        if exchange is None or transport.is_closing():
            return
        if hung_up(transport.get_extra_info("socket")):
            transport.abort()
            return
        if not self.has_probed:
            self.has_probed = True
            transport.write(probe_of(exchange))
        self.look_again = connection.loop.call_later(NEXT_LOOK_S, self.look)

    def stop(self) -> None:
        self.look_again.cancel()


def probe_of(exchange: Exchange) -> bytes:
    """What may be sent to whoever waits, now."""
    if exchange.is_answered:  # by a stream
        return exchange.filler
    return CONTINUE if exchange.head is not None and exchange.head.is_http_11 else b""


def hung_up(sock: Any) -> bool:
    """Both directions are closed, as far as the system knows. Where it has no poll(), a client that
    closed one direction counts as gone."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(sock.fileno(), 0)  # hang-ups and errors are told unasked
    return bool(poll.poll(0))
