"""Which engines a call's sequences are on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from service.cluster.answering import MOVING, each, is_moving
from service.cluster.engine import Call, Engine
from service.cluster.names import BETWEEN, Names, tags_of
from service.cluster.ranks import Home, drop, unwaited
from service.doors.problems import ProblemText
from service.errors import AttndError, LostSequence, UnknownSequence
from service.operations.rows import GATHER
from service.operations.sequences import GET_SEQUENCE
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.members import Members

ASKED_AT_ONCE: Final = 1024
"""Ids that the engines are asked for in one call: a batch of ids that nobody has costs no more."""
ASK_DEADLINE_S: Final = 10.0
MOST_BATCHES: Final = 256


class Homes:
    """Finds engines for a router: by what is remembered, by the ids, or by asking them all."""

    def __init__(self, members: Members) -> None:
        self.members = members
        members.on_torn = self.look_after
        self.names = Names()
        self.batches: dict[tuple[str, tuple[str, ...]], list[Home]] = {}
        """What was found for whole batches, since a step's layers repeat them, while nothing that
        it rests on has changed."""
        self.changes = (0, 0)

    async def of(self, ids: Sequence[str], tenant: Tenant) -> list[Home]:
        """The engine of each sequence. Raises UnknownSequence, LostSequence, NotReady."""
        changes = self.members.changes, self.names.changes
        if self.changes != changes:
            self.batches.clear()
            self.changes = changes
        batch = tenant.namespace, tuple(ids)
        known = self.batches.get(batch)
        if known is None:
            known = await self.of_each(ids, tenant)
            if len(self.batches) >= MOST_BATCHES:
                self.batches.clear()
            if self.changes == (self.members.changes, self.names.changes):
                self.batches[batch] = known
        return known

    async def of_each(self, ids: Sequence[str], tenant: Tenant) -> list[Home]:
        """As `of`, whatever was found before."""
        space, home, tag = tenant.namespace, self.members.home, self.names.tag
        found = [home(tag((space, name)) or "") for name in ids]
        if None in found:
            missing = [name for name, engine in zip(ids, found, strict=True) if engine is None]
            await self.find(missing, tenant)
            found = [home(tag((space, name)) or "") for name in ids]
        return [engine for engine in found if engine is not None]

    async def find(self, ids: Sequence[str], tenant: Tenant) -> None:
        """Ask the engines for sequences, and remember where they are. Raises as `of`."""
        for begin in range(0, len(ids), ASKED_AT_ONCE):
            some = ids[begin : begin + ASKED_AT_ONCE]
            there = await self.there(some, tenant, self.members.engines)
            tags_there = [self.tag_at(name, engine, tenant) for name, engine in there.items()]
            for name, tag in zip(there, await each(tags_there), strict=True):
                if isinstance(tag, BaseException):
                    raise tag
                self.names.learn((tenant.namespace, name), tag)
            if missing := [name for name in some if name not in there]:
                self.refuse(missing, tenant)

    def look_after(self, tenant: Tenant, ids: Sequence[str]) -> None:
        """An engine that had a part of these is lost: where no other has got that part since, the
        others let theirs go. Nobody waits for it."""

        async def look() -> None:
            for name in ids:
                with suppress(ProblemText, AttndError):
                    await self.find([name], tenant)

        unwaited(look())

    def refuse(self, ids: Sequence[str], tenant: Tenant) -> None:
        """Say why sequences are nowhere: with their engine, or never anywhere."""
        tags = {name: self.names.tag((tenant.namespace, name)) for name in ids}
        gone = {name: tag for name, tag in tags.items() if tag and self.is_torn(tag)}
        self.members.check_reachable({part for tag in gone.values() for part in tags_of(tag)})
        for name, tag in gone.items():
            self.let_go(name, tag, tenant)
        raise LostSequence(list(gone)) if gone else UnknownSequence(ids)

    def is_torn(self, tag: str) -> bool:
        """Whether an engine of the tag is not there."""
        return any(part not in self.members.by_tag for part in tags_of(tag))

    def let_go(self, name: str, tag: str, tenant: Tenant) -> None:
        """Have the other engines delete their parts of a sequence that was lost with one."""
        by_tag = self.members.by_tag
        drop([by_tag[part] for part in tags_of(tag) if part in by_tag], tenant, [name])

    async def tag_at(self, name: str, engine: Engine, tenant: Tenant) -> str:
        """The tag of a sequence that an engine has, or has a part of. Raises LostSequence, NotReady
        where an engine with a part may come back."""
        tenant, shards = self.members.acting_for(tenant), dict[int, str]()
        ranks = 1
        for one in [engine, *(other for other in self.members.engines if other is not engine)]:
            call = one.own(GET_SEQUENCE, tenant, ASK_DEADLINE_S)
            try:
                shard = (await one.ask(call, {"id": name})).fields.get("shard")
            except ProblemText as refused:
                if is_moving(refused):
                    return one.tag
                continue
            if shard is None:
                return one.tag
            shards[shard["rank"]], ranks = one.tag, shard["ranks"]
        tag = BETWEEN.join(shards[rank] for rank in sorted(shards))
        if len(shards) < ranks:
            self.members.check_reachable(self.members.away)
            self.let_go(name, tag, tenant)
            raise LostSequence([name])
        return tag

    async def there(
        self, ids: Sequence[str], tenant: Tenant, engines: Iterable[Engine]
    ) -> dict[str, Engine]:
        """Which of the engines have which of the sequences."""
        asked, tenant = list(engines), self.members.acting_for(tenant)
        found: dict[str, Engine] = {}
        for engine, known in zip(
            asked, await each([known_there(engine, ids, tenant) for engine in asked]), strict=True
        ):
            if isinstance(known, BaseException):
                if engine.tag in self.members.by_tag:
                    raise known
                continue  # it was lost meanwhile, and its sequences with it
            found |= dict.fromkeys(known, engine)
        return found

    def made(self, call: Call, ids: Iterable[str], engine: Home) -> None:
        for name in ids:
            self.names.learn((call.tenant.namespace, name), engine.tag)

    def forget(self, call: Call, ids: Iterable[str]) -> None:
        for name in ids:
            self.names.forget((call.tenant.namespace, name))


async def known_there(engine: Engine, ids: Sequence[str], tenant: Tenant) -> list[str]:
    """Which of the sequences an engine has: a gather of no rows names those it does not know."""
    call = engine.own(GATHER, tenant, ASK_DEADLINE_S)
    fields = {"layer": 0, "sequences": list(ids), "stop": 0}
    try:
        await engine.ask(call, fields)
    except ProblemText as refused:
        problem = refused.problem
        named = set(problem.get("sequences", ()))
        others = [name for name in ids if name not in named]
        if problem["code"] == MOVING:  # it is there until it has gone
            more = await known_there(engine, others, tenant) if others else []
            return [*named, *more]
        if problem["code"] != "unknown_sequence":
            raise
        return others
    return list(ids)
