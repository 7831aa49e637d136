"""The road over TCP, for a cluster's doors on other hosts: images follow their frames.

Without shared memory, each end has an arena of its own, and the arenas mirror each other: the image
of a CALL has the same offset in both, and so has an answer's. A door proves that it knows the
cluster's secret without sending it.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from typing import Any, Final, cast

from attnd.wire.frames import BUFFER_BYTES, Reader

from service.road.arena import anonymous_file, pages

SCHEME: Final = "tcp:"
SILENCE_MS: Final = 30_000
"""A connection without an acknowledgement for this time is dead."""


class Filling:
    """An image being received into `into`, or discarded where that is None."""

    def __init__(self, into: memoryview | None, length: int) -> None:
        self.into = into
        self.left = length

    def feed(self, reader: Reader) -> None:
        """Take the bytes that the reader has of it."""
        while self.left and (count := reader.take(self.room())):
            self.got(count)

    def receive(self, sock: socket.socket) -> int:
        """One read's worth from the socket; 0 at the end of the stream. Raises its errors."""
        count = sock.recv_into(self.room())
        self.got(count)
        return count

    def room(self) -> memoryview:
        if self.into is None:
            return memoryview(bytearray(min(self.left, BUFFER_BYTES)))
        return self.into[: self.left]

    def got(self, count: int) -> None:
        self.left -= count
        if self.into is not None:
            self.into = self.into[count:]


def proof(secret: str, nonce: str) -> str:
    """Proves to the sender of this nonce that the caller knows the secret."""
    return hmac.new(secret.encode(), nonce.encode(), "sha256").hexdigest()


def engine_proof(secret: str, nonce: str) -> str:
    """Proves to a door that the engine knows the secret. No nonce of a CHALLENGE begins like this,
    so a door's own proof cannot be replayed to it."""
    return proof(secret, f"engine {nonce}")


def is_remote(address: str) -> bool:
    return address.startswith(SCHEME)


def host_and_port(address: str) -> tuple[str, int]:
    """Of `tcp:HOST:PORT`, where HOST may be in brackets. Raises ValueError."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    return host.strip("[]"), int(port)


def tune(sock: socket.socket) -> None:
    """Send frames at once, and detect a host that is down."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)


def mirror(size: int) -> int:
    """A file for an arena of this process alone."""
    fd, _ = anonymous_file()
    os.ftruncate(fd, pages(size))
    return fd


async def connected(path: str) -> socket.socket:
    """A connection to the engine's socket, or to `tcp:HOST:PORT`. Raises OSError."""
    loop = asyncio.get_running_loop()
    family, address = socket.AF_UNIX, cast(Any, path)
    if is_remote(path):
        found = await loop.getaddrinfo(*host_and_port(path), type=socket.SOCK_STREAM)
        family, address = found[0][0], found[0][4]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        if is_remote(path):
            tune(sock)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
