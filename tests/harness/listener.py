"""A socket in the test's own process, whose connections threads serve by a script."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self


class Listener(ABC):
    """Serves every connection in a thread of its own; close it, or use `with`."""

    def __init__(self, path: str | None = None) -> None:
        """A Unix socket at `path`; None: `address` on a port of the system's choice."""
        if path is None:
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        else:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind(path)
            self.listener.listen()
        self.connections: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    @abstractmethod
    def serve(self, connected: socket.socket) -> None:
        """Talk to a client; the connection closes on return, and on an OSError."""

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self.listener.accept()
                self.connections.append(connected)
                self.threads.append(threading.Thread(target=self.run, args=(connected,)))
                self.threads[-1].start()

    def run(self, connected: socket.socket) -> None:
        with suppress(OSError):
            self.serve(connected)
        shut(connected)
        connected.close()

    def drop_all(self) -> None:
        """Break every connection."""
        for connected in self.connections:
            shut(connected)

    def close(self) -> None:
        shut(self.listener)
        self.listener.close()
        self.drop_all()
        for thread in list(self.threads):
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def shut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
