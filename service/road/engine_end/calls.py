"""Events of a session for the engine's loop, and the settings of all sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from attnd.wire import frames as f

from service.road.arena import PAGEABLE, Pinning
from service.road.engine_end.admission import Admission
from service.road.messages import Grow, read
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.road.engine_end.session import Session

MAX_CALLS: Final = 4096
MAX_DEVICES: Final = 64
"""Maximum requests for a device arena of one session that wait: opening some takes milliseconds."""
MAX_OUTPUT_BYTES: Final = 8 * 2**20


def has_room(namespace: str) -> None:
    """Any number of sessions."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The engine's rules for its sessions.

    `routes` names the operations' numbers, `limits` is sent to callers unchanged.
    """

    instance_id: str
    routes: Mapping[str, int]
    limits: Mapping[str, int | float]
    max_arena_bytes: int
    default_deadline_s: float
    pinning: Pinning = PAGEABLE
    admission: Admission = field(default_factory=Admission)
    max_calls: int = MAX_CALLS
    max_output_bytes: int = MAX_OUTPUT_BYTES
    make_room: Callable[[str], None] = has_room
    """Raises Overloaded where a namespace has as many sessions as it may have."""
    numbers: frozenset[int] = field(init=False)
    """The routes' numbers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", frozenset(self.routes.values()))


@dataclass(slots=True, eq=False)
class Call:
    """One call, waiting for its one answer: `request` its image, `answer` the place for the other.

    Both are in the arena, begin at multiples of 64 bytes, and can be changed by the caller at any
    time, so values are copied before they are checked.

    Not frozen: that would cost 2 µs a call, and `cancelled` is set when the caller cancels.
    """

    session: Session
    id: int
    operation: int
    deadline_s: float
    request: memoryview
    answer: memoryview
    request_id: bytes
    tenant: Tenant
    at: tuple[int, int, int, int]
    """Offset and length of both places."""
    cancelled: bool = False


STEP_ROUTE: Final = 0
"""`Call.operation` of a step: its request is the description, and it has no place."""


@dataclass(slots=True, eq=False)
class ArenaRequest:
    """A caller requests a device arena of `arena_bytes`, or its flags cleared after an abort."""

    session: Session
    arena_bytes: int


@dataclass(slots=True, eq=False)
class Ready:
    """A layer of a caller's step is ready; lanes in host memory have no flags for it."""

    call: Call
    layer: int


@dataclass(slots=True, eq=False)
class Cancel:
    """The caller no longer wants a call that is not answered yet; it is answered all the same."""

    call: Call


Event = Call | Cancel | ArenaRequest | Ready
"""An event of a session."""


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
        if session.num_devices >= MAX_DEVICES:
            waiting = f"DEVICE while {session.num_devices} wait for DEVICE_ARENA"
            raise f.FrameError(f"{waiting}: at most {MAX_DEVICES} may")
        session.num_devices += 1
        return ArenaRequest(session, read(kind, payload, Grow).arena_bytes)
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
