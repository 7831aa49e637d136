"""The gRPC door's server: grpc.aio's with the certificate of HTTPS, until its drain has ended."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import grpc
import grpc.aio

from config.server import ServerSettings
from service.doors.grpc.door import GrpcDoor
from service.doors.kit.ledger import make_tracing
from service.doors.kit.process import DRAINING, ENGINE_LATER_S, Setup, connect, descriptors
from service.doors.kit.tls import HANDSHAKE_S, Tls, make_tls
from service.keys import make_authenticator
from service.processes.handed_files import ReadFile


class Credentials:
    """The current certificate; new connections use it."""

    def __init__(self, server: ServerSettings, tls: Tls) -> None:
        self.server = server
        self.tls = tls
        self.now = configuration(server, tls.read)

    def made(self) -> Any:
        """grpc's credentials, which fetch the current certificate for each connection."""
        has_ca = self.server.tls_client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self.now, lambda: self.now, has_ca)

    def read_again(self) -> None:
        """As `Tls.read_again`: an unusable file changes nothing."""
        if self.tls.read_again():
            self.now = configuration(self.server, self.tls.read)


def configuration(server: ServerSettings, read: ReadFile) -> Any:
    """grpc's configuration with the files' contents, which were checked before."""
    key, chain, authorities = (
        None if path is None else read(path)
        for path in (server.tls_key, server.tls_cert, server.tls_client_ca)
    )
    return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)


LOG: Final = logging.getLogger("attnd.grpc")
MESSAGE_BYTES: Final = 2**20
"""Room for a message beside the bytes of its tensors."""
MAX_INT: Final = 2**31 - 1
UNCOMPRESSED: Final = 1
"""64 KB of gzip can be a message of 64 MB, with which the door is busy for a quarter second."""
MORE_STREAMS: Final = 64
"""Streams of one connection beyond all calls of the door: for health checks and rejections."""


class Server:
    """Serves until it is drained. `failed` says why it could not serve."""

    def __init__(self, setup: Setup) -> None:
        """Raises KeysError, TlsError, TracingError."""
        settings, read = setup.settings, setup.read_file
        self.setup = setup
        self.limits = settings.server
        self.authenticator = make_authenticator(settings.auth, read)
        tls = make_tls(settings.server, read)
        self.credentials = None if tls is None else Credentials(settings.server, tls)
        self.tracing = make_tracing(settings.log.otlp_endpoint, setup.name)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.door: GrpcDoor | None = None
        self.port = 0
        """The port that was bound."""
        self.failed = ""

    def run(self) -> None:
        asyncio.run(self.serve(self.limits.grpc_port or 0))

    async def serve(self, port: int) -> None:
        """From the start to the end; port 0: a free one."""
        self.ended = asyncio.Event()
        self.loop = loop = asyncio.get_running_loop()
        self.setup.on_loop(loop, self)
        self.door = door = GrpcDoor(
            self.limits,
            self.setup.metrics,
            self.authenticator,
            self.tracing,
            self.setup.make_upstream,
        )
        server = grpc.aio.server(interceptors=(door.admission,), options=options(self.limits))
        server.add_generic_rpc_handlers((door.handlers(),))
        address = f"{self.limits.url_host}:{port}"
        connecting = None
        try:
            if self.credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, self.credentials.made())
            await server.start()
            LOG.info("gRPC at %s:%d", self.limits.url_host, self.port)
            connecting = loop.create_task(self.connect(door))
            await self.ended.wait()
            door.drain(DRAINING)
            await server.stop(self.limits.drain_timeout_s + ENGINE_LATER_S)
        except RuntimeError as error:
            self.failed = f"server.host {self.limits.host}, server.grpc_port {port}: {error}"
        finally:
            if connecting is not None:
                connecting.cancel()
            door.close()
            if self.tracing is not None:
                await self.tracing.close()

    async def connect(self, door: GrpcDoor) -> None:
        failed = await connect(self.setup, door.link)
        if failed is not None:
            self.failed = failed
            self.ended.set()

    def read_again(self) -> None:
        """Read keys and certificate again; in the loop's thread."""
        if self.authenticator is not None:
            self.authenticator.read_again()
        if self.credentials is not None:
            self.credentials.read_again()

    def drain(self) -> None:
        """Accept no more calls, respond to the accepted ones, then end; in the loop's thread."""
        self.ended.set()


def options(limits: ServerSettings) -> list[tuple[str, int]]:
    """gRPC's options: a second service on the port fails, idle connections are closed. A client's
    library waits with calls beyond a connection's limit."""
    largest = min(limits.grpc_max_message_bytes, limits.max_body_bytes + MESSAGE_BYTES)
    idle_ms = min(int(limits.idle_timeout_s * 1e3) + 1, MAX_INT)
    most, spare = descriptors()
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.max_concurrent_streams", limits.grpc_max_calls + MORE_STREAMS),
        ("grpc.max_connection_idle_ms", idle_ms),
        ("grpc.max_allowed_incoming_connections", min(most - spare, MAX_INT)),
        ("grpc.compression_enabled_algorithms_bitset", UNCOMPRESSED),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1e3)),
    ]
