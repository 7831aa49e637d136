"""Frames of the road, version 1: an 8-byte header, then a fixed struct or JSON; little-endian."""

from __future__ import annotations

import json
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

from attnd.errors import ProtocolError
from attnd.wire.images import dump_json

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
DEVICE: Final = 23
DEVICE_ARENA: Final = 24
STEP: Final = 25
OPENED: Final = 26
READY: Final = 27
DONE: Final = 28

HEADER: Final = Struct("<HHI")
"""kind, flags (zero), payload bytes."""
CALL_FRAME: Final = Struct("<HHIQHHIQQQQ16s")
"""The header; id, route, reserved (zero), deadline in µs, request offset and length, answer offset
and capacity, request id."""
ANSWER_PAYLOAD: Final = Struct("<QHHIQQ6f")
"""id, status, flags, reserved, image length, capacity needed, seconds of six stages."""
CANCEL_FRAME: Final = Struct("<HHIQ")
STEP_FRAME: Final = Struct("<HHIQI4x16s")
"""The header; id, deadline in µs, reserved, request id. The description follows, as JSON."""
STEP_NUMBER: Final = Struct("<Q")
LAYER_FRAME: Final = Struct("<HHIQI4x")
"""The header; id of the step, layer, reserved."""

INLINE: Final = 1
"""Flag of an answer whose image follows in the frame."""
STAGES: Final = ("queue", "plan", "copy-in", "kernel", "copy-out", "encode")
MAX_FRAME_BYTES: Final = 1 << 27
"""A longer frame is no frame: the engine sends at most half of this."""
LONGEST_DEADLINE_US: Final = (1 << 32) - 1
BUFFER_BYTES: Final = 1 << 16


@dataclass(slots=True, eq=False)
class Answer:
    """`length` bytes of image lie at the answer's place, or in `inline`.

    `needed`: the capacity that would have held the answer, else 0. `seconds` of each of `STAGES`.
    Not frozen, since that would cost a microsecond a call.
    """

    status: int
    length: int
    needed: int
    seconds: tuple[float, ...]
    inline: bytes | None


def call_frame(
    number: int,
    route: int,
    deadline_us: int,
    request: tuple[int, int],
    answer: tuple[int, int],
    request_id: bytes,
) -> bytes:
    """A CALL; `request` is offset and length, `answer` offset and capacity."""
    size = CALL_FRAME.size - HEADER.size
    return CALL_FRAME.pack(
        CALL, 0, size, number, route, 0, deadline_us, *request, *answer, request_id
    )


def cancel_frame(number: int) -> bytes:
    """Take call `number` back; it is answered all the same."""
    return CANCEL_FRAME.pack(CANCEL, 0, CANCEL_FRAME.size - HEADER.size, number)


def step_frame(number: int, deadline_us: int, request_id: bytes, description: bytes) -> bytes:
    """A step, to be answered when it is over."""
    size = STEP_FRAME.size - HEADER.size + len(description)
    return STEP_FRAME.pack(STEP, 0, size, number, deadline_us, request_id) + description


def ready_frame(number: int, layer: int) -> bytes:
    """A layer of a step in host memory is ready."""
    return LAYER_FRAME.pack(READY, 0, LAYER_FRAME.size - HEADER.size, number, layer)


def read_number(payload: bytes) -> int:
    """The step that a frame tells of."""
    if len(payload) < STEP_NUMBER.size:
        raise ProtocolError(f"a frame of {len(payload)} bytes that names no step")
    number: int = STEP_NUMBER.unpack_from(payload)[0]
    return number


def json_frame(kind: int, content: dict[str, Any]) -> bytes:
    payload = dump_json(content).encode()
    return HEADER.pack(kind, 0, len(payload)) + payload


def read_json(payload: bytes) -> dict[str, Any]:
    """A JSON payload; raises ProtocolError."""
    try:
        document = json.loads(payload)
    except ValueError as error:
        raise ProtocolError(f"a frame of the engine is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProtocolError(f"a frame of the engine is not a JSON object: {payload[:80]!r}")
    return document


def read_answer(payload: bytes) -> tuple[int, Answer]:
    """The call's number and its answer; raises ProtocolError."""
    fixed = ANSWER_PAYLOAD.size
    if len(payload) < fixed:
        raise ProtocolError(f"an answer of {len(payload)} bytes: it has at least {fixed}")
    values = ANSWER_PAYLOAD.unpack_from(payload)
    inline = payload[fixed:] if values[2] & INLINE else None
    return values[0], Answer(values[1], values[4], values[5], values[6:], inline)


class FrameReader:
    """Receive into `buffer()`, tell `received` how much came, and `take` the frames."""

    def __init__(self) -> None:
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin or self._end == len(self._buffer):
            self._make_room()
        return self._view[self._end :]

    def received(self, count: int) -> None:
        self._end += count

    def take(self) -> tuple[int, bytes] | None:
        """Kind and payload of the next frame, None when it is not whole; raises ProtocolError."""
        begin = self._begin + HEADER.size
        if begin > self._end:
            return None
        kind, _, size = HEADER.unpack_from(self._buffer, self._begin)
        if size > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of kind {kind} with {size} bytes is not attnd's")
        end = begin + size
        if end > self._end:
            return None
        self._begin = end
        return kind, bytes(self._view[begin:end])

    def _make_room(self) -> None:
        """Move what is unfinished to the front of a buffer that can hold all of it."""
        rest = bytes(self._view[self._begin : self._end])
        size = HEADER.unpack_from(rest)[2] if len(rest) >= HEADER.size else 0
        self._buffer = bytearray(max(BUFFER_BYTES, HEADER.size + size))
        self._buffer[: len(rest)] = rest
        self._view = memoryview(self._buffer)
        self._begin, self._end = 0, len(rest)
