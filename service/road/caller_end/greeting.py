"""The start of a door's session: HELLO goes out, WELCOME and the arena's descriptor come back.

The kernel reports the sender of WELCOME, which distinguishes a lost session from a dead engine: the
socket's own credentials name the supervisor, which made it.
"""

from __future__ import annotations

import array
import asyncio
import hmac
import os
import secrets
import select
import socket
import struct
from contextlib import suppress
from dataclasses import replace
from typing import Final

from attnd.wire import frames as f

from service.errors import NotReady
from service.road.caller_end.slots import Mapping
from service.road.messages import NONCE_BYTES, Challenge, Hello, Refused, Welcome, message, read
from service.road.tcp import engine_proof, mirror, proof

CREDENTIALS: Final = struct.Struct("3i")
"""Process, user, group: `struct ucred` of Linux."""


class PeerProcess:
    """`fd` is a descriptor of the process, -1 where it is unknown: another host, another PID
    namespace, or a kernel without such reports."""

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


MAX_DESCRIPTORS: Final = 4
PERMIT_S: Final = 0.002
"""Interval between two attempts to send a descriptor."""


async def greet_remote(
    sock: socket.socket, hello: Hello, own: Mapping | None = None, peer: PeerProcess | None = None
) -> tuple[f.Reader, Welcome, Mapping]:
    """As `greet`, over TCP: the secret is proved, not sent, and the arena is a mirror."""
    loop = asyncio.get_running_loop()
    reader = f.Reader(f.FROM_ENGINE)

    async def first() -> tuple[int, bytes]:
        while (found := reader.next()) is None:
            data = await loop.sock_recv(sock, f.BUFFER_BYTES)
            if not data:
                raise NotReady("the engine closed the connection instead of greeting")
            reader.feed(data)
        kind, start, size = found
        return kind, bytes(reader.window[start : start + size])

    kind, payload = await first()
    if kind == f.REFUSED:
        raise refused(payload)
    if kind != f.CHALLENGE:
        raise f.FrameError(f"{f.NAMES[kind]} came before CHALLENGE")
    nonce, own_nonce = read(kind, payload, Challenge).nonce, secrets.token_hex(NONCE_BYTES)
    proved = replace(hello, secret=proof(hello.secret, nonce), nonce=own_nonce)
    with suppress(BrokenPipeError, ConnectionResetError):  # the engine has refused: read why
        await loop.sock_sendall(sock, message(f.HELLO, proved))
    welcome = welcome_of(*await first())
    if not hmac.compare_digest(engine_proof(hello.secret, own_nonce), welcome.proof):
        raise NotReady("the engine has the secret of another cluster")
    if own is not None:
        return reader, welcome, own
    fd = mirror(welcome.arena_bytes)
    return reader, welcome, Mapping(fd, welcome.arena_bytes)


async def greet(
    sock: socket.socket, hello: Hello, own: Mapping | None = None, peer: PeerProcess | None = None
) -> tuple[f.Reader, Welcome, Mapping]:
    """Say HELLO on a fresh connection; the reader may hold frames that came after WELCOME. `own`:
    the arena that the door provides. `peer` learns the engine's process.

    Raises NotReady when the engine refuses or leaves, FrameError when it is no engine.
    """
    loop = asyncio.get_running_loop()
    ask_for_sender(sock, is_wanted=True)
    data = message(f.HELLO, replace(hello, brings_arena=own is not None))
    with suppress(BrokenPipeError, ConnectionResetError):  # the engine has refused: read why
        sent = 0 if own is None else await send_with(own.fd, sock, data)
        await loop.sock_sendall(sock, data[sent:])
    reader = f.Reader(f.FROM_ENGINE)
    descriptors: list[int] = []
    try:
        while (welcome := read_welcome(reader)) is None:
            await readable(loop, sock)
            data, received, pid = receive(sock, f.BUFFER_BYTES, MAX_DESCRIPTORS)
            descriptors += received
            if peer is not None:
                peer.learn(pid)
            if not data:
                raise NotReady("the engine closed the connection instead of saying WELCOME")
            reader.feed(data)
        if len(descriptors) != (own is None):
            raise f.FrameError(f"{len(descriptors)} descriptors came with WELCOME: one arena has")
        ask_for_sender(sock, is_wanted=False)
        mapping = own or Mapping(descriptors[0], welcome.arena_bytes)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return reader, welcome, mapping


async def send_with(fd: int, sock: socket.socket, hello: bytes) -> int:
    """Send HELLO with a descriptor; returns the bytes sent. Linux 6.16 takes none before the engine
    permits it, to a door that has said HELLO without it. May raise OSError."""
    is_permitted = True
    while True:
        try:
            return socket.send_fds(sock, [hello], [fd])
        except PermissionError:
            if is_permitted:
                await asyncio.get_running_loop().sock_sendall(sock, hello)
            is_permitted = False
            await asyncio.sleep(PERMIT_S)


def read_welcome(reader: f.Reader) -> Welcome | None:
    """The engine's first frame, when it is there."""
    for kind, start, size in reader.frames():
        return welcome_of(kind, bytes(reader.window[start : start + size]))
    return None


def welcome_of(kind: int, payload: bytes) -> Welcome:
    """A WELCOME. Raises NotReady for a refusal, FrameError for any other frame."""
    if kind == f.REFUSED:
        raise refused(payload)
    if kind != f.WELCOME:
        raise f.FrameError(f"{f.NAMES[kind]} came before WELCOME")
    return read(kind, payload, Welcome)


def refused(payload: bytes) -> NotReady:
    return NotReady(f"the engine refused the session: {read(f.REFUSED, payload, Refused).detail}")


async def readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
