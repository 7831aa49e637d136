"""One attempt of a call over the road: its image is placed, its frame sent, its answer read."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import numpy as np

from attnd.calls.call import Call, Reply
from attnd.errors import ProtocolError, service_error
from attnd.retries import Attempt
from attnd.road.areas import PlacedCall
from attnd.road.arena import Arena
from attnd.road.connection import Connection
from attnd.road.pending import Answer, problem_of
from attnd.wire import frames, images
from attnd.wire.meta import Meta, Timings

ANSWER_ROOM: Final = 16 * 1024
"""Bytes for an answer's header, beside the arrays whose size is known."""
HEX_ID_LENGTH: Final = 32
HEALTH: Final = frozenset({"live", "ready"})
"""Calls that the connection itself answers."""
STAGES: Final = tuple(stage.replace("_", "-") for stage in frames.STAGES)
"""Names of the stages as `Server-Timing` has them."""


def send_attempt(connection: Connection, attempt: Attempt[Any], ends: float) -> Reply:
    """Send a call once, or twice where the answer needs more room than expected.

    Raises `TransportError`, the `ServiceError` of the answer, and `ProtocolError`.
    """
    call = attempt.call
    route = connection.routes.get(call.operation)
    if route is None:
        raise ProtocolError(f"the engine has no operation {call.operation}: another version")
    deadline_us = microseconds(attempt.deadline_s)
    request_id = id_bytes(attempt.request_id)
    room = answer_room(call)
    while True:
        place = connection.areas.place(call.fields, call.arrays, room)
        posted = connection.post(route, place, deadline_us, request_id, ends)
        answer = connection.answer_to(*posted, ends)
        if answer.needed <= room:
            break
        room = answer.needed
    meta = Meta(attempt.request_id, Timings(by_stage, answer.seconds))
    return read_answer(connection.arena, place, answer, meta)


def microseconds(deadline_s: float | None) -> int:
    """A deadline as frames have it; 0 is the service's default."""
    if deadline_s is None:
        return 0
    return max(1, round(min(deadline_s * 1e6, frames.LONGEST_DEADLINE_US)))


def answer_room(call: Call[Any]) -> int:
    """Bytes that the answer of a call will most likely fit into."""
    return call.answer_bytes + ANSWER_ROOM


def read_answer(arena: Arena, place: PlacedCall, answer: Answer, meta: Meta) -> Reply:
    """The reply in an answer; raises the `ServiceError` in it, or `ProtocolError`.

    Its arrays are views of the arena, and copies when that is short.
    """
    image: images.Bytes
    if answer.inline is None:
        length, slot = answer.length, place.answer
        if length > place.capacity:
            raise ProtocolError(f"an answer of {length} bytes in a place of {place.capacity}")
        slot.trim(length)  # this frees the request too, where it is in the same slot
        image = arena.hold(slot.offset, length, slot)
        if arena.is_short:
            image = np.array(image)
    else:
        place.answer.free()
        if not 200 <= answer.status < 300:
            raise service_error(problem_of(answer), meta)
        image = np.frombuffer(bytearray(answer.inline), np.uint8)
    try:
        fields, arrays = images.decode(image)
    except ValueError as error:
        raise ProtocolError(f"the answer cannot be read: {error}", meta.request_id) from error
    return Reply(answer.status, fields, arrays, "", meta)


def by_stage(seconds: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(STAGES, seconds, strict=False))


def health(connection: Connection, attempt: Attempt[Any]) -> Reply:
    """The engine's last STATE, as the health routes answer it."""
    ok = attempt.call.operation == "live" or connection.state == "ready"
    detail = {} if ok else {"detail": connection.reason or connection.state}
    return Reply(200 if ok else 503, detail, {}, "", Meta(attempt.request_id))


def id_bytes(request_id: str) -> bytes:
    """A request id in the 16 bytes of a frame: hex digits as they are, other text hashed."""
    if len(request_id) == HEX_ID_LENGTH:
        try:
            return bytes.fromhex(request_id)
        except ValueError:
            pass
    return blake2b(request_id.encode(), digest_size=16).digest()
