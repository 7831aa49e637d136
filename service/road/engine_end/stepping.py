"""Frames of steps at the engine's end: an arena asked for, a step described, a layer ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnd.wire import frames as f

from service.road.engine_end.calls import STEP_ROUTE, ArenaRequest, Call, Ready
from service.road.messages import count, read_object

if TYPE_CHECKING:
    from service.road.engine_end.session import Session

NOWHERE: Final = memoryview(b"")
STEPPING: Final = (f.DEVICE, f.STEP, f.READY)
"""Kinds of frames that are read here."""


def read_stepping(
    session: Session, kind: int, payload: bytes
) -> Call | ArenaRequest | Ready | None:
    """The event in a frame of steps; raises `FrameError` where it breaks the protocol."""
    if not session.greeted:
        raise f.FrameError(f"{f.NAMES[kind]} before HELLO: a session begins with HELLO")
    if kind == f.DEVICE:
        return ArenaRequest(session, count(read_object(kind, payload), "arena_bytes", kind))
    if kind == f.STEP:
        return read_step(session, payload)
    number, layer = f.LAYER_PAYLOAD.unpack(payload)
    call = session.live.get(number)
    if call is None:
        return None  # the step has ended; its ANSWER has the reason
    if call.operation != STEP_ROUTE:
        raise f.FrameError(f"READY for {number}, which is a CALL: only steps have layers")
    return Ready(call, layer)


def read_step(session: Session, payload: bytes) -> Call:
    """A step as the call that it is: one answer, when it is over."""
    number, deadline_us, name = f.STEP_HEAD.unpack_from(payload)
    live, config = session.live, session.config
    if number in live:
        raise f.FrameError(f"STEP {number} while {number} waits for its answer")
    if len(live) >= config.max_calls:
        raise f.FrameError(f"STEP while {len(live)} calls wait: at most {config.max_calls} may")
    seconds = deadline_us * 1e-6 if deadline_us else config.default_deadline_s
    description = memoryview(payload)[f.STEP_HEAD.size :]
    call = Call(
        session,
        number,
        STEP_ROUTE,
        seconds,
        description,
        NOWHERE,
        name,
        session.tenants[0],
        (0, 0, 0, 0),
    )
    live[number] = call
    return call
