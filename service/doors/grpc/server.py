"""The gRPC door's server: grpc.aio's, from its start to the end of its drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio
from attnd.wire.frames import FrameError

from config.sections import Settings
from config.server import ServerSettings
from service.doors.grpc.credentials import make_credentials
from service.doors.grpc.door import GrpcDoor
from service.doors.kit.authentication import make_authenticator
from service.doors.kit.link import Link
from service.doors.kit.tls import HANDSHAKE_S
from service.doors.kit.tracing import make_tracing
from service.doors.kit.upstream import MakeUpstream
from service.errors import NotReady
from service.metrics import Metrics
from service.processes.handed_files import ReadFile, from_disk

LOG: Final = logging.getLogger("attnd.grpc")
DRAINING: Final = "draining: admitted work is being finished, and no more is taken"
MESSAGE_BYTES: Final = 2**20
"""Of a message beside its tensors' bytes."""
MOST_MS: Final = 2**31 - 1
ENGINE_LATER_S: Final = 2.0
"""The engine answers what it cannot finish when its own drain ends."""


class Server:
    """Serves until it is told to drain. `failed` says why it could not serve at all."""

    def __init__(
        self,
        settings: Settings,
        engine_socket: str,
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
        self.limits = settings.server
        self.engine_socket = engine_socket
        self.metrics = metrics
        self.name = name
        self.secret = secret
        self.make_upstream = make_upstream
        self.authenticator = make_authenticator(settings.auth, read)
        self.credentials = make_credentials(settings.server, read)
        self.tracing = make_tracing(settings.log.otlp_endpoint, name)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.door: GrpcDoor | None = None
        self.port = 0
        """The one that was bound."""
        self.failed = ""

    async def serve(
        self, port: int, on_loop: Callable[[asyncio.AbstractEventLoop], object] | None = None
    ) -> None:
        """From the start to the end; port 0: a free one."""
        self.ended = asyncio.Event()
        self.loop = loop = asyncio.get_running_loop()
        if on_loop is not None:
            on_loop(loop)
        self.door = door = GrpcDoor(
            self.limits,
            self.metrics,
            self.authenticator,
            self.tracing,
            self.make_upstream,
        )
        server = grpc.aio.server(interceptors=(door.entrance,), options=options(self.limits))
        server.add_generic_rpc_handlers((door.handlers(),))
        address = f"{self.limits.url_host}:{port}"
        meeting = None
        try:
            if self.credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, self.credentials.made())
            await server.start()
            LOG.info("gRPC at %s:%d", self.limits.url_host, self.port)
            meeting = loop.create_task(self.meet(door))
            await self.ended.wait()
            door.drain(DRAINING)
            await server.stop(self.limits.drain_timeout_s + ENGINE_LATER_S)
        except RuntimeError as error:
            self.failed = f"server.host {self.limits.host}, server.grpc_port {port}: {error}"
        finally:
            if meeting is not None:
                meeting.cancel()
            door.close()
            if self.tracing is not None:
                await self.tracing.close()

    async def meet(self, door: GrpcDoor) -> None:
        """Connect to the engine; it answers when it is ready to take calls."""
        try:
            await door.link.connect(self.engine_socket, self.name, self.secret)
        except (ConnectionError, FileNotFoundError) as error:
            # the engine could not start, and has said why: whoever started both ends the service
            LOG.debug("the engine at %s has gone: %s", self.engine_socket, error)
            self.ended.set()
        except (OSError, NotReady, FrameError) as error:
            self.failed = f"the engine at {self.engine_socket} cannot be called: {error}"
            self.ended.set()

    def read_again(self) -> None:
        """Keys and certificate may have changed; in the loop's thread."""
        if self.authenticator is not None:
            self.authenticator.read_again()
        if self.credentials is not None:
            self.credentials.read_again()

    def drain(self) -> None:
        """Take no more calls, answer those that came, then end; in the loop's thread."""
        self.ended.set()


def options(limits: ServerSettings) -> list[tuple[str, int]]:
    """A second service on the port is an error; connections that nobody uses are closed."""
    largest = min(limits.grpc_max_message_bytes, limits.max_body_bytes + MESSAGE_BYTES)
    idle_ms = min(int(limits.idle_timeout_s * 1e3) + 1, MOST_MS)
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.max_connection_idle_ms", idle_ms),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1e3)),
    ]
