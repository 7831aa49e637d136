"""TLS of the doors: the certificate, and the authorities of clients' certificates."""

from __future__ import annotations

import logging
import ssl
from typing import Any, Final

from config.server import ServerSettings
from service.processes.handed_files import ReadFile, as_file, from_disk, why_unreadable

LOG: Final = logging.getLogger("attnd.doors")
HANDSHAKE_S: Final = 10.0
"""Timeout of the TLS handshake."""


MARKS: Final = {
    "tls_cert": ("certificate", b"CERTIFICATE-----"),
    "tls_key": ("private key", b"PRIVATE KEY-----"),
    "tls_client_ca": ("certificate", b"CERTIFICATE-----"),
}
"""The content of each setting's file, and its mark in PEM."""
ENCRYPTED: Final = b"ENCRYPTED"
MISMATCH: Final = "key values mismatch: the key belongs to another certificate: name a pair"


class TlsError(ValueError):
    """A file cannot be used; one line with the setting and the file."""


class Tls:
    """The context of new connections, and its files."""

    def __init__(
        self, certificate: str, key: str, client_ca: str | None, read: ReadFile = from_disk
    ) -> None:
        """`read` returns a file's contents. Raises TlsError."""
        self.certificate = certificate
        self.key = key
        self.read = read
        self.pair = (b"", b"")
        """Certificate and key, as last read."""
        self.context = self.context_of_files(client_ca)

    def context_of_files(self, client_ca: str | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.load(context)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            authorities = self.contents("tls_client_ca", client_ca)
            try:
                with as_file(authorities) as path:
                    context.load_verify_locations(path)
            except (OSError, ssl.SSLError) as error:
                raise TlsError(f"server.tls_client_ca {client_ca}: {reason(error)}") from error
        return context

    def contents(self, setting: str, path: str) -> bytes:
        """The contents of a setting's file. Raises TlsError."""
        try:
            data = self.read(path)
        except OSError as error:
            raise TlsError(f"server.{setting} {path}: {why_unreadable(error)}") from error
        content, mark = MARKS[setting]
        if mark not in data:
            raise TlsError(
                f"server.{setting} {path}: no {content} in it: name a PEM file, which has a line "
                f"-----BEGIN {mark.decode()}"
            )
        return data

    def load(self, context: ssl.SSLContext) -> None:
        pair = self.contents("tls_cert", self.certificate), self.contents("tls_key", self.key)
        if ENCRYPTED in pair[1]:
            raise TlsError(
                f"server.tls_key {self.key}: the key is encrypted, the service has no "
                f"password: name an unencrypted key (openssl pkey -in {self.key} -out plain.pem)"
            )
        try:
            with as_file(pair[0]) as chain, as_file(pair[1]) as key:
                context.load_cert_chain(chain, key)
            self.pair = pair
        except (OSError, ssl.SSLError) as error:
            files = f"server.tls_cert {self.certificate}, server.tls_key {self.key}"
            raise TlsError(f"{files}: {reason(error)}") from error

    def read_again(self) -> bool:
        """Read the files again for new connections; returns whether the certificate changed. An
        unusable file changes nothing, and is logged."""
        before = self.pair
        try:
            self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # half of a pair spoils a context
            self.load(self.context)
        except TlsError as error:
            LOG.error("%s: the certificate is unchanged", error)
            return False
        if self.pair == before:
            return False
        LOG.info("the certificate was read again")
        return True


def make_tls(server: ServerSettings, read: ReadFile = from_disk) -> Tls | None:
    """None without TLS. Raises TlsError."""
    if server.tls_cert is None or server.tls_key is None:
        return None
    return Tls(server.tls_cert, server.tls_key, server.tls_client_ca, read)


class GrpcCredentials:
    """The current certificate in the form that grpc has; new connections use it."""

    def __init__(self, server: ServerSettings, tls: Tls) -> None:
        self.server = server
        self.tls = tls
        self.now = self.configuration()

    def configuration(self) -> Any:
        """The files' contents, which were checked before."""
        import grpc  # an extra

        server, read = self.server, self.tls.read
        files = (server.tls_key, server.tls_cert, server.tls_client_ca)
        key, chain, authorities = (None if path is None else read(path) for path in files)
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def made(self) -> Any:
        """grpc's credentials, which fetch the current certificate for each connection."""
        import grpc

        has_ca = self.server.tls_client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self.now, lambda: self.now, has_ca)

    def read_again(self) -> None:
        """Use the certificate that `tls` has read again."""
        self.now = self.configuration()


def reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return MISMATCH
        return (error.reason or "not a PEM file").lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
