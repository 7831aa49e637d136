"""The router of a cluster: finds the engine of each call, and joins replies.

The router has the interface of `Link` (`service/doors/kit/upstream.py`), so a door works the same
before a cluster as before one engine. It is in the HTTP door's process, the only one that makes and
deletes sequences. All that it knows can be rebuilt from the engines.

For a routing bug start at `outcomes.py`, which lists every outcome of a request, then open `ids.py`
(which engine has an id), `sequence_calls.py` (calls for sequences) or `broadcast.py` (calls for all
engines); for a placement bug `placement/creation.py` and `placement/placer.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Final

from config.server import ServerSettings
from service.cluster.membership.engine import DoorCall, RawReply
from service.cluster.membership.members import Members
from service.cluster.membership.sessions import Sessions
from service.cluster.placement.creation import Creation
from service.cluster.placement.imports import call_for_import
from service.cluster.placement.inflight_prompts import InflightPrompts
from service.cluster.placement.placer import Placer
from service.cluster.routing.broadcast import Broadcast
from service.cluster.routing.event_socket import serve_events
from service.cluster.routing.ids import Ids
from service.cluster.routing.replies import reply, with_room
from service.cluster.routing.sequence_calls import ID_FIELD, SequenceCalls
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import GRACE_S
from service.doors.kit.problems import ProblemText
from service.errors import DeadlineExceeded, InvalidRequest, NotReady
from service.image.reading import LENGTH_BYTES, split
from service.metrics import Metrics
from service.operations.schema.spec import Operation, Prepared, Routing, prepare
from service.operations.status import ENGINE_NAME, UNKNOWN_ENGINE
from service.road.caller_end.slots import Slot
from service.tenants import Tenant

MAX_REMEMBERED_BYTES: Final = 4 * 2**10
MAX_OBJECTS: Final = 8
"""Limits for a header whose checked form is remembered: short objects take far more memory than
their text."""
MAX_REMEMBERED: Final = 512


class Router:
    """The upstream of one door, on its event loop."""

    def __init__(
        self, limits: ServerSettings, has_keys: bool = False, metrics: Metrics | None = None
    ) -> None:
        """`has_keys`: calls are made for the tenants of their keys. `metrics` records what engines
        report."""
        self.limits = limits
        self.has_keys = has_keys
        self.arena = DoorArena(limits)
        self.members = Members(limits, has_keys, self.arena, metrics)
        self.ids = Ids(self.members)
        self.sessions = Sessions(self.members)
        self.prompts = InflightPrompts()
        self.placer = Placer(self.members)
        self.sequences = SequenceCalls(self.members, self.ids, self.prompts, self.prepared)
        self.broadcast = Broadcast(self.members, self.ids, self.prompts)
        self.event_socket: asyncio.Server | None = None
        self.remembered = lru_cache(MAX_REMEMBERED)(self.read)
        self.routes: dict[Routing, Callable[[DoorCall, Prepared], Awaitable[RawReply]]] = {
            "together": self.sequences.together,
            "placed": self.create,
            "imported": partial(call_for_import, self.placer, self.ids),
            "everywhere": self.broadcast.call,
            "anywhere": self.anywhere,
            "engine": self.drain,
            "lease": self.broadcast.lease,
        }

    async def connect(self, path: str, name: str, secret: str) -> None:
        """Connects to the engines of the roster at `path`; returns when one is ready. Serves its
        events beside the roster from now on."""
        self.event_socket = await serve_events(self, self.has_keys, path)
        await self.sessions.watch(path, name, secret)

    @property
    def draining(self) -> str:
        return self.members.draining

    @draining.setter
    def draining(self, why: str) -> None:
        self.members.draining = why

    @property
    def state(self) -> tuple[str, str]:
        if self.draining:
            return "draining", self.draining
        return self.members.state

    def ready(self) -> None:
        """Raises NotReady where no engine can be called, or the door is draining."""
        if (why := self.draining or self.members.why_none) is not None:
            raise NotReady(why)

    def check_heard(self) -> None:
        """Raises NotReady before a session with every engine was opened, though some requests are
        served by then, and where no engine has been heard for a while."""
        self.ready()
        state, reason = self.state
        if state != "ready":
            raise NotReady(reason)
        silent: NotReady | None = None
        for engine in self.members.engines:
            try:
                engine.link.check_heard()
            except NotReady as error:
                silent = error
            else:
                return
        if silent is not None:
            raise silent

    @property
    def is_pinned(self) -> bool:
        """Whether a device holds the arena."""
        return any(engine.link.is_pinned for engine in self.members.engines)

    def close(self) -> None:
        if self.event_socket is not None:
            self.event_socket.close()
        self.sessions.close()
        self.arena.close()

    # calls

    async def call(
        self,
        operation: Operation,
        request: Slot,
        length: int,
        most: int,
        deadline_us: int,
        request_id: bytes,
        tenant: Tenant,
    ) -> RawReply:
        """As `Upstream.call`. An engine's error reply is raised as ProblemText."""
        tenant.require(operation.scope, operation.name)  # before engines are asked for an id
        image = request.view(length)
        call = DoorCall(operation, image, most, deadline_us, request_id, tenant, request)
        seconds = GRACE_S + (deadline_us * 1e-6 or self.limits.deadline_s)
        request.hold()  # the image stays until the call is over, even if the caller has left
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self.route(call)
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"no engine replied within {seconds:g} s; the operation may have been applied"
            raise DeadlineExceeded(text) from None
        finally:
            request.free()

    async def route(self, call: DoorCall) -> RawReply:
        """The reply of the call's engines."""
        header, _ = split(call.image)
        try:
            if call.operation.routed in ID_FIELD:
                return await self.sequences.call(call, header)
            prepared = self.prepared(call, header)
            return await self.routes[call.operation.routed](call, prepared)
        except ProblemText as error:
            raise with_room(error, self.members.engines) from None

    def prepared(self, call: DoorCall, header: bytes) -> Prepared:
        """The request, checked as its engine will check it. Raises MalformedBody, InvalidRequest,
        NotReady."""
        room = len(call.image) - len(header) - LENGTH_BYTES
        is_light = len(header) <= MAX_REMEMBERED_BYTES and header.count(b"{") <= MAX_OBJECTS
        read = self.remembered if is_light else self.read
        return read(call.operation, header, room)

    def read(self, operation: Operation, header: bytes, room: int) -> Prepared:
        return prepare(operation, header, room, self.members.info)

    async def create(self, call: DoorCall, prepared: Prepared) -> RawReply:
        return await Creation(self.placer, self.sequences, call, prepared).run()

    async def anywhere(self, call: DoorCall, _: Prepared) -> RawReply:
        """The reply of any engine, tried one after another where sessions end."""
        tried: set[str] = set()
        while True:
            engine = self.members.least_busy(but=tried)
            tried.add(engine.tag)
            try:
                return await engine.call(call)
            except NotReady:
                if len(tried) >= len(self.members.engines):
                    raise

    async def drain(self, call: DoorCall, prepared: Prepared) -> RawReply:
        """Has a named engine refuse new sequences, or accept them again."""
        name, stop = prepared.fields.name, prepared.fields.stop
        member = self.members.by_name.get(name)
        if member is None:
            raise InvalidRequest("name", name, UNKNOWN_ENGINE)
        if member.engine is None:
            raise NotReady(member.why)
        answer = await member.engine.ask(call, {"name": ENGINE_NAME, "stop": stop})
        member.engine.is_draining = not stop
        return reply(self.arena, call, answer.fields | {"name": name}, stages=answer.stages)
