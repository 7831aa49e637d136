"""The door's server: uvicorn's, on sockets that listen already, ended by a drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final

import uvicorn
from attnd.wire.frames import FrameError

from config.sections import Settings
from service.doors.http.door import Door
from service.doors.http.protocol.connection import Connection
from service.doors.http.protocol.hosts import HostRule
from service.doors.kit.authentication import make_authenticator
from service.doors.kit.link import Link
from service.doors.kit.tls import HANDSHAKE_S, Tls, make_tls
from service.doors.kit.tracing import make_tracing
from service.doors.kit.upstream import MakeUpstream
from service.errors import NotReady
from service.metrics import Metrics
from service.processes.handed_files import ReadFile, from_disk

LOG: Final = logging.getLogger("attnd.http")
DRAINING: Final = "draining: admitted work is being finished, and no more is taken"
BACKLOG: Final = 2048
CUT_OFF: Final = "stopped while the engine was at the operation; it may have taken effect"
ENGINE_LATER_S: Final = 2.0
"""The engine answers what it cannot finish when its own drain ends, once its slice is done."""
LEAST_LAST_BYTES_S: Final = 0.2
"""How long the last answers may take to go out when the drain has taken all its time."""


class Server(uvicorn.Server):
    """Serves until it is told to drain. `failed` says why it could not serve at all."""

    def __init__(
        self,
        settings: Settings,
        engine_socket: str,
        sockets: Sequence[socket.socket],
        metrics: Metrics,
        name: str,
        secret: str,
        make_upstream: MakeUpstream = Link,
        read: ReadFile = from_disk,
    ) -> None:
        """`secret` is what tells the engine that this is a door; `read` gives the contents of key
        and certificate files.

        Raises KeysError, TlsError, TracingError.
        """
        super().__init__(configuration())
        self.settings = settings
        self.engine_socket = engine_socket
        self.listening = tuple(sockets)
        self.metrics = metrics
        self.name = name
        self.secret = secret
        self.make_upstream = make_upstream
        self.authenticator = make_authenticator(settings.auth, read)
        self.tls = make_tls(settings.server, read)
        self.tracing = make_tracing(settings.log.otlp_endpoint, name)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.door: Door | None = None
        self.meeting: asyncio.Task[None] | None = None
        self.accepting: list[asyncio.AbstractServer] = []
        self.ends = 0.0
        """When the drain must be over, by the loop's clock."""
        self.failed = ""
        self.on_loop: Callable[[asyncio.AbstractEventLoop], object] | None = None
        self.on_ready: Callable[[], object] | None = None
        """Called in the loop's thread when the engine is met."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = loop = asyncio.get_running_loop()
        self.door = door = Door(
            self.settings.server,
            self.metrics,
            self.authenticator,
            self.tracing,
            self.make_upstream,
            HostRule(self.settings),
        )
        self.ended = asyncio.Event()
        self.meeting = loop.create_task(self.meet(door))
        self.accepting = [await listen(loop, door, sock, self.tls) for sock in self.listening]
        if self.on_loop is not None:
            self.on_loop(loop)
        self.started = True

    async def meet(self, door: Door) -> None:
        """Connect to the engine; it answers when it is ready to take calls."""
        try:
            await door.link.connect(self.engine_socket, self.name, self.secret)
        except (ConnectionError, FileNotFoundError) as error:
            # the engine could not start, and has said why: whoever started both ends the service
            LOG.debug("the engine at %s has gone: %s", self.engine_socket, error)
            self.stop()
            return
        except (OSError, NotReady, FrameError) as error:
            self.failed = f"the engine at {self.engine_socket} cannot be called: {error}"
            LOG.error("cannot start: %s", self.failed)
            self.stop()
            return
        gc.collect()
        gc.freeze()  # what the start made would make all later collections pause for its size
        if self.on_ready is not None:
            self.on_ready()

    async def main_loop(self) -> None:
        await self.ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.meeting is not None:
            self.meeting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.meeting
        for server in self.accepting:
            server.close()
        if self.door is not None:
            await self.door.close(max(self.ends - loop_time(), LEAST_LAST_BYTES_S))
        if self.tracing is not None:
            await self.tracing.close()

    def stop(self) -> None:
        """End at once."""
        self.should_exit = True
        self.ended.set()

    def begin_drain(self) -> None:
        """Stop accepting, answer what was admitted, then end; in the loop's thread."""
        if self.door is not None and not self.door.draining:
            for server in self.accepting:
                server.close()
            self.draining = asyncio.get_running_loop().create_task(self.drain(self.door))

    async def drain(self, door: Door) -> None:
        door.drain(DRAINING)
        patience = self.settings.server.drain_timeout_s
        self.ends = loop_time() + patience
        try:
            await asyncio.wait_for(door.drained.wait(), patience + ENGINE_LATER_S)
        except TimeoutError:
            door.give_up(NotReady(CUT_OFF))
        self.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM begins the drain. Nothing else is listened to: Ctrl-C is for whoever started this
        process, and whoever loses patience with it kills it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self.handle_exit)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def read_again(self) -> None:
        """Keys and certificate may have changed; in the loop's thread."""
        if self.authenticator is not None:
            self.authenticator.read_again()
        if self.tls is not None:
            self.tls.read_again()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.loop is None:
            self.should_exit = True
        else:
            self.loop.call_soon_threadsafe(self.begin_drain)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def configuration() -> uvicorn.Config:
    """What of uvicorn's is used: its loop, its signals, its order of start and end."""
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
) -> asyncio.AbstractServer:
    def connection() -> Connection:
        return Connection(door)

    if sock.family == socket.AF_UNIX:
        return await loop.create_unix_server(connection, sock=sock, backlog=BACKLOG)
    if tls is None:
        return await loop.create_server(connection, sock=sock, backlog=BACKLOG)
    return await loop.create_server(
        connection,
        sock=sock,
        backlog=BACKLOG,
        ssl=tls.context,
        ssl_handshake_timeout=HANDSHAKE_S,
    )


def make_server(
    settings: Settings,
    engine_socket: str,
    sockets: Sequence[socket.socket],
    metrics: Metrics,
    name: str = "http-0",
    secret: str = "",
    make_upstream: MakeUpstream = Link,
    read: ReadFile = from_disk,
) -> Server:
    """A door for sockets that listen; `run` it in any thread, signals are only for the main one."""
    return Server(settings, engine_socket, sockets, metrics, name, secret, make_upstream, read)
