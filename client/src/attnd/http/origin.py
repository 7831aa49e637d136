"""`Origin`: whom the client talks to, read from a base URL or a Unix socket's path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from attnd.http.messages import Request

USER_AGENT: Final = "attnd-client"
PORTS: Final = {"http": 80, "https": 443}

KEEP_IDLE_S: Final = 60.0
"""Idle connections go before the service closes them (75 s), so none breaks under a request."""
MAX_CONNECTIONS: Final = 100
"""At once; a call beyond them waits for one that is done, as long as its timeout allows."""


@dataclass(frozen=True, slots=True)
class Origin:
    """`uds` goes before host and port. `host_header` names them to the service; `prefix` is what
    every path begins with."""

    host: str
    port: int
    tls: bool
    host_header: str
    prefix: str = ""
    uds: str | None = None

    def __str__(self) -> str:
        return f"unix:{self.uds}" if self.uds else f"{self.host}:{self.port}"

    def head(self, request: Request) -> bytes:
        """The request line and the headers."""
        length = request.body_bytes
        lines = "".join([f"{name}: {value}\r\n" for name, value in request.headers.items()])
        if length or request.method == "POST":
            lines += f"content-length: {length}\r\n"
        return (
            f"{request.method} {self.prefix}{request.target} HTTP/1.1\r\n"
            f"host: {self.host_header}\r\nuser-agent: {USER_AGENT}\r\n{lines}\r\n"
        ).encode("latin-1")


def origin_of(base_url: str, uds: str | None) -> Origin:
    """Read a URL like `http://127.0.0.1:8080`; raises ValueError for one that is not of this kind.

    A path becomes the prefix of all paths.
    """
    url = urlsplit(base_url)
    if url.scheme not in PORTS or not url.hostname or url.username or url.query or url.fragment:
        raise ValueError(
            f"base_url is {base_url!r}: it must be http:// or https://, a host, and at most a port "
            "and a path"
        )
    return Origin(
        host=url.hostname,
        port=url.port or PORTS[url.scheme],
        tls=url.scheme == "https",
        host_header=url.netloc,
        prefix=url.path.rstrip("/"),
        uds=uds,
    )
