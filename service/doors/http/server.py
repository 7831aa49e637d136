"""The HTTP door's server: uvicorn's, on sockets that listen already, ended by a drain.

A TLS handshake counts like a connection, and the oldest ends for a new one: clients that never
shake hands would take every descriptor.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import uvicorn

from service.doors.http.door import Door
from service.doors.http.protocol.connection import Connection
from service.doors.kit.hosts import HostRule
from service.doors.kit.ledger import make_tracing
from service.doors.kit.process import DRAINING, ENGINE_LATER_S, Setup, connect
from service.doors.kit.tls import HANDSHAKE_S, Tls, make_tls
from service.errors import NotReady
from service.keys import make_authenticator

BACKLOG: Final = 2048
CUT_OFF: Final = "the drain ended while the engine ran the operation; it may have been applied"
LAST_BYTES_S: Final = 0.2
"""Time for the last responses when the drain has taken all of its own."""


class Server(uvicorn.Server):
    """Serves until it is drained. `failed` says why it could not serve."""

    def __init__(self, setup: Setup) -> None:
        """Raises KeysError, TlsError, TracingError."""
        super().__init__(configuration())
        settings, read = setup.settings, setup.read_file
        self.setup = setup
        self.settings = settings
        self.authenticator = make_authenticator(settings.auth, read)
        self.tls = make_tls(settings.server, read)
        self.tracing = make_tracing(settings.log.otlp_endpoint, setup.name)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.door: Door | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.accepting: list[asyncio.AbstractServer | TlsAcceptor] = []
        self.ends = 0.0
        """When the drain must be over, by the loop's clock."""
        self.failed = ""

    # called by uvicorn

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.door = door = Door(
            self.settings.server,
            self.setup.metrics,
            self.authenticator,
            self.tracing,
            self.setup.make_upstream,
            HostRule(self.settings),
        )
        self.connecting = loop.create_task(self.connect(door))
        self.accepting = [await listen(loop, door, one, self.tls) for one in self.setup.sockets]
        self.setup.on_loop(loop, self)
        self.started = True

    async def main_loop(self) -> None:
        await self.ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.connecting is not None:
            self.connecting.cancel()
            with suppress(asyncio.CancelledError):
                await self.connecting
        for server in self.accepting:
            server.close()
        if self.door is not None:
            await self.door.close(max(self.ends - self.door.loop.time(), LAST_BYTES_S))
        if self.tracing is not None:
            await self.tracing.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No signals: the door's process handles them."""
        yield

    # the server's own

    async def connect(self, door: Door) -> None:
        failed = await connect(self.setup, door.link)
        if failed is not None:
            self.failed = failed
            self.stop()

    def drain(self) -> None:
        """Stop accepting, respond to accepted requests, then end; in the loop's thread."""
        if self.door is not None and not self.door.draining:
            for server in self.accepting:
                server.close()
            self.draining = self.door.loop.create_task(self.finish(self.door))

    async def finish(self, door: Door) -> None:
        door.drain(DRAINING)
        limit_s = self.settings.server.drain_timeout_s
        self.ends = door.loop.time() + limit_s
        try:
            await asyncio.wait_for(door.drained.wait(), limit_s + ENGINE_LATER_S)
        except TimeoutError:
            door.give_up(NotReady(CUT_OFF))
        self.stop()

    def stop(self) -> None:
        self.should_exit = True
        self.ended.set()

    def read_again(self) -> None:
        """Read keys and certificate again; in the loop's thread."""
        if self.authenticator is not None:
            self.authenticator.read_again()
        if self.tls is not None:
            self.tls.read_again()


def configuration() -> uvicorn.Config:
    """The parts of uvicorn in use: its loop, and its order of start and end."""
    return uvicorn.Config(
        not_called,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
    )


async def not_called(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("connections call the door's application: this is a bug")


async def listen(
    loop: asyncio.AbstractEventLoop, door: Door, sock: socket.socket, tls: Tls | None
) -> asyncio.AbstractServer | TlsAcceptor:
    def connection() -> Connection:
        return Connection(door)

    if sock.family == socket.AF_UNIX:
        return await loop.create_unix_server(connection, sock=sock, backlog=BACKLOG)
    if tls is not None:
        return TlsAcceptor(door, sock, tls)
    return await loop.create_server(connection, sock=sock, backlog=BACKLOG)


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
