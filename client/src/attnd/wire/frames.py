"""Frames of the road, version 1: their byte layouts, and a reader that cuts a stream into them.

Little-endian, without padding. A frame is an 8-byte header (kind, flags, payload bytes) and its
payload: a fixed struct for CALL, ANSWER, CANCEL and the frames of steps, JSON for all others.
docs/road.md describes every field.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Any, Final

VERSION: Final = 1

CALL: Final = 1
ANSWER: Final = 2
CANCEL: Final = 3
HELLO: Final = 16
WELCOME: Final = 17
GROW: Final = 18
GROWN: Final = 19
STATE: Final = 20
REFUSED: Final = 21
TENANT: Final = 22
DEVICE: Final = 23
DEVICE_ARENA: Final = 24
STEP: Final = 25
OPENED: Final = 26
READY: Final = 27
DONE: Final = 28
CHALLENGE: Final = 29

NAMES: Final[dict[int, str]] = {
    value: name for name, value in list(globals().items()) if name.isupper() and name != "VERSION"
}
"""Name by kind."""

HEADER: Final = Struct("<HHI")
"""kind, flags (0 in version 1), payload bytes."""
HEADER_BYTES: Final = HEADER.size
CALL_PAYLOAD: Final = Struct("<QHHIQQQQ16s")
"""id, route, tenant, deadline in µs, offset and length of the request, offset and capacity of the
answer's place, request id."""
CALL_FRAME: Final = Struct("<HHIQHHIQQQQ16s")
ANSWER_PAYLOAD: Final = Struct("<QHHIQQ6f")
"""id, status, flags, pages held, image length, capacity needed, seconds of the six stages."""
ANSWER_FRAME: Final = Struct("<HHIQHHIQQ6f")
CALL_ID: Final = Struct("<Q")
CANCEL_FRAME: Final = Struct("<HHIQ")
STEP_HEAD: Final = Struct("<QI4x16s")
"""id, deadline in µs, reserved, request id; the step's description follows as JSON."""
LAYER_PAYLOAD: Final = Struct("<QI4x")
"""id of the step, layer, reserved."""
LAYER_FRAME: Final = Struct("<HHIQI4x")

INLINE: Final = 1
"""Flag of an ANSWER whose image follows in the frame itself."""
HELD: Final = 2
"""Flag of an ANSWER with a valid number of pages held."""
NO_REQUEST_ID: Final = bytes(16)
STAGES: Final = ("queue", "plan", "copy_in", "kernel", "copy_out", "encode")
"""Stages whose seconds an ANSWER carries, in its order."""
NO_STAGES: Final = (0.0,) * 6
LONGEST_DEADLINE_US: Final = 2**32 - 1

MAX_JSON_BYTES: Final = 64 * 2**10
"""Maximum JSON payload that the engine reads from a caller."""
MAX_INLINE_BYTES: Final = 64 * 2**20
"""Maximum image inside a frame: problems that list the ids or lengths of a large call."""
MAX_STEP_BYTES: Final = 2**20
"""Maximum description of a step."""
BUFFER_BYTES: Final = 64 * 2**10

Sizes = Mapping[int, tuple[int, int]]
"""Smallest and largest payload by kind."""
NEVER: Final = (1, 0)
"""The size of kinds that an end does not read: no payload fits."""

FROM_CALLER: Final[Sizes] = {
    CALL: (CALL_PAYLOAD.size, CALL_PAYLOAD.size),
    CANCEL: (CALL_ID.size, CALL_ID.size),
    HELLO: (2, MAX_JSON_BYTES),
    GROW: (2, MAX_JSON_BYTES),
    TENANT: (2, MAX_JSON_BYTES),
    DEVICE: (2, MAX_JSON_BYTES),
    STEP: (STEP_HEAD.size + 2, STEP_HEAD.size + MAX_STEP_BYTES),
    READY: (LAYER_PAYLOAD.size, LAYER_PAYLOAD.size),
}
"""Frames that the engine reads."""
FROM_ENGINE: Final[Sizes] = {
    ANSWER: (ANSWER_PAYLOAD.size, ANSWER_PAYLOAD.size + MAX_INLINE_BYTES),
    WELCOME: (2, MAX_INLINE_BYTES),
    GROWN: (2, MAX_INLINE_BYTES),
    STATE: (2, MAX_INLINE_BYTES),
    REFUSED: (2, MAX_INLINE_BYTES),
    DEVICE_ARENA: (2, MAX_INLINE_BYTES),
    OPENED: (CALL_ID.size + 2, MAX_INLINE_BYTES),
    DONE: (LAYER_PAYLOAD.size, LAYER_PAYLOAD.size),
    CHALLENGE: (2, MAX_JSON_BYTES),
}
"""Frames that a caller reads."""

dump_json: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class FrameError(Exception):
    """Bytes that are not a frame, or a frame out of place: the session cannot continue."""


def frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(kind, 0, len(payload)) + payload


def json_frame(kind: int, content: Mapping[str, Any]) -> bytes:
    """A frame with a JSON object as its payload."""
    return frame(kind, dump_json(content).encode())


