"""The process at the other end of a Unix socket: distinguishes a lost session from a dead engine.

The kernel reports the sender of WELCOME; the socket's own credentials are those of the supervisor,
which made it. A descriptor of that process becomes readable when it exits, and only then.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from contextlib import suppress
from typing import Final

CREDENTIALS: Final = struct.Struct("3i")
"""Process, user, group: `struct ucred` of Linux."""


class PeerProcess:
    """`fd` is a descriptor of the process, -1 where it is unknown: another host, another PID
    namespace, or a kernel without such reports."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = -1

    def learn(self, pid: int) -> None:
        """The process's number, 0 where it has none here."""
        if pid > 0 and self.fd < 0 and hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self.fd = os.pidfd_open(pid)

    @property
    def has_exited(self) -> bool:
        """Whether the process has exited; False where it is unknown."""
        if self.fd < 0:
            return False
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def ask_for_sender(sock: socket.socket, *, is_wanted: bool) -> None:
    """Have the kernel report the sender of all later messages."""
    if hasattr(socket, "SO_PASSCRED"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, is_wanted)


def receive(sock: socket.socket, size: int, most_fds: int) -> tuple[bytes, list[int], int]:
    """Bytes, descriptors that came with them, and the number of the sender's process, 0 where
    the kernel does not report it. Raises OSError."""
    room = socket.CMSG_SPACE(most_fds * 4) + socket.CMSG_SPACE(CREDENTIALS.size)
    close_on_exec = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, ancillary, _, _ = sock.recvmsg(size, room, close_on_exec)
    descriptors, pid = array.array("i"), 0
    for level, kind, content in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // 4 * 4])
        elif kind == getattr(socket, "SCM_CREDENTIALS", None):
            pid = CREDENTIALS.unpack_from(content)[0]
    return data, descriptors.tolist(), pid
