"""A bare echo of the road's frames: answers every CALL with an empty ANSWER, and touches no tensor.

`python -m bench.driver.road_echo PATH`. Its time is that of the socket, two processes and a loop in
Python.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from typing import Final

from bench.driver.connections import ANSWER, ANSWER_KIND, CALL, HEADER, HELLO_KIND, WELCOME_KIND

ROUTE: Final = 9
ANSWER_PAYLOAD: Final = ANSWER.size - HEADER.size


class Session:
    """One caller: its greeting, then frame for frame."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray(65536)
        self.view = memoryview(self.buffer)
        self.greeted = False

    def ready(self) -> bool:
        """Take in what has come; False at the end of the stream.

        A caller waits for its answer before it sends more, so frames arrive whole.
        """
        count = self.sock.recv_into(self.view)
        if count == 0:
            return False
        if not self.greeted:
            self.greet()
            return True
        for begin in range(0, count, CALL.size):
            number = CALL.unpack_from(self.buffer, begin)[3]
            head = (ANSWER_KIND, 0, ANSWER_PAYLOAD, number, 200)
            self.sock.send(ANSWER.pack(*head, 0, 0, 0, 0, *(0.0,) * 6))
        return True

    def greet(self) -> None:
        """WELCOME, and an arena of the size asked for."""
        kind, _, size = HEADER.unpack_from(self.buffer)
        if kind != HELLO_KIND:
            raise RuntimeError(f"frame {kind} in place of HELLO")
        arena_bytes = json.loads(bytes(self.view[HEADER.size : HEADER.size + size]))["arena_bytes"]
        arena = os.memfd_create("road-echo")
        os.ftruncate(arena, arena_bytes)
        welcome = json.dumps({"arena_bytes": arena_bytes, "routes": {"decode": ROUTE}}).encode()
        data = HEADER.pack(WELCOME_KIND, 0, len(welcome)) + welcome
        socket.send_fds(self.sock, [data], [arena])
        os.close(arena)
        self.greeted = True


def serve(path: str) -> None:
    """Until the process is ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            session: Session | None = key.data
            if session is None:
                sock, _ = listener.accept()
                selector.register(sock, selectors.EVENT_READ, Session(sock))
            elif not session.ready():
                selector.unregister(session.sock)
                session.sock.close()


if __name__ == "__main__":
    serve(sys.argv[1])