def cancel_frame(number: int) -> bytes:
    """Cancels call or step `number`, which still gets its one ANSWER."""
    return CANCEL_FRAME.pack(CANCEL, 0, CALL_ID.size, number)


def step_frame(number: int, deadline_us: int, request_id: bytes, description: bytes) -> bytes:
    """Describes step `number`; its ANSWER comes at its end."""
    return frame(STEP, STEP_HEAD.pack(number, deadline_us, request_id) + description)


def opened_frame(number: int, content: Mapping[str, Any]) -> bytes:
    """The engine has accepted step `number`."""
    return frame(OPENED, CALL_ID.pack(number) + dump_json(content).encode())


def layer_frame(kind: int, number: int, layer: int) -> bytes:
    """READY or DONE for one layer of step `number` in host memory."""
    return LAYER_FRAME.pack(kind, 0, LAYER_PAYLOAD.size, number, layer)


class Reader:
    """Cuts a stream of bytes into frames; holds at most one unfinished frame beyond its buffer."""

    __slots__ = ("begin", "buffer", "end", "sizes", "window")

    def __init__(self, sizes: Sizes) -> None:
        """`sizes` names the kinds that this end reads."""
        self.sizes = sizes
        self.buffer = bytearray(BUFFER_BYTES)
        self.window = memoryview(self.buffer)
        self.begin = 0
        self.end = 0

    def receive(self, sock: socket.socket, most: int = BUFFER_BYTES) -> int:
        """Receive at most `most` bytes; returns their number, 0 at the end of the stream.

        Invalidates offsets that `next` returned before. Raises BlockingIOError when nothing has
        arrived, and the socket's other errors.
        """
        if self.begin == self.end and len(self.buffer) == BUFFER_BYTES:
            self.begin = self.end = 0
        else:
            self.compact()
        count = sock.recv_into(self.window[self.end : self.end + most])
        self.end += count
        return count

    def feed(self, data: bytes) -> None:
        """Add bytes that arrived another way; at most one buffer's worth."""
        self.compact()
        end = self.end + len(data)
        if end > len(self.buffer):
            self.enlarge(end)
        self.buffer[self.end : end] = data
        self.end = end

    def frames(self) -> Iterator[tuple[int, int, int]]:
        """Every whole payload that has arrived, as `next` returns it."""
        return iter(self.next, None)

    def next(self) -> tuple[int, int, int] | None:
        """Kind, first byte in `buffer`, and size of the next payload; None until it is whole.

        Raises FrameError for a header that breaks a rule, as soon as the header is there.
        """
        begin, end = self.begin, self.end
        if end - begin < HEADER_BYTES:
            return None
        kind, flags, size = HEADER.unpack_from(self.buffer, begin)
        least, most = self.sizes.get(kind, NEVER)
        if flags or not least <= size <= most:
            raise FrameError(describe(kind, flags, size, self.sizes))
        start = begin + HEADER_BYTES
        if start + size > end:
            if HEADER_BYTES + size > len(self.buffer):
                self.enlarge(HEADER_BYTES + size)
            return None
        self.begin = start + size
        return kind, start, size

    def take(self, into: memoryview) -> int:
        """Copy bytes that follow the last frame and are not one; returns how many fitted."""
        count = min(self.end - self.begin, len(into))
        into[:count] = self.window[self.begin : self.begin + count]
        self.begin += count
        return count

    @property
    def unfinished(self) -> int:
        """Bytes of a frame whose rest has not arrived."""
        return self.end - self.begin

    def compact(self) -> None:
        """Move an unfinished frame to the front; free a buffer that one large frame needed."""
        if self.begin == self.end:
            self.begin = self.end = 0
            if len(self.buffer) > BUFFER_BYTES:
                self._replace(bytearray(BUFFER_BYTES))
        elif self.begin:
            rest = bytes(self.window[self.begin : self.end])
            self.buffer[: len(rest)] = rest
            self.begin, self.end = 0, len(rest)

    def enlarge(self, size: int) -> None:
        """Make the buffer at least `size` bytes, the unfinished frame at its front."""
        self.compact()
        buffer = bytearray(max(size, BUFFER_BYTES))
        buffer[: self.end] = self.window[: self.end]
        self._replace(buffer)

    def _replace(self, buffer: bytearray) -> None:
        self.buffer = buffer
        self.window = memoryview(buffer)


def describe(kind: int, flags: int, size: int, sizes: Sizes) -> str:
    """The rule that a frame's header breaks."""
    if kind not in sizes:
        allowed = ", ".join(f"{one} {NAMES[one]}" for one in sizes)
        return f"frame kind {kind}: this end reads {allowed}"
    if flags:
        return f"frame flags {flags} of {NAMES[kind]}: version 1 has none, send 0"
    least, most = sizes[kind]
    rule = f"exactly {least}" if least == most else f"between {least} and {most}"
    return f"payload of {size} bytes in {NAMES[kind]}: {rule} bytes"
