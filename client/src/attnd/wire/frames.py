"""Frames of the road: their byte layouts, and an incremental reader that bounds what it holds.

Little-endian without padding. A frame is an 8-byte header (kind, flags, payload bytes) and its
payload: fixed structs for CALL, ANSWER and CANCEL, JSON for the rest; see docs/road.md.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Final

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

NAMES: Final = {
    CALL: "CALL",
    ANSWER: "ANSWER",
    CANCEL: "CANCEL",
    HELLO: "HELLO",
    WELCOME: "WELCOME",
    GROW: "GROW",
    GROWN: "GROWN",
    STATE: "STATE",
    REFUSED: "REFUSED",
    TENANT: "TENANT",
    DEVICE: "DEVICE",
    DEVICE_ARENA: "DEVICE_ARENA",
    STEP: "STEP",
    OPENED: "OPENED",
    READY: "READY",
    DONE: "DONE",
    CHALLENGE: "CHALLENGE",
}

HEADER: Final = Struct("<HHI")
"""kind, flags (zero), payload bytes."""
HEADER_BYTES: Final = HEADER.size
CALL_PAYLOAD: Final = Struct("<QHHIQQQQ16s")
"""id, route, tenant, deadline in µs, request offset and length, answer offset and
capacity, request id."""
CALL_FRAME: Final = Struct("<HHIQHHIQQQQ16s")
ANSWER_PAYLOAD: Final = Struct("<QHHIQQ6f")
"""id, status, flags, pages held, image length, capacity needed, six stages in seconds."""
ANSWER_FRAME: Final = Struct("<HHIQHHIQQ6f")
CANCEL_FRAME: Final = Struct("<HHIQ")
CALL_ID: Final = Struct("<Q")
STEP_HEAD: Final = Struct("<QI4x16s")
"""id, deadline in µs, reserved, request id; the description, JSON, comes behind it."""
LAYER_PAYLOAD: Final = Struct("<QI4x")
"""id of the step, layer, reserved."""
LAYER_FRAME: Final = Struct("<HHIQI4x")

INLINE: Final = 1
"""Flag of an ANSWER whose image follows in the frame itself."""
HELD: Final = 2
"""Flag of an ANSWER that tells how many pages are held."""
NO_REQUEST_ID: Final = bytes(16)
STAGES: Final = ("queue", "plan", "copy_in", "kernel", "copy_out", "encode")
NO_STAGES: Final = (0.0,) * 6

MAX_JSON_BYTES: Final = 64 * 2**10
"""Longest JSON payload that the engine reads from a caller."""
MAX_INLINE_BYTES: Final = 64 * 2**20
"""Longest image inside a frame: problems that list the ids or lengths of a large call."""
MAX_STEP_BYTES: Final = 2**20
"""Longest description of a step."""
BUFFER_BYTES: Final = 64 * 2**10

Sizes = Mapping[int, tuple[int, int]]
NEVER: Final = (1, 0)
"""No size is between these."""

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
"""What the engine reads: smallest and largest payload of each kind."""
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


class FrameError(Exception):
    """Bytes that are no frame, or a frame that may not come now: the session cannot go on."""


class Reader:
    """Cuts a stream of bytes into frames; holds at most one unfinished frame beyond its buffer."""

    __slots__ = ("begin", "buffer", "end", "sizes", "window")

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.buffer = bytearray(BUFFER_BYTES)
        self.window = memoryview(self.buffer)
        self.begin = 0
        self.end = 0

    def receive(self, sock: socket.socket, most: int = BUFFER_BYTES) -> int:
        """Take in `most` bytes of what has arrived; 0 at the end of the stream.

        Offsets that `frames` gave before are void afterwards. Raises BlockingIOError when nothing
        is there, and the socket's other errors.
        """
        self.compact()
        count = sock.recv_into(self.window[self.end : self.end + most])
        self.end += count
        return count

    def feed(self, data: bytes) -> None:
        """Take in bytes that came another way; at most one buffer's worth."""
        self.compact()
        end = self.end + len(data)
        if end > len(self.buffer):
            self.enlarge(end)
        self.buffer[self.end : end] = data
        self.end = end

    def frames(self) -> Iterator[tuple[int, int, int]]:
        """Every whole payload that has arrived, as `next` gives it."""
        return iter(self.next, None)

    def next(self) -> tuple[int, int, int] | None:
        """Kind, first byte in `buffer`, and size of the next whole payload, once it is there.

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
        """Bytes that follow the last frame and are none: as many as are here and fit."""
        count = min(self.end - self.begin, len(into))
        into[:count] = self.window[self.begin : self.begin + count]
        self.begin += count
        return count

    @property
    def unfinished(self) -> int:
        """Bytes of a frame whose rest has not arrived."""
        return self.end - self.begin

    def compact(self) -> None:
        """Move an unfinished frame to the front; forget a buffer that one large frame needed."""
        if self.begin == self.end:
            self.begin = self.end = 0
            if len(self.buffer) > BUFFER_BYTES:
                self.replace(bytearray(BUFFER_BYTES))
        elif self.begin:
            rest = bytes(self.window[self.begin : self.end])
            self.buffer[: len(rest)] = rest
            self.begin, self.end = 0, len(rest)

    def enlarge(self, size: int) -> None:
        """Room for `size` bytes, with what is unfinished at its front."""
        self.compact()
        buffer = bytearray(max(size, BUFFER_BYTES))
        buffer[: self.end] = self.window[: self.end]
        self.replace(buffer)

    def replace(self, buffer: bytearray) -> None:
        self.buffer = buffer
        self.window = memoryview(buffer)


def describe(kind: int, flags: int, size: int, sizes: Sizes) -> str:
    """What is wrong with a frame's header."""
    if kind not in sizes:
        allowed = ", ".join(f"{one} {NAMES[one]}" for one in sizes)
        return f"frame kind {kind}: this end reads {allowed}"
    if flags:
        return f"frame flags {flags} of {NAMES[kind]}: version 1 has none, send 0"
    least, most = sizes[kind]
    rule = f"exactly {least}" if least == most else f"between {least} and {most}"
    return f"payload of {size} bytes in {NAMES[kind]}: {rule} bytes"


def frame(kind: int, payload: bytes) -> bytes:
    """A whole frame."""
    return HEADER.pack(kind, 0, len(payload)) + payload
