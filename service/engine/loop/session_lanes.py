"""The lanes of sessions: opened on request, cleared after aborts, closed with their sessions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final

from attnd.wire.bounds import MAX_HEADER_BYTES
from attnd.wire.frames import DEVICE_ARENA, DONE, json_frame, layer_frame, opened_frame

from kernels.lanes.lane import Lane, Lanes, NoRoom, Owner
from service.engine.handlers.steps import StepPlace
from service.engine.loop.open_steps import OpenSteps
from service.engine.loop.reader import REMEMBERED_BYTES
from service.engine.work.request import AnswerPlace, Request
from service.errors import InvalidRequest, MalformedBody, Overloaded, problem
from service.image.json_text import load_json
from service.operations.schema.fields import InfoAnswer
from service.operations.schema.spec import Operation, validate
from service.operations.step import STEP, StepFields
from service.road.engine_end.calls import STEP_ROUTE, ArenaRequest, Call
from service.road.engine_end.session import Session
from service.tenants import Tenant

OPENING_S: Final = 0.005
"""Longest time in a round for opening arenas, each of which can take milliseconds."""


@dataclass(slots=True, eq=False)
class SessionLane:
    """A session's lane; `requested` has the arena sizes to serve once none of its steps is open."""

    session: Session
    lane: Lane | None = None
    requested: list[int] = field(default_factory=list)


class SessionLanes:
    """The lanes of one engine's sessions. `look_after` gets each session that was sent something:
    its socket may have taken a part."""

    def __init__(
        self,
        lanes: Lanes,
        steps: OpenSteps,
        info: InfoAnswer,
        look_after: Callable[[Session], None],
    ) -> None:
        self._lanes = lanes
        self._look_after = look_after
        self._steps = steps
        self.by_session: dict[Session, SessionLane] = {}
        self._spent_s = 0.0
        """Time spent on opening arenas in this round."""
        self.is_behind = False
        """Whether requests wait for nothing but the next round."""

        def read(description: bytes, tenant: Tenant) -> StepFields:
            tenant.require(STEP.scope, STEP.name)
            fields = validate(StepFields, load_json(description, "the step's description"))
            fields.check({}, info)
            if fields.op != "echo" and (fields.append or fields.token_ids is not None):
                tenant.require("append", "a step that appends or names tokens")
            fields.put_before_ids(tenant.prefix)
            return fields

        self._read = read
        self._remember = lru_cache(maxsize=128)(read)

    def request_arena(self, event: ArenaRequest) -> None:
        """A session asks for an arena, a larger one, or for its flags to be cleared."""
        held = self.by_session.setdefault(event.session, SessionLane(event.session))
        held.requested.append(event.arena_bytes)
        self._serve(held)

    def check(self, call: Call) -> None:
        """Raises `InvalidRequest` for a step before its session has a lane, and `MalformedBody` for
        a description that is too long."""
        held = self.by_session.get(call.session)
        if held is None or held.lane is None or held.requested:
            raise InvalidRequest("step", "given", "DEVICE must have been answered before it")
        if len(call.request) > MAX_HEADER_BYTES:
            size = f"the step's description has {len(call.request)} bytes"
            raise MalformedBody(f"{size}: at most {MAX_HEADER_BYTES}: name fewer sequences")

    def read(self, operation: Operation, call: Call) -> Request:
        """A step as a request. Raises `Forbidden`, `MalformedBody`, `InvalidRequest`."""
        held = self.by_session.get(call.session)
        if held is None or held.lane is None:
            raise InvalidRequest("step", "given", "DEVICE must have been answered before it")
        description = bytes(call.request)
        read = self._remember if len(description) <= REMEMBERED_BYTES else self._read
        fields = read(description, call.tenant)
        where = StepPlace(
            held.lane, partial(self._send_opened, call), partial(self._send_done, call)
        )
        return Request(operation, fields, {}, AnswerPlace(call.answer), call.tenant, step=where)

    def serve(self) -> None:
        """Begin a round: serve requests for arenas where no step is open, as far as its time
        allows, and close the lanes of ended sessions."""
        self._spent_s, self.is_behind = 0.0, False
        for session, held in list(self.by_session.items()):
            if held.requested:
                before = self._spent_s
                self._serve(held)
                if self._spent_s > before:  # next time the others come first
                    self.by_session[session] = self.by_session.pop(session)
            if held.session.closed and not has_open_step(held.session):
                self._close(held)
                del self.by_session[held.session]

    def _send_opened(self, call: Call, plan: dict[str, Any]) -> None:
        self._send(call.session, opened_frame(call.id, plan))

    def _send_done(self, call: Call, layer: int) -> None:
        self._send(call.session, layer_frame(DONE, call.id, layer))

    def _send(self, session: Session, data: bytes) -> None:
        if not session.closed:
            session.send(data)
            self._look_after(session)

    def _serve(self, held: SessionLane) -> None:
        session = held.session
        if has_open_step(session) or session.closed or session.ended:
            return
        while held.requested:
            if self._spent_s > OPENING_S:
                self.is_behind = True
                return
            started = time.monotonic()
            session.num_devices -= 1
            self._send(session, json_frame(DEVICE_ARENA, self._open(held, held.requested.pop(0))))
            self._spent_s += time.monotonic() - started

    def _open(self, held: SessionLane, arena_bytes: int) -> dict[str, Any]:
        """Give the session a lane; the reply's fields, or the problem."""
        arena, lane = held.session.arena, held.lane
        if arena is None:
            raise RuntimeError("a lane for a session without an arena: this is a bug")
        memory = arena.memory[: arena.size]
        try:
            if lane is not None and 0 < arena_bytes <= lane.arena_bytes:
                self._steps.forget(lane)
                lane.clear()
            else:
                self._close(held)
                namespace = held.session.tenants[0].namespace
                owner = Owner.of(held.session.pid, namespace, held.session.uid)
                lane = held.lane = self._lanes.open(memory, arena_bytes, owner)
        except NoRoom as error:
            return {"problem": problem(Overloaded(str(error), retry_after_s=1.0))}
        return lane.access | {"arena_bytes": lane.arena_bytes, "deep": self._lanes.deep}

    def _close(self, held: SessionLane) -> None:
        lane, held.lane = held.lane, None
        if lane is not None:
            self._steps.forget(lane)
            self._lanes.close(lane)


def has_open_step(session: Session) -> bool:
    """Whether a step of the session has no answer yet."""
    return any(call.operation == STEP_ROUTE for call in session.live.values())
