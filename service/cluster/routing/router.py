"""A door's way to several engines: finds the engine of every call, and makes one answer of many.

It has the interface of `Link` (`service/doors/kit/upstream.py`), so the door in front of it
cannot tell a cluster from one engine. Nothing here could not be rebuilt from the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Final

from attnd.wire.dtypes import Part

from config.server import ServerSettings
from service.cluster.membership.engine import Call, refusal_in
from service.cluster.membership.members import Members
from service.cluster.migration.drain import drain
from service.cluster.migration.recovery import wait_for_move
from service.cluster.placement.create import create
from service.cluster.placement.imports import ask_import
from service.cluster.placement.inflight_prompts import Prompts
from service.cluster.routing.batch_calls import ask_batch, ask_one, ask_together
from service.cluster.routing.broadcast import ask_everywhere, ask_for_lease
from service.cluster.routing.fast_path import Passing
from service.cluster.routing.locator import Homes
from service.cluster.routing.replies import is_moving, reply, with_room
from service.doors.kit.arena import DoorArena
from service.doors.kit.pieces import OneByOne
from service.doors.kit.problems import ProblemText
from service.doors.kit.timeouts import Timeouts
from service.errors import InvalidRequest, NotReady
from service.image.json_pieces import is_short
from service.image.reading import LENGTH_BYTES, split
from service.metrics import Metrics
from service.operations.schema.routing import Routing
from service.operations.schema.spec import Operation, Prepared, prepare, preparing
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import Tenant

REMEMBERED_BYTES: Final = 16 * 2**10
"""Longest header whose reading is remembered."""
MOVING_STATUS: Final = 503
Answer = tuple[Answered, Slot]
Ask = Callable[["Router", Call, Prepared], Awaitable[Answer]]


class Router:
    """Of one door, on its event loop."""

    def __init__(
        self,
        limits: ServerSettings,
        has_keys: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        """`has_keys`: calls are made for the tenants who showed them. `metrics` learns of every
        engine what is known of it."""
        self.limits = limits
        self.has_keys = has_keys
        self.draining = ""
        self.arena = DoorArena(limits)
        self.answers = self.arena.answers
        self.members = Members(limits, has_keys, self.arena, metrics)
        self.homes = Homes(self.members)
        self.passing = Passing(self.homes)
        self.timeouts = Timeouts()
        self.prompts = Prompts()
        self.drains: dict[str, asyncio.Task[None]] = {}
        self.long_work = OneByOne()
        self.remembered = lru_cache(maxsize=512)(self.read)

    async def connect(self, path: str, name: str, secret: str) -> None:
        """Watch the file of members at `path`, and meet them; returns when one can be called."""
        await self.members.watch(path, name, secret)

    @property
    def state(self) -> tuple[str, str]:
        if self.draining:
            return "draining", self.draining
        return self.members.state

    def ready(self) -> None:
        """Raises NotReady."""
        if (why := self.draining or self.members.why_none) is not None:
            raise NotReady(why)

    def check_heard(self) -> None:
        """Raises NotReady before all engines were met, though some requests are served by then, and
        where not one of them has been heard for a while."""
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

    # slots

    @property
    def arena_fd(self) -> int:
        return self.arena.mapping.fd

    def take(self, size: int) -> Slot:
        return self.arena.take(size)

    async def slot(self, size: int, *, exactly: bool = False) -> Slot:
        return self.arena.slot(size, exactly=exactly)

    async def lay(self, parts: Sequence[Part]) -> tuple[Slot, int]:
        return self.arena.lay(parts)

    def give_back(self, slot: Slot) -> None:
        self.arena.give_back(slot)

    def trim(self) -> None:
        if not any(engine.link.is_pinned for engine in self.members.engines):
            self.arena.trim()

    def close(self) -> None:
        for name in list(self.drains):
            self.stop_draining(name)
        self.timeouts.close()
        self.members.close()
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
    ) -> Answer:
        """As `Upstream.call`. What was asked of several engines raises a refusal as ProblemText."""
        tenant.require(operation.scope, operation.name)  # before any engine is asked for an id
        image = request.view(length)
        call = Call(operation, image, most, deadline_us, request_id, tenant, request)
        request.hold()  # the image lies there until the call is over, also when nobody waits
        try:
            with self.timeouts.limit(deadline_us * 1e-6 or self.limits.deadline_s):
                return await self.route(call)
        finally:
            request.free()

    async def route(self, call: Call) -> Answer:
        """The answer of whom the operation is for; a sequence that is on its way to another engine
        is waited for."""
        header, _ = split(call.image)
        while True:
            straight = self.passing.straight(call, header)
            try:
                answer = None if straight is None else await ask_one(self, call, *straight)
                if answer is None:
                    ask = ROUTES[call.operation.routed]
                    answer = await ask(self, call, await self.prepared(call, header))
                answered, slot = answer
                if answered.status != MOVING_STATUS:
                    return answered, slot
                refused = refusal_in(answered)
                if not is_moving(refused) or not call.may_wait():
                    return answered, slot
                self.give_back(slot)
            except ProblemText as error:
                if not is_moving(error) or not call.may_wait():
                    raise with_room(error, self.members.engines) from None
                refused = error
            await wait_for_move(self, call, refused)

    def drain(self, name: str) -> None:
        """Begin to move an engine's sequences to the others, and go on until it has none."""
        if name not in self.drains or self.drains[name].done():
            self.drains[name] = asyncio.get_running_loop().create_task(drain(self, name))

    def stop_draining(self, name: str) -> None:
        if (task := self.drains.pop(name, None)) is not None:
            task.cancel()

    async def prepared(self, call: Call, header: bytes) -> Prepared:
        """The request, checked as its engine will check it; a long one while the loop goes on.
        Raises MalformedBody, InvalidRequest, NotReady."""
        room = len(call.image) - len(header) - LENGTH_BYTES
        if len(header) <= REMEMBERED_BYTES and is_short(header):
            return self.remembered(call.operation, header, room)
        found = await self.long_work.do(preparing(call.operation, header, room, self.members.info))
        self.passing.learn(call, header, found)
        return found

    def read(self, operation: Operation, header: bytes, room: int) -> Prepared:
        return prepare(operation, header, room, self.members.info)


