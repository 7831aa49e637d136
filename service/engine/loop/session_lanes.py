"""Which session has which lane: opened when asked for, cleared after aborts, closed at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from kernels.lanes import Lane, Lanes, NoRoom, Owner
from service.engine.handlers.steps import StepPlace
from service.engine.loop.open_steps import OpenSteps
from service.engine.loop.place import Place
from service.engine.loop.request import REMEMBERED_BYTES, Request
from service.errors import InvalidRequest, MalformedBody, Overloaded, problem
from service.image.json_text import load_json
from service.image.reading import MAX_HEADER_BYTES
from service.operations.info import InfoAnswer
from service.operations.spec import Operation, validate
from service.operations.step import STEP, StepFields, check_step
from service.road.engine_end.calls import STEP_ROUTE, AskedArena, Call
from service.road.engine_end.session import Session
from service.road.engine_end.stepping import device_arena_frame, done_frame, opened_frame
from service.tenants import Tenant


@dataclass(slots=True, eq=False)
class Held:
    """A session's lane; `asked` is the size that it wants, once none of its steps is under way."""

    session: Session
    lane: Lane | None = None
    asked: list[int] = field(default_factory=list)


class SessionLanes:
    """The lanes of one engine's sessions."""

    def __init__(self, lanes: Lanes, steps: OpenSteps, info: InfoAnswer) -> None:
        self._lanes = lanes
        self._steps = steps
        self._held: dict[Session, Held] = {}

        def read(description: bytes, tenant: Tenant) -> StepFields:
            tenant.require(STEP.scope, STEP.name)
            fields = validate(StepFields, load_json(description, "the step's description"))
            check_step(fields, {}, info)
            if fields.append and fields.op != "echo":
                tenant.require("append", "a step that appends")
            return fields.within(tenant.prefix)

        self._read = read
        self._remember = lru_cache(maxsize=128)(read)

    def __bool__(self) -> bool:
        return bool(self._held)

    def asked(self, event: AskedArena) -> None:
        """A session wants an arena, a larger one, or its flags cleared."""
        held = self._held.setdefault(event.session, Held(event.session))
        held.asked.append(event.arena_bytes)
        self._serve(held)

    def check(self, call: Call) -> None:
        """Raises `InvalidRequest` for a step that comes before its session's lane is there, and
        `MalformedBody` for one that is described at too great a length."""
        held = self._held.get(call.session)
        if held is None or held.lane is None or held.asked:
            raise InvalidRequest("step", "given", "DEVICE must have been answered before it")
        if len(call.request) > MAX_HEADER_BYTES:
            told = f"the step's description has {len(call.request)} bytes: at most"
            raise MalformedBody(f"{told} {MAX_HEADER_BYTES}")

    def read(self, operation: Operation, call: Call) -> Request:
        """A step as a request. Raises `Forbidden`, `MalformedBody`, `InvalidRequest`."""
        held = self._held.get(call.session)
        if held is None or held.lane is None:
            raise InvalidRequest("step", "given", "DEVICE must have been answered before it")
        description = bytes(call.request)
        read = self._remember if len(description) <= REMEMBERED_BYTES else self._read
        fields = read(description, call.tenant)
        where = StepPlace(held.lane, partial(self._tell_opened, call))
        return Request(operation, fields, {}, Place(call.answer), call.tenant, step=where)

    def tell_done(self, call: Call, layer: int) -> None:
        """A layer that was called for is done."""
        if not call.session.closed:
            call.session.send(done_frame(call.id, layer))

    def look_after(self) -> None:
        """Serve those who asked, once they may be; close the lanes of sessions that are over."""
        for held in list(self._held.values()):
            if held.asked:
                self._serve(held)
            if held.session.closed and not under_way(held.session):
                self._close(held)
                del self._held[held.session]

    def _tell_opened(self, call: Call, told: dict[str, Any]) -> None:
        if not call.session.closed:
            call.session.send(opened_frame(call.id, told))

    def _serve(self, held: Held) -> None:
        session = held.session
        if under_way(session) or session.closed or session.ended:
            return
        wanted, held.asked = held.asked, []
        for arena_bytes in wanted:
            session.send(device_arena_frame(self._open(held, arena_bytes)))

    def _open(self, held: Held, arena_bytes: int) -> dict[str, Any]:
        """What is told of the lane that the session has from now on, or the problem with it."""
        arena, lane = held.session.arena, held.lane
        if arena is None:
            raise RuntimeError("a session without an arena asked for a lane: this is a bug")
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
        return lane.told | {"arena_bytes": lane.arena_bytes, "deep": self._lanes.deep}

    def _close(self, held: Held) -> None:
        lane, held.lane = held.lane, None
        if lane is not None:
            self._steps.forget(lane)
            self._lanes.close(lane)


def under_way(session: Session) -> bool:
    """Whether a step of the session has no answer yet."""
    return any(call.operation == STEP_ROUTE for call in session.live.values())
