"""A listener for callers in the engine's process: it has no path, and others cannot reach it."""

from __future__ import annotations

import os
import socket
from typing import Any, Final

CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Inbox:
    """One end of each connection made by `connect` waits here, as in a socket's backlog, until
    `accept` takes it. It is refused by its own end where the inbox closes before."""

    family: Final = socket.AF_UNIX

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sender.setblocking(False)

    def connect(self) -> socket.socket:
        """The caller's end of a new connection; from any thread. Raises OSError once closed."""
        theirs, ours = socket.socketpair()
        try:
            with ours:
                socket.send_fds(self._sender, [b"\0"], [ours.fileno()])
        except BaseException:
            theirs.close()
            raise
        return theirs

    def accept(self) -> tuple[socket.socket, Any]:
        """As of a socket that listens. Raises BlockingIOError where no connection waits."""
        _, descriptors, _, _ = socket.recv_fds(self._receiver, 1, 1, CLOSE_ON_EXEC)
        if not descriptors:
            raise BlockingIOError("no descriptor came: the process has too many open")
        return socket.socket(fileno=descriptors[0]), None

    def setblocking(self, flag: bool) -> None:
        self._receiver.setblocking(flag)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def close(self) -> None:
        """Close it, and the connections that wait; can be repeated."""
        self._receiver.close()
        self._sender.close()

    def leave(self) -> None:
        """After a fork: close the child's copies."""
        for one in (self._receiver, self._sender):
            close_copy(one)


def close_copy(one: socket.socket) -> None:
    """Close a socket's descriptor in the child of a fork; the parent's stays as it is."""
    if (fd := one.detach()) >= 0:
        os.close(fd)