async def ask_home(router: Router, call: Call, prepared: Prepared) -> Answer:
    """The engine that the sequence is on."""
    return await ask_batch(router, call, prepared, (prepared.fields.id,))


async def ask_homes(router: Router, call: Call, prepared: Prepared) -> Answer:
    """The engines that the batch's sequences are on."""
    return await ask_batch(router, call, prepared, prepared.fields.ids)


async def ask_any(router: Router, call: Call, prepared: Prepared) -> Answer:
    """The engine that is least busy; another one, if that is lost meanwhile."""
    asked: set[str] = set()
    while True:
        engine = router.members.idlest(but=asked)
        asked.add(engine.tag)
        try:
            return await engine.call(call)
        except NotReady:
            if len(asked) >= len(router.members.engines):
                raise


async def ask_engine(router: Router, call: Call, prepared: Prepared) -> Answer:
    """The engine of a name, which is to be emptied, or is not to be any more."""
    name, stop = prepared.fields.name, prepared.fields.stop
    member = router.members.by_name.get(name)
    if member is None:
        raise InvalidRequest("name", name, "no engine is called so: GET /v1/engines has them")
    if member.engine is None:
        raise NotReady(member.why)
    told = await member.engine.ask(call, {"name": name, "stop": stop})
    if stop:
        router.stop_draining(name)
    else:
        router.drain(name)
    return reply(router.arena, call, told.fields, stages=told.stages)


ROUTES: Final[dict[Routing, Ask]] = {
    "sequence": ask_home,
    "sequences": ask_homes,
    "together": ask_together,
    "placed": create,
    "imported": ask_import,
    "everywhere": ask_everywhere,
    "anywhere": ask_any,
    "engine": ask_engine,
    "lease": ask_for_lease,
}
