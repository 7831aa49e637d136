"""One attempt of a call over the road: its image laid, its frame sent, its answer read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from attnd.calls.call import Call, Reply
from attnd.errors import ProtocolError, service_error
from attnd.results import Meta
from attnd.retries import Send
from attnd.road import frames
from attnd.road.areas import Laid
from attnd.road.arena import Arena
from attnd.road.connection import Connection
from attnd.road.frames import Answer
from attnd.wire import images

ANSWER_ROOM: Final = 16 * 1024
"""For what an answer has beside the arrays that can be foreseen."""
HEX_ID_LENGTH: Final = 32

HEALTH: Final = frozenset({"live", "ready"})
"""Calls that the connection itself answers."""


def attempt(connection: Connection, step: Send[Any], ends: float) -> Reply:
    """Send a call once, or twice where the answer needs more room than was thought."""
    call = step.call
    route = connection.routes.get(call.operation)
    if route is None:
        raise ProtocolError(f"the engine has no operation {call.operation}: another version")
    deadline_s = step.deadline_s
    deadline_us = 0
    if deadline_s is not None:
        deadline_us = min(max(1, round(deadline_s * 1e6)), frames.LONGEST_DEADLINE_US)
    request_id = id_bytes(step.request_id)
    room = answer_room(call)
    laid = connection.areas.lay(call.fields, call.arrays, room)
    while True:
        answer = connection.call(
            route, laid, deadline_us=deadline_us, request_id=request_id, ends=ends
        )
        if answer.needed <= room:
            break
        room = answer.needed
        laid = connection.areas.lay(call.fields, call.arrays, room)
    meta = Meta(step.request_id, StageTimes(answer.seconds))
    return read_answer(connection.arena, laid, answer, meta)


def read_answer(arena: Arena, laid: Laid, answer: Answer, meta: Meta) -> Reply:
    """What an answer says; raises the `ServiceError` that it is, or `ProtocolError`."""
    if answer.inline is not None:
        laid.place.free()
        return inline_reply(answer, answer.inline, meta)
    return read_reply(answer.status, image_of(arena, laid, answer.length), meta)


def answer_room(call: Call[Any]) -> int:
    """Bytes that the answer of a call will most likely fit into."""
    return call.answer_bytes + ANSWER_ROOM


def image_of(arena: Arena, laid: Laid, length: int) -> images.Bytes:
    """An answer where it lies; a copy of it when the arena is short. Raises `ProtocolError`."""
    place = laid.place
    if length > laid.capacity:
        raise ProtocolError(f"an answer of {length} bytes in a place of {laid.capacity}")
    place.trim(length)  # the request is done with too, where it lies behind
    image = arena.hold(place.offset, length, place)
    return np.array(image) if arena.is_short else image


class StageTimes(Mapping[str, float]):
    """`seconds` by stage, as an answer's frame has them."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: tuple[float, ...] = ()) -> None:
        self.seconds = seconds

    def __getitem__(self, stage: str) -> float:
        if stage not in frames.STAGES:
            raise KeyError(stage)
        return self.seconds[frames.STAGES.index(stage)]

    def __iter__(self) -> Iterator[str]:
        return iter(frames.STAGES)

    def __len__(self) -> int:
        return len(frames.STAGES)

    def __repr__(self) -> str:
        return repr(dict(self))


def inline_reply(answer: Answer, inline: bytes, meta: Meta) -> Reply:
    """An answer that came in its frame: a problem, as a rule."""
    image = np.frombuffer(bytearray(inline), np.uint8)
    if 200 <= answer.status < 300:
        return read_reply(answer.status, image, meta)
    try:
        problem, _ = images.decode(image, "problem")
    except ValueError as error:
        raise ProtocolError(f"the answer cannot be read: {error}", meta.request_id) from error
    raise service_error(problem, meta)


def read_reply(status: int, image: images.Bytes, meta: Meta) -> Reply:
    try:
        fields, arrays = images.decode(image)
    except ValueError as error:
        raise ProtocolError(f"the answer cannot be read: {error}", meta.request_id) from error
    return Reply(status, fields, arrays, "", meta)


def health(connection: Connection, step: Send[Any]) -> Reply:
    """What the engine last said of itself, as the answer of the health routes."""
    ok = step.call.operation == "live" or connection.state == "ready"
    detail = {} if ok else {"detail": connection.reason or connection.state}
    return Reply(200 if ok else 503, detail, {}, "", Meta(step.request_id))


def id_bytes(request_id: str) -> bytes:
    """A request id in the 16 bytes that a frame has for it: hex as it is, other text hashed."""
    if len(request_id) == HEX_ID_LENGTH:
        try:
            return bytes.fromhex(request_id)
        except ValueError:
            return blake2b(request_id.encode(), digest_size=16).digest()
    return blake2b(request_id.encode(), digest_size=16).digest()
