"""A router over engines without processes, which store ids alone and fail when a test says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

from attnd.wire.frames import NO_STAGES
from attnd.wire.images import PROBLEM, RESPONSE

from config.server import ServerSettings
from service.cluster.membership.engine import EngineSession, RawReply
from service.cluster.membership.member import Member
from service.cluster.placement.cost import EngineLoad
from service.cluster.routing.router import Router
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import Link
from service.errors import (
    AttndError,
    NotReady,
    SequenceExists,
    UnknownImport,
    UnknownSequence,
    problem,
)
from service.image.json_text import dump_json
from service.image.reading import REQUEST, place, read_layout, split
from service.image.writing import image
from service.operations.schema.fields import InfoAnswer
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import Tenant
from tests.cluster.harness import SETTINGS, Cluster

INFO: Final = InfoAnswer.model_construct(
    instance_id="", **SETTINGS.pool.model_dump(exclude={"groups"})
)
"""What routers and checks of requests read of it."""


class FakeLink:
    """The session with one engine. `do_next` schedules what happens before its next calls of an
    operation are served: an error of the engine's, `NotReady` for the loss of the session, or an
    async function that runs first."""

    limits: ServerSettings = SETTINGS.server
    is_pinned = False
    caller = None

    def __init__(self, arena: DoorArena) -> None:
        self.arena = arena
        self.state = "ready", "ready"
        self.ids: set[str] = set()
        self.imports: set[str] = set()
        self.served: list[tuple[str, Any, dict[str, Any]]] = []
        """The operation, fields and tensors of each call."""
        self.replies: dict[str, Any] = {}
        """Of operations that are not served with the ids alone."""
        self.scheduled: dict[str, list[Any]] = {}
        self.tenants: list[Tenant] = []
        """Of each call."""
        self.stages = NO_STAGES

    def do_next(self, operation: str, *doing: Any) -> None:
        self.scheduled.setdefault(operation, []).extend(doing)

    def calls(self, operation: str) -> list[Any]:
        """The fields of its calls of an operation."""
        return [fields for name, fields, _ in self.served if name == operation]

    async def call(self, operation: Operation, request: Slot, length: int, *more: Any) -> RawReply:
        self.tenants.append(more[-1])
        header, start = split(request.view(length))
        layout = read_layout(header, length - start, REQUEST)
        arrays = {
            one: array.copy() for one, array in place(request.view(length), start, layout).items()
        }
        self.served.append((operation.name, layout.fields, arrays))
        key, status = RESPONSE, operation.status
        try:
            if scheduled := self.scheduled.get(operation.name):
                doing = scheduled.pop(0)
                if isinstance(doing, Exception):
                    raise doing
                await doing()
            answer = self.serve(operation.name, layout.fields)
        except NotReady:
            raise
        except AttndError as error:
            key, answer = PROBLEM, problem(error)
            status = answer["status"]
        slot, size = self.arena.lay(image(key, dump_json(answer), {}))
        return Answered(status, slot.view(size), 0, self.stages), slot

    def serve(self, name: str, fields: Any) -> dict[str, Any]:
        """The reply of an engine that stores ids alone."""
        match name:
            case "create_sequences":
                return self.create(fields["sequences"])
            case "get_import" | "cancel_import" | "import_sequence":
                return self.step(name, fields)
            case "delete_sequences":
                there = self.ids.intersection(fields["ids"])
                self.ids -= there
                return {"num_deleted": len(there)}
            case "list_sequences":
                return {"sequences": [{"id": one} for one in sorted(self.ids)], "next": None}
        self.check([*fields.get("sequences", ()), *filter(None, [fields.get("id")])])
        if name == "delete_sequence":
            self.ids.remove(fields["id"])
        return self.replies.get(name, {})

    def create(self, new: list[Any]) -> dict[str, Any]:
        made = {one["id"] for one in new}
        if made & self.ids:
            raise SequenceExists(sorted(made & self.ids))
        self.check([one["parent"] for one in new if one.get("parent", "") not in {"", *made}])
        self.ids |= made
        return {"sequences": [{"id": one["id"], "cached_len": 0} for one in new]}

    def check(self, ids: list[str]) -> None:
        if unknown := [one for one in ids if one not in self.ids]:
            raise UnknownSequence(unknown)

    def step(self, name: str, fields: Any) -> dict[str, Any]:
        """Of an import."""
        one = fields["id"]
        if "header" in fields:
            self.imports.add(one)
        elif one not in self.imports:
            raise UnknownImport(one)
        elif name == "import_sequence" and "part" not in fields:
            self.imports.remove(one)
            self.ids.add(one)
        return {"id": one}

    def close(self) -> None:
        pass


@dataclass
class FakeCluster(Cluster):
    """Engines `a`, `b`, ..., whose tags are eight times the letter."""

    links: dict[str, FakeLink] = field(default_factory=dict)

    def engine_of(self, name: str) -> EngineSession:
        return self.router.members.by_tag[8 * name]

    def lose(self, name: str, *, is_dead: bool) -> None:
        """Ends the session with an engine, which may come back if it is not dead."""
        member = self.router.members.by_name[name]
        self.router.members.disconnect(member, "lost")
        if is_dead:
            self.router.members.mark_dead(member)

    def ids_at(self) -> dict[str, set[str]]:
        return {name: link.ids for name, link in self.links.items()}


@asynccontextmanager
async def fake_cluster(names: str, has_keys: bool = False) -> AsyncIterator[FakeCluster]:
    """One engine for each letter, alike and empty."""
    router = Router(SETTINGS.server, has_keys)
    members = router.members
    members.first_info = INFO
    cluster = FakeCluster(router, Any)
    for name in names:
        link = cluster.links[name] = FakeLink(router.arena)
        engine = EngineSession(name, cast(Link, link), router.arena)
        engine.learn(INFO.model_copy(update={"instance_id": 32 * name}))
        engine.load = EngineLoad(free=1000)
        members.by_name[name] = Member(name, f"/{name}", 0.0, engine=engine, tag=engine.tag)
        members.by_name[name].is_known = True
        members.by_tag[engine.tag] = engine
    try:
        yield cluster
    finally:
        router.close()
