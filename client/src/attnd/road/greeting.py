"""How a session begins: HELLO goes out, WELCOME and the arena's descriptor come back."""

from __future__ import annotations

import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final

from attnd.errors import ConnectionFailed, ProtocolError, service_error
from attnd.results import Meta
from attnd.road import frames
from attnd.road.arena import Arena
from attnd.road.frames import FrameReader

NAME: Final = "attnd-client"
CREDENTIALS: Final = struct.Struct("3i")
CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the engine says at first, as far as it is used here."""

    arena_bytes: int
    max_arena_bytes: int
    routes: dict[str, int]
    state: str
    reason: str


def greet(
    path: str, arena_bytes: int, reader: FrameReader, ends: float, own: bool, key: str
) -> tuple[socket.socket, Welcome, Arena]:
    """Connect and greet by `ends`; with `own`, an engine of another user is refused.

    Raises `ConnectionFailed`, `ProtocolError`, or the `ServiceError` of a refusal.
    """
    connected = connect(path, ends, own)
    descriptors: list[int] = []
    try:
        hello = {"version": frames.VERSION, "name": NAME, "door": False, "arena_bytes": arena_bytes}
        if key:
            hello["key"] = key
        connected.settimeout(remaining(ends))
        connected.sendall(frames.json_frame(frames.HELLO, hello))
        content = first_frame(connected, reader, descriptors, ends)
        welcome = Welcome(**{name: content[name] for name in Welcome.__slots__})
        if len(descriptors) != 1:
            raise ProtocolError(f"{len(descriptors)} descriptors came with WELCOME: one must")
        return connected, welcome, Arena(descriptors.pop(), welcome.arena_bytes)
    except KeyError as error:
        connected.close()
        raise ProtocolError(f"the engine's WELCOME lacks {error}") from error
    except OSError as error:
        connected.close()
        raise ConnectionFailed(f"no welcome from the engine: {error}") from error
    except BaseException:
        connected.close()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def first_frame(
    connected: socket.socket, reader: FrameReader, descriptors: list[int], ends: float
) -> dict[str, Any]:
    """The content of WELCOME; descriptors that come are added to the list."""
    while True:
        connected.settimeout(remaining(ends))
        into = reader.buffer()
        received, more, _, _ = socket.recv_fds(connected, len(into), 4, CLOSE_ON_EXEC)
        descriptors += more
        if not received:
            raise ConnectionFailed("the engine closed the connection instead of a WELCOME")
        into[: len(received)] = received
        reader.received(len(received))
        frame = reader.take()
        if frame is not None:
            kind, content = frame[0], frames.read_json(frame[1])
            if kind == frames.REFUSED:
                raise service_error(content, Meta())
            if kind != frames.WELCOME:
                raise ProtocolError(f"frame {kind} came where WELCOME belongs")
            return content


def connect(path: str, ends: float, own: bool) -> socket.socket:
    """A connected socket; raises `ConnectionFailed`."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(remaining(ends))
        made.connect(path)
        if own and peer_uid(made) not in (None, 0, os.getuid()):
            raise ConnectionFailed(
                f"{path} is served by user {peer_uid(made)}: name the path if that is meant"
            )
    except OSError as error:
        made.close()
        raise ConnectionFailed(f"no engine at {path}: {error}") from error
    except BaseException:
        made.close()
        raise
    return made


def peer_uid(connected: socket.socket) -> int | None:
    """Who made the socket at the other end; None where the system does not tell."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    told = connected.getsockopt(socket.SOL_SOCKET, option, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(told)[1])


def remaining(ends: float) -> float:
    """Seconds until `ends`; raises TimeoutError when there are none."""
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is up")
    return left
