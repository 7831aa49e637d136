"""TLS of the gRPC door: HTTPS's certificate, and the authorities of clients' certificates."""

from __future__ import annotations

from typing import Any

import grpc

from config.server import ServerSettings
from service.doors.kit.tls import Tls, make_tls
from service.processes.handed_files import ReadFile, from_disk


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


def make_credentials(server: ServerSettings, read: ReadFile = from_disk) -> Credentials | None:
    """None without TLS. Raises TlsError."""
    tls = make_tls(server, read)
    return None if tls is None else Credentials(server, tls)
