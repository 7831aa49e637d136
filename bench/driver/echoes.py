"""Bare echoes, whose time is that of sockets, processes and loops alone.

`app` is an ASGI application: it reads the whole body of `POST /{n}` and answers n random bytes.
`python -m bench.driver.echoes PATH` answers every CALL frame of the road with an empty ANSWER.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from typing import Any, Final

from bench.driver.raw import ANSWER, ANSWER_KIND, CALL, HEADER, HELLO_KIND, WELCOME_KIND

Message = MutableMapping[str, Any]
ROUTE: Final = 9


@cache
def payload(size: int) -> bytes:
    return os.urandom(size)


async def app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Answers `GET /health/ready` too, so that `running` can wait for it."""
    ready = scope["path"] == "/health/ready"
    body = payload(0 if ready else int(scope["path"][1:]))
    while (await receive()).get("more_body", False):
        pass
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class EchoSession:
    """One caller on the road."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray(65536)
        self.view = memoryview(self.buffer)
        self.greeted = False

    def read(self) -> bool:
        """Answer the frames that have come; False at the end of the stream.

        A caller waits for its answer before it sends more, so frames arrive whole.
        """
        count = self.sock.recv_into(self.view)
        if count and not self.greeted:
            self.greet()
        elif count:
            for begin in range(0, count, CALL.size):
                number = CALL.unpack_from(self.buffer, begin)[3]
                head = (ANSWER_KIND, 0, ANSWER.size - HEADER.size, number, 200)
                self.sock.send(ANSWER.pack(*head, 0, 0, 0, 0, *(0.0,) * 6))
        return count > 0

    def greet(self) -> None:
        """Answer HELLO with WELCOME and an arena of the requested size."""
        kind, _, size = HEADER.unpack_from(self.buffer)
        if kind != HELLO_KIND:
            raise RuntimeError(f"frame {kind}, expected HELLO")
        arena_bytes = json.loads(bytes(self.view[HEADER.size : HEADER.size + size]))["arena_bytes"]
        arena = os.memfd_create("road-echo")
        os.ftruncate(arena, arena_bytes)
        welcome = json.dumps({"arena_bytes": arena_bytes, "routes": {"decode": ROUTE}}).encode()
        data = HEADER.pack(WELCOME_KIND, 0, len(welcome)) + welcome
        socket.send_fds(self.sock, [data], [arena])
        os.close(arena)
        self.greeted = True


def serve(path: str) -> None:
    """Serve the road's echo until the process is ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            session: EchoSession | None = key.data
            if session is None:
                sock, _ = listener.accept()
                selector.register(sock, selectors.EVENT_READ, EchoSession(sock))
            elif not session.read():
                selector.unregister(session.sock)
                session.sock.close()


if __name__ == "__main__":
    serve(sys.argv[1])
