"""The gateway's server: both protocols on one event loop, until it is drained."""

from __future__ import annotations

import asyncio
import logging
from socket import socket
from typing import Final

from attnd.http.origin import origin_of

from service.addresses import listen_tcp
from service.doors.kit.asgi import AsgiServer
from service.doors.kit.ledger import RequestLedger, make_tracing
from service.doors.kit.process import ENGINE_LATER_S, Setup, connect
from service.doors.kit.tls import GrpcCredentials, make_tls
from service.gateway.gateway import Gateway
from service.gateway.grpc_server import make_server
from service.gateway.http_server import OipApplication
from service.gateway.upstream import Elsewhere, OnHost, Upstream
from service.keys import make_authenticator
from service.road.engine_end.listening import CannotListen

LOG: Final = logging.getLogger("attnd.gateway")


class GatewayServer:
    """Serves until it is drained. `failed` says why it could not serve."""

    def __init__(self, setup: Setup, url: str = "") -> None:
        """`url`: of the service to which calls go, maybe `unix:PATH`; empty: to this host's engine.
        Raises KeysError, TlsError, TracingError."""
        self.setup, self.url, self.settings = setup, url, setup.settings
        settings = setup.settings
        self.keys = None if url else make_authenticator(settings.auth, setup.read_file)
        self.tls = make_tls(settings.server, setup.read_file)
        self.credentials = None if self.tls is None else GrpcCredentials(settings.server, self.tls)
        self.tracing = make_tracing(settings.log.otlp_endpoint, setup.name)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.gateway: Gateway | None = None
        self.failed = ""

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        self.ended = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.setup.on_loop(self.loop, self)
        ledger = RequestLedger(self.setup.metrics, self.tracing)
        try:
            upstream = self.make_upstream()
            self.gateway = Gateway(self.settings, upstream, ledger)
            await self.serve_both(self.gateway, upstream)
            await upstream.close()
        except (CannotListen, RuntimeError, ValueError, OSError) as error:
            self.failed = str(error)
        finally:
            ledger.settle()
            if self.tracing is not None:
                await self.tracing.close()

    def make_upstream(self) -> Upstream:
        """Raises ValueError for a URL that is none, and OSError for an unusable certificate."""
        cert = self.settings.oip.client_cert
        if not self.url:
            return OnHost(self.settings.server, self.keys)
        is_own = bool(self.setup.secret)  # at whose address no other can listen: it needs no check
        if is_own and cert is None and self.settings.server.tls_client_ca is not None:
            rule = "the service asks it for a certificate (server.tls_client_ca): set"
            raise ValueError(f"oip.client_cert = None: {rule} a PEM file with certificate and key")
        uds = self.url.removeprefix("unix:") if self.url.startswith("unix:") else None
        base = "http://localhost" if uds else self.url
        return Elsewhere(
            origin_of(base, uds, verify=not is_own, cert=cert), self.settings.server.deadline_s
        )

    async def serve_both(self, gateway: Gateway, upstream: Upstream) -> None:
        """Serve until the drain has ended. Raises CannotListen, RuntimeError."""
        limits, oip = self.settings.server, self.settings.oip
        http, grpc = AsgiServer(OipApplication(gateway), limits, self.tls), make_server(gateway)
        sockets = self.listen("oip.http_port", oip.http_port)
        for one in self.listen("oip.grpc_port", oip.grpc_port):
            one.close()  # it is free: grpc binds it itself
        if oip.grpc_port is not None:
            address = f"{limits.url_host}:{oip.grpc_port}"
            if self.credentials is None:
                grpc.add_insecure_port(address)
            else:
                grpc.add_secure_port(address, self.credentials.made())
        await grpc.start()
        serving = asyncio.create_task(http.serve(list(sockets)))
        connecting = asyncio.create_task(self.connect(upstream))
        await self.ended.wait()
        gateway.draining.set()
        connecting.cancel()
        http.should_exit = True
        await asyncio.gather(grpc.stop(limits.drain_timeout_s + ENGINE_LATER_S), serving)

    def listen(self, setting: str, port: int | None) -> tuple[socket, ...]:
        """Sockets at a port, if there is one. Raises CannotListen."""
        host = self.settings.server.host
        if port is None:
            return ()
        LOG.info("Open Inference Protocol at %s:%d (%s)", host, port, setting)
        return listen_tcp(host, port, self.settings.auth.is_private, setting)

    async def connect(self, upstream: Upstream) -> None:
        failed = await connect(self.setup, upstream)
        if failed is not None:
            self.failed = failed
            self.ended.set()

    def drain(self) -> None:
        """Accept no more calls, respond to the accepted ones, then end; in the loop's thread."""
        self.ended.set()

    def read_again(self) -> None:
        """Read keys and certificate again; in the loop's thread."""
        if self.keys is not None:
            self.keys.read_again()
        if self.tls is not None and self.credentials is not None and self.tls.read_again():
            self.credentials.read_again()
