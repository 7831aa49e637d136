"""Which engines a call's sequences are on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

from service.cluster.membership.engine import Call, Engine, Told
from service.cluster.membership.polling import SILENT_S
from service.cluster.routing.replies import MOVING, each, is_moving, unwaited
from service.cluster.routing.tags import BETWEEN, Names, tags_of
from service.doors.kit.problems import ProblemText
from service.errors import AttndError, LostSequence, NotReady, UnknownSequence
from service.operations.rows import GATHER
from service.operations.sequences import GET_SEQUENCE
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.membership.members import Members
    from service.cluster.sharded.ranks import Home

ASKED_AT_ONCE: Final = 1024
"""Ids that the engines are asked for in one call: a batch of ids that nobody has costs no more."""
ASK_DEADLINE_S: Final = 10.0
MOST_BATCHES: Final = 256
LOOK_AGAIN_S: Final = 0.005
"""Between two looks at all engines."""
LOOKS_FOR_PARTS: Final = 20
"""Before a sequence counts as lost of which a part is nowhere."""


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
        """Ask the engines for sequences, and remember where they are. Raises as `of`: only after
        two looks at all engines that found the same, since a sequence may leave an engine that is
        asked late, for one that was asked already. No engine may come or go meanwhile."""
        wanted, before = list(ids), None
        while wanted:
            now = self.members.changes
            missing = [name for some in in_parts(wanted) for name in await self.look(some, tenant)]
            if missing:
                self.members.check_reachable()
                if before == (now, missing):
                    await self.refuse(missing, tenant, now)
                await asyncio.sleep(LOOK_AGAIN_S)
            wanted, before = missing, (now, missing)

    async def look(self, ids: Sequence[str], tenant: Tenant) -> list[str]:
        """Those that no engine has, at one look; where the others are is remembered."""
        there = await self.there(ids, tenant, self.members.engines)
        tags_there = [self.tag_at(name, engine, tenant) for name, engine in there.items()]
        found = set()
        for name, tag in zip(there, await each(tags_there), strict=True):
            if isinstance(tag, BaseException):
                raise tag
            if tag is not None:
                self.names.learn((tenant.namespace, name), tag)
                found.add(name)
        return [name for name in ids if name not in found]

    def look_after(self, tenant: Tenant, ids: Sequence[str]) -> None:
        """An engine that had a part of these is lost: where no other has got that part since, the
        others let theirs go. Nobody waits for it."""

        async def look() -> None:
            for name in ids:
                with suppress(ProblemText, AttndError):
                    await self.find([name], tenant)

        unwaited(look())

    async def refuse(self, ids: Sequence[str], tenant: Tenant, changes: int) -> None:
        """Say why sequences are nowhere: with their engine, or never anywhere. Raises NotReady
        while an engine that may have them cannot be called; returns where engines have come or
        gone since they were asked."""
        tags = {name: self.names.tag((tenant.namespace, name)) for name in ids}
        every = {part for tag in tags.values() if tag for part in tags_of(tag)}
        await self.members.fate_of(every)
        self.members.check_reachable()
        if self.members.changes != changes:
            return
        gone = {name: tag for name, tag in tags.items() if tag and self.is_torn(tag)}
        for name, tag in gone.items():
            self.let_go(name, tag, tenant)
        raise LostSequence(list(gone)) if gone else UnknownSequence(ids)

    def is_torn(self, tag: str) -> bool:
        """Whether an engine of the tag is not there."""
        return any(part not in self.members.by_tag for part in tags_of(tag))

    def let_go(self, name: str, tag: str, tenant: Tenant) -> None:
        """Have the other engines delete their parts of a sequence, where one of its engines is
        known to be dead."""
        by_tag, tags = self.members.by_tag, tags_of(tag)
        others = [by_tag[part] for part in tags if part in by_tag]
        if others and any(map(self.members.is_gone, tags)):
            from service.cluster.sharded.deletion import delete_shards

            unwaited(delete_shards(others, tenant, name))

    async def tag_at(self, name: str, engine: Engine, tenant: Tenant) -> str | None:
        """The tag of a sequence that an engine has, or has a part of; None where it has gone.

        Raises LostSequence, NotReady where an engine with a part may come back.
        """
        remembered = self.names.tag((tenant.namespace, name)) or ""
        tenant = self.members.acting_for(tenant)
        looks, before = 0, self.members.changes
        while looks < LOOKS_FOR_PARTS:
            first = await part_at(engine, name, tenant)
            if first == "moving" or (first is not None and first["ranks"] == 1):
                return engine.tag
            engines = self.members.engines
            told = await each([part_at(one, name, tenant) for one in engines])
            shards, ranks = dict[int, str](), 1
            for one, part in zip(engines, told, strict=True):
                if isinstance(part, BaseException):
                    raise part
                if part == "moving" or (part is not None and part["ranks"] == 1):
                    return one.tag
                if part is not None:
                    shards[part["rank"]], ranks = one.tag, part["ranks"]
            if not shards:
                return None
            if len(shards) == ranks:
                return BETWEEN.join(shards[rank] for rank in range(ranks))
            self.members.check_reachable()
            await asyncio.sleep(LOOK_AGAIN_S)  # a part may be on its way
            looks = looks + 1 if self.members.changes == before else 0
            before = self.members.changes
        self.let_go(name, remembered, tenant)
        raise LostSequence([name])

    async def there(
        self, ids: Sequence[str], tenant: Tenant, engines: Iterable[Engine]
    ) -> dict[str, Engine]:
        """Which of the engines have which of the sequences. Raises NotReady where one does not
        answer that may have them."""
        asked, tenant = list(engines), self.members.acting_for(tenant)
        found: dict[str, Engine] = {}
        looks = [known_there(engine, ids, tenant) for engine in asked]
        for engine, known in zip(asked, await each(looks), strict=True):
            if isinstance(known, BaseException):
                await self.members.fate_of([engine.tag])
                if not self.members.is_gone(engine.tag):
                    raise known
                continue  # it has died meanwhile, and its sequences with it
            found |= dict.fromkeys(known, engine)
        return found

    def made(self, call: Call, ids: Iterable[str], engine: Home) -> None:
        for name in ids:
            self.names.learn((call.tenant.namespace, name), engine.tag)

    def forget(self, call: Call, ids: Iterable[str]) -> None:
        for name in ids:
            self.names.forget((call.tenant.namespace, name))


def in_parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(ids), ASKED_AT_ONCE):
        yield ids[begin : begin + ASKED_AT_ONCE]


async def in_time(asking: Awaitable[Told], engine: Engine) -> Told:
    """An answer that nothing depends on but this look. Raises NotReady where it does not come."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await asking
    except TimeoutError:
        told = f"{engine.name} has not answered for {SILENT_S:g} s: retry later"
        raise NotReady(told) from None


async def part_at(
    engine: Engine, name: str, tenant: Tenant
) -> dict[str, Any] | Literal["moving"] | None:
    """Which part of a sequence an engine has; None where it has nothing of it."""
    call = engine.own(GET_SEQUENCE, tenant, ASK_DEADLINE_S)
    try:
        shard = (await in_time(engine.ask(call, {"id": name}), engine)).fields.get("shard")
    except ProblemText as refused:
        if is_moving(refused):
            return "moving"
        if refused.problem["code"] == "unknown_sequence":
            return None
        raise
    return {"rank": 0, "ranks": 1} if shard is None else dict(shard)


async def known_there(engine: Engine, ids: Sequence[str], tenant: Tenant) -> list[str]:
    """Which of the sequences an engine has: a gather of no rows names those it does not know."""
    call = engine.own(GATHER, tenant, ASK_DEADLINE_S)
    fields = {"layer": 0, "sequences": list(ids), "stop": 0}
    try:
        await in_time(engine.ask(call, fields), engine)
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
