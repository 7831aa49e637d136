"""The start of a session: HELLO goes out, WELCOME and the arena's descriptor come back."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from attnd.errors import ConnectionFailed, ProtocolError, service_error
from attnd.retries import remaining
from attnd.road.arena import Arena
from attnd.wire import frames as f
from attnd.wire.meta import Meta

NAME: Final = "attnd-client"
CREDENTIALS: Final = struct.Struct("3i")
CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
MAX_DESCRIPTORS: Final = 4
Dial = Callable[[float], socket.socket]
"""Connects to an engine by that `time.monotonic()`. Raises `AttndError`."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The fields of WELCOME that a client uses."""

    arena_bytes: int
    max_arena_bytes: int
    routes: dict[str, int]
    state: str
    reason: str


def greet(
    dial: Dial, arena_bytes: int, ends: float, key: str
) -> tuple[socket.socket, f.Reader, Welcome, Arena]:
    """Connect and greet by `ends`.

    The reader may hold frames that came after WELCOME. Raises `ConnectionFailed`, `ProtocolError`,
    or the `ServiceError` with which the engine refuses the session.
    """
    reader = f.Reader(f.FROM_ENGINE)
    descriptors: list[int] = []
    with ExitStack() as undo:
        connected = undo.enter_context(dial(ends))
        try:
            hello = {"version": f.VERSION, "name": NAME, "arena_bytes": arena_bytes, "key": key}
            connected.settimeout(remaining(ends))
            connected.sendall(f.json_frame(f.HELLO, hello))
            content = first_frame(connected, reader, descriptors, ends)
            welcome = Welcome(**{name: content[name] for name in Welcome.__slots__})
            if len(descriptors) != 1:
                count = len(descriptors)
                raise ProtocolError(f"WELCOME came with {count} descriptors, expected one")
            arena = Arena(descriptors.pop(), welcome.arena_bytes)
        except KeyError as error:
            raise ProtocolError(f"the engine's WELCOME lacks {error}") from error
        except (ValueError, f.FrameError) as error:
            raise ProtocolError(f"not an engine of attnd: {error}") from error
        except OSError as error:
            raise ConnectionFailed(f"no welcome from the engine: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        undo.pop_all()
    return connected, reader, welcome, arena


def first_frame(
    connected: socket.socket, reader: f.Reader, descriptors: list[int], ends: float
) -> dict[str, Any]:
    """The content of WELCOME; descriptors that arrive are added to the list."""
    while True:
        connected.settimeout(remaining(ends))
        received, more, _, _ = socket.recv_fds(
            connected, f.BUFFER_BYTES, MAX_DESCRIPTORS, CLOSE_ON_EXEC
        )
        descriptors += more
        if not received:
            raise ConnectionFailed("the engine closed the connection instead of a WELCOME")
        reader.feed(received)
        found = reader.next()
        if found is not None:
            kind, start, size = found
            content = read_object(bytes(reader.window[start : start + size]))
            if kind == f.REFUSED:
                raise service_error(content, Meta())
            if kind != f.WELCOME:
                raise ProtocolError(f"frame {f.NAMES[kind]} came instead of WELCOME")
            return content


def dial_path(path: str, own: bool, ends: float) -> socket.socket:
    """Connect to a socket's path; with `own`, an engine of another user is rejected. Raises
    `ConnectionFailed`."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(remaining(ends))
        made.connect(path)
        if own and peer_uid(made) not in (None, 0, os.getuid()):
            raise ConnectionFailed(
                f"{path} is served by user {peer_uid(made)}, not by you: give the path to use it"
            )
    except BaseException as error:
        made.close()
        if isinstance(error, FileNotFoundError):
            remedy = "start it (attnd serve), or give the path that its second log line has"
            raise ConnectionFailed(f"no engine at {path}: no such socket: {remedy}") from error
        if isinstance(error, OSError):
            raise ConnectionFailed(f"no engine at {path}: {error.strerror or error}") from error
        raise
    return made


def peer_uid(connected: socket.socket) -> int | None:
    """The user who made the socket at the other end; None where the system cannot say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    credentials = connected.getsockopt(socket.SOL_SOCKET, option, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(credentials)[1])


def read_object(payload: bytes) -> dict[str, Any]:
    """The JSON object of a frame; raises ProtocolError."""
    try:
        document = json.loads(payload)
    except ValueError as error:
        raise ProtocolError(f"a frame of the engine is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProtocolError(f"a frame of the engine is not a JSON object: {payload[:80]!r}")
    return document
