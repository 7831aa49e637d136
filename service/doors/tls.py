"""TLS for the doors: the certificate, and those that clients must show."""

from __future__ import annotations

import logging
import ssl
from typing import Final

from config.server import ServerSettings
from service.handed_files import ReadFile, as_file, from_disk

LOG: Final = logging.getLogger("attnd.doors")
HANDSHAKE_S: Final = 10.0
"""A client that has not shaken hands by then is cut off."""


class TlsError(ValueError):
    """The files cannot be used; one line that names the setting and the file."""


class Tls:
    """The context that connections are made with, and the files it came from."""

    def __init__(
        self, certificate: str, key: str, client_ca: str | None, read: ReadFile = from_disk
    ) -> None:
        """`read` gives the files' contents. Raises TlsError."""
        self.certificate = certificate
        self.key = key
        self.read = read
        self.pair = (b"", b"")
        """Certificate and key as they were read last."""
        self.context = self.context_of_files(client_ca)

    def context_of_files(self, client_ca: str | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.load(context)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                with as_file(self.read(client_ca)) as path:
                    context.load_verify_locations(path)
            except (OSError, ssl.SSLError) as error:
                raise TlsError(f"server.tls_client_ca {client_ca}: {reason(error)}") from error
        return context

    def load(self, context: ssl.SSLContext) -> None:
        try:
            pair = self.read(self.certificate), self.read(self.key)
            with as_file(pair[0]) as chain, as_file(pair[1]) as key:
                context.load_cert_chain(chain, key)
            self.pair = pair
        except (OSError, ssl.SSLError) as error:
            files = f"server.tls_cert {self.certificate}, server.tls_key {self.key}"
            raise TlsError(f"{files}: {reason(error)}") from error

    def read_again(self) -> bool:
        """Connections to come get the certificate that is in the files now. What cannot be used is
        told in the log, and the certificate stays. Whether there is another one."""
        before = self.pair
        try:
            self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # half of a pair spoils a context
            self.load(self.context)
        except TlsError as error:
            LOG.error("%s: the certificate stays as it was", error)
            return False
        if self.pair == before:
            return False
        LOG.info("the certificate was read again")
        return True


def make_tls(server: ServerSettings, read: ReadFile = from_disk) -> Tls | None:
    """None where HTTP is spoken in the clear. Raises TlsError."""
    if server.tls_cert is None or server.tls_key is None:
        return None
    return Tls(server.tls_cert, server.tls_key, server.tls_client_ca, read)


def reason(error: Exception) -> str:
    """What is wrong with a file, in one line."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not a PEM file").lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
