"""A server that plays bytes: the test decides its answers, and how they are cut and ended."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Callable

from tests.client.client_stub import SEQUENCE
from tests.harness.listener import Listener

LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


class Peer:
    """One connection of a client, for a script to talk to."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.rest = bytearray()

    def head(self) -> bytes:
        """The next request up to its body; b"" when there is none."""
        while b"\r\n\r\n" not in self.rest:
            more = self.socket.recv(65536)
            if not more:
                return b""
            self.rest += more
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        return bytes(head)

    def request(self) -> tuple[bytes, bytes] | None:
        """Head and body of the next request; None when there is none."""
        head = self.head()
        if not head:
            return None
        found = LENGTH.search(head)
        length = int(found[1]) if found else 0
        while len(self.rest) < length:
            self.rest += self.socket.recv(1 << 20)
        body, self.rest = self.rest[:length], self.rest[length:]
        return head, bytes(body)

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.socket.sendall(piece)


Script = Callable[[Peer], None]


class ScriptedServer(Listener):
    """Runs `script` for every connection; close it, or use `with`."""

    def __init__(self, script: Script, path: str | None = None) -> None:
        self.script = script
        self.peers: list[Peer] = []
        super().__init__(path)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def serve(self, connected: socket.socket) -> None:
        self.peers.append(Peer(connected))
        self.script(self.peers[-1])


BODY = json.dumps(SEQUENCE).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def answer_of(fields: object) -> bytes:
    """A whole answer with JSON."""
    body = json.dumps(fields).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


WHOLE = answer_of(SEQUENCE)


def answering(*pieces: bytes, times: float = math.inf) -> Script:
    """Answer requests with these pieces, one after the other; close after the last of `times`."""

    def script(peer: Peer) -> None:
        count = 0
        while count < times and peer.request() is not None:
            peer.send(*pieces)
            count += 1

    return script


def once(*pieces: bytes) -> Script:
    """Answer one request with these pieces, and close."""
    return answering(*pieces, times=1)
