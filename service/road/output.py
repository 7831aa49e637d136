"""Bytes on their way out of a socket that never blocks, bounded."""

from __future__ import annotations

import socket


class Unread(Exception):
    """The other end does not read."""


class Output:
    """Sends as much as the socket takes and keeps the rest. Raises the socket's OSErrors."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        self.sock = sock
        self.limit = limit
        self.waiting = bytearray()
        self.sent = 0
        """Bytes of `waiting` that were sent already."""

    def send(self, data: bytes | memoryview) -> None:
        """Send or keep a frame. Raises Unread when more than the limit waits already."""
        waiting = self.waiting
        if not waiting:
            try:
                sent = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            if sent < len(data):
                waiting += data[sent:]
        elif len(waiting) - self.sent > self.limit:
            left = len(waiting) - self.sent
            raise Unread(f"{left} bytes wait to be read, the limit is {self.limit}")
        else:
            waiting += data

    def flush(self) -> None:
        """Send waiting bytes, until the socket is full."""
        if self.waiting:
            with memoryview(self.waiting) as every, every[self.sent :] as left:
                try:
                    self.sent += self.sock.send(left)
                except (BlockingIOError, InterruptedError):
                    return
            if 2 * self.sent >= len(self.waiting):  # fewer bytes are moved than were sent
                del self.waiting[: self.sent]
                self.sent = 0
