"""Accepts TLS connections. A handshake counts like a connection, and the oldest ends for a new
one: clients that never shake hands would take every descriptor."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from service.doors.http.protocol.connection import Connection
from service.doors.kit.tls import HANDSHAKE_S, Tls

if TYPE_CHECKING:
    from service.doors.http.door import Door

AT_ONCE: Final = 32
"""Connections that are accepted in one pass of the loop."""
RETRY_S: Final = 0.1
"""Pause after an error of the system, for example without descriptors."""


class TlsAcceptor:
    """Accepts on one listening socket until it is closed."""

    def __init__(self, door: Door, sock: socket.socket, tls: Tls) -> None:
        self.door = door
        self.sock = sock
        self.tls = tls
        self.pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self.start()

    def start(self) -> None:
        self.pause = None
        self.door.loop.add_reader(self.sock, self.accept)

    def accept(self) -> None:
        """Clients wait."""
        for _ in range(AT_ONCE):
            try:
                client, _ = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self.door.loop.remove_reader(self.sock)
                self.pause = self.door.loop.call_later(RETRY_S, self.start)
                return
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.door.begin_handshake(client, self.shake_hands(client))

    async def shake_hands(self, client: socket.socket) -> None:
        """The handshake of one client; its connection begins afterwards."""
        with suppress(OSError):  # the client left, was slow, or spoke no TLS
            await self.door.loop.connect_accepted_socket(
                lambda: Connection(self.door),
                client,
                ssl=self.tls.context,
                ssl_handshake_timeout=HANDSHAKE_S,
            )

    def close(self) -> None:
        """May be called again."""
        if self.pause is not None:
            self.pause.cancel()
        if self.sock.fileno() >= 0:
            self.door.loop.remove_reader(self.sock)
            self.sock.close()
