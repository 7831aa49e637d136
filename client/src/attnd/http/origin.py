"""`Origin`: the address of the service, TLS and key, from a base URL or a Unix socket's path."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

from attnd.errors import ConnectionFailed
from attnd.http.messages import Request

if TYPE_CHECKING:
    from ssl import SSLContext

KEY: Final = re.compile(r"[\x21-\x7e]+")
USER_AGENT: Final = "attnd-client"
PORTS: Final = {"http": 80, "https": 443}

Verify: TypeAlias = "bool | str | SSLContext"
"""Trusted certificates of services: the system's (True), a PEM file's, any (False), or an
`ssl.SSLContext`."""
Certificate: TypeAlias = str | tuple[str, str] | None
"""PEM files of a client's certificate and its key; one file may hold both."""

KEEP_IDLE_S: Final = 60.0
"""Idle connections are closed before the service closes them (75 s) under a new request."""
MAX_CONNECTIONS: Final = 100
"""In use at a time. A further call waits for one of them within its timeout."""


@dataclass(frozen=True, slots=True)
class Origin:
    """`uds` takes precedence over host and port, which `host_header` contains. `prefix` is the
    beginning of every path. `secret` are headers that no error shows; `context` is for TLS."""

    host: str
    port: int
    tls: bool
    host_header: str
    prefix: str = ""
    uds: str | None = None
    secret: str = field(default="", repr=False)
    context: SSLContext | None = None

    @property
    def unanswered(self) -> str:
        """Why a connection may end without an answer."""
        if self.tls or self.uds is not None:
            return ""
        return f": where {self} speaks TLS, base_url must begin with https://"

    def __str__(self) -> str:
        return f"unix:{self.uds}" if self.uds else f"{self.host}:{self.port}"

    def head(self, request: Request) -> bytes:
        length = request.body_bytes
        lines = "".join([f"{name}: {value}\r\n" for name, value in request.headers.items()])
        if length or request.method in ("POST", "PUT"):
            lines += f"content-length: {length}\r\n"
        return (
            f"{request.method} {self.prefix}{request.target} HTTP/1.1\r\n"
            f"host: {self.host_header}\r\nuser-agent: {USER_AGENT}\r\n"
            f"{self.secret}{lines}x-request-id: {request.request_id}\r\n\r\n"
        ).encode("latin-1")


def origin_of(
    base_url: str,
    uds: str | None,
    api_key: str | None = None,
    verify: Verify = True,
    cert: Certificate = None,
) -> Origin:
    """Read a URL like `http://127.0.0.1:8080`; raises ValueError for one that is not of this kind.

    A path becomes the prefix of all paths.
    """
    url = urlsplit(base_url)
    if url.scheme not in PORTS or not url.hostname or url.username or url.query or url.fragment:
        raise ValueError(
            f"base_url is {base_url!r}: it must be http:// or https://, a host, and at most a port "
            "and a path"
        )
    if api_key is not None and not KEY.fullmatch(api_key):
        raise ValueError("api_key must be visible ASCII characters, without spaces")
    return Origin(
        host=url.hostname,
        port=url.port or PORTS[url.scheme],
        tls=url.scheme == "https",
        host_header=url.netloc,
        prefix=url.path.rstrip("/"),
        uds=uds,
        secret="" if api_key is None else f"authorization: Bearer {api_key}\r\n",
        context=context_of(verify, cert) if url.scheme == "https" and uds is None else None,
    )


def context_of(verify: Verify, cert: Certificate) -> SSLContext:
    """How TLS is spoken. Raises OSError (ssl.SSLError) for files that cannot be used."""
    import ssl  # a service on this host or in this cluster does without

    if isinstance(verify, ssl.SSLContext):
        context = verify
    else:
        try:
            context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
        except OSError as error:
            remedy = "a PEM file of the authority's certificate, or True for the system's"
            raise unusable("verify", verify, remedy, error) from error
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert is not None:
        try:
            context.load_cert_chain(*((cert,) if isinstance(cert, str) else cert))
        except OSError as error:
            remedy = "a PEM file with certificate and key, or (certificate, key)"
            raise unusable("cert", cert, remedy, error) from error
    return context


def unusable(name: str, value: object, remedy: str, error: OSError) -> OSError:
    """The error for files that TLS cannot use, of its own kind."""
    reason = error.strerror or str(error)
    return type(error)(error.errno, f"{name} is {value!r}: {reason}: it must be {remedy}")


def no_connection(origin: Origin, error: OSError) -> ConnectionFailed:
    """The error for a connection that could not be made, with the remedy."""
    reason = getattr(error, "reason", "") or ""
    remedy = ""
    if reason == "CERTIFICATE_VERIFY_FAILED":
        remedy = ": give the PEM file of the service's authority as verify"
    elif reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
        remedy = ": where the service speaks no TLS, base_url must begin with http://"
    cause = str(error) or "no answer in time"
    return ConnectionFailed(f"no connection to {origin}: {cause}{remedy}")
