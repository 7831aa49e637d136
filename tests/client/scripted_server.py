"""A server that plays bytes: the test decides its answers, and how they are cut and ended."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.client.client_stub import SEQUENCE

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


class ScriptedServer:
    """Runs `script` for every connection; close it, or use `with`."""

    def __init__(self, script: Script, path: str | None = None) -> None:
        self.script = script
        self.peers: list[Peer] = []
        if path is None:
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        else:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(path)
            self.listener.listen()
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        while True:
            try:
                connected, _ = self.listener.accept()
            except OSError:
                return
            self.peers.append(Peer(connected))
            self.threads.append(threading.Thread(target=self.serve, args=(self.peers[-1],)))
            self.threads[-1].start()

    def serve(self, peer: Peer) -> None:
        with suppress(OSError):
            self.script(peer)
        with suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)
        peer.socket.close()

    def close(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for peer in self.peers:
            with suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
        for thread in list(self.threads):
            thread.join()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


BODY = json.dumps(SEQUENCE).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


def answering(*pieces: bytes) -> Script:
    """Answer every request with these pieces, one after the other."""

    def script(peer: Peer) -> None:
        while peer.request() is not None:
            peer.send(*pieces)

    return script


def once(*pieces: bytes) -> Script:
    """Answer one request with these pieces, and close."""

    def script(peer: Peer) -> None:
        if peer.request() is not None:
            peer.send(*pieces)

    return script
