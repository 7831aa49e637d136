"""Finds the engine of a sequence: by memory, by its id, or by asking all engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

from service.cluster.membership.engine import Call, Engine, EngineReply, Home
from service.cluster.membership.polling import SILENT_S
from service.cluster.routing.outcomes import Outcome, outcome_of
from service.cluster.routing.replies import gather_all, results_of, run_in_background
from service.cluster.routing.tags import BETWEEN, Tags, tags_of
from service.doors.kit.problems import ProblemText
from service.errors import AttndError, LostSequence, NotReady, UnknownSequence
from service.operations.rows import GATHER
from service.operations.schema.spec import Operation
from service.operations.sequences import GET_SEQUENCE
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.membership.members import Members

IDS_PER_CALL: Final = 1024
"""Maximum number of ids in one question to all engines."""
MAX_IDS: Final = 2**15
"""Number of ids in remembered batches."""
Places = dict[Home, list[int]]
"""The positions of a batch's sequences, by their home; that of the first sequence comes first."""
LOOK_PAUSE_S: Final = 0.005
"""Between two looks at all engines."""
MAX_SHARD_LOOKS: Final = 20
"""After this many looks a sequence counts as lost of which a shard is nowhere."""
ORPHAN_S: Final = 30.0
"""Age of an epoch from which on a sequence without all its shards is not being made or moved."""
FIRST_TIME: Final = 10**15
"""Doors number epochs by the time, in microseconds; callers that shard by themselves count."""


class Locator:
    """The engines of sequences, for one router."""

    def __init__(self, members: Members) -> None:
        self.members = members
        members.on_shards_lost = self.recheck
        self.tags = Tags()
        self.batches: dict[tuple[str, tuple[str, ...]], Places] = {}
        """Places of whole batches, which a step's layers repeat; valid while `changes` is."""
        self.num_ids = 0
        """Of the batches."""
        self.changes = (0, 0)

    def home(self, name: str, tenant: Tenant) -> Home | None:
        """Where a sequence should be; None where that is not known, or cannot be called."""
        return self.members.home(self.tags.tag((tenant.namespace, name)) or "")

    def known_places(self, ids: Sequence[str], tenant: Tenant) -> Places | None:
        """As `locate`, from memory; None where one of the sequences is not known."""
        changes = self.members.changes, self.tags.changes
        if self.changes != changes or self.num_ids > MAX_IDS:
            self.batches.clear()
            self.changes, self.num_ids = changes, 0
        batch = tenant.namespace, tuple(ids)
        places = self.batches.get(batch)
        if places is None:
            places = {}
            for at, name in enumerate(ids):
                if (home := self.home(name, tenant)) is None:
                    return None
                places.setdefault(home, []).append(at)
            self.batches[batch] = places
            self.num_ids += len(ids)
        return places

    async def locate(self, ids: Sequence[str], tenant: Tenant) -> Places:
        """The home of each sequence. Raises UnknownSequence, LostSequence, NotReady."""
        while (places := self.known_places(ids, tenant)) is None:
            # an engine may leave while the others are asked: then they are asked again
            unknown = [name for name in dict.fromkeys(ids) if self.home(name, tenant) is None]
            await self.find(unknown, tenant)
        return places

    async def find(self, ids: Sequence[str], tenant: Tenant) -> None:
        """Asks all engines for sequences, and remembers where they are. Raises as `locate`.

        A sequence counts as missing after two looks with the same result, with no engine coming or
        going meanwhile: it may move from an engine asked late to one asked early.
        """
        wanted, before = list(ids), None
        while wanted:
            changes = self.members.changes
            missing: list[str] = []
            for some in chunks(wanted):
                missing += await self.look(some, tenant)
            if missing:
                self.members.check_reachable()
                if before == (changes, missing):
                    await self.raise_missing(missing, tenant, changes)
                await asyncio.sleep(LOOK_PAUSE_S)
            wanted, before = missing, (changes, missing)

    async def look(self, ids: Sequence[str], tenant: Tenant) -> list[str]:
        """Asks all engines once and remembers the homes; returns the ids that no engine has."""
        holders = await self.holders(ids, tenant, self.members.engines)
        looks = [self.tag_of(name, engine, tenant) for name, engine in holders.items()]
        found = set()
        for name, tag in zip(holders, await gather_all(looks), strict=True):
            if tag is not None:
                self.tags.learn((tenant.namespace, name), tag)
                found.add(name)
        return [name for name in ids if name not in found]

    def recheck(self, tenant: Tenant, ids: Sequence[str]) -> None:
        """An engine with shards of these is lost: in the background, deletes the other shards of
        those whose shard has not moved to another engine."""

        async def look() -> None:
            for name in ids:
                with suppress(ProblemText, AttndError):
                    await self.find([name], tenant)

        run_in_background(look())

    async def raise_missing(self, ids: Sequence[str], tenant: Tenant, changes: int) -> None:
        """Raises LostSequence where an engine died with them, else UnknownSequence; NotReady while
        an engine that may have them cannot be called. Returns if the engines have changed since
        `changes`."""
        tags = {name: self.tags.tag((tenant.namespace, name)) for name in ids}
        every = {part for tag in tags.values() if tag for part in tags_of(tag)}
        await self.members.wait_for_fate(every)
        self.members.check_reachable()
        if self.members.changes != changes:
            return
        lost = [name for name, tag in tags.items() if tag and self.is_partitioned(tag)]
        raise LostSequence(lost) if lost else UnknownSequence(ids)

    def is_partitioned(self, tag: str) -> bool:
        """Whether an engine of the tag has no session."""
        return any(part not in self.members.by_tag for part in tags_of(tag))

    def delete_remains(
        self, name: str, tenant: Tenant, left: Mapping[Engine, dict[str, Any]]
    ) -> None:
        """Deletes the only shards of a sequence that engines have, where its other shards were lost
        with an engine, or have been nowhere for so long that no door is making or moving them."""
        tag = self.tags.tag((tenant.namespace, name))
        newest = max(shard["epoch"] for shard in left.values())
        is_old = FIRST_TIME < newest < (time.time() - ORPHAN_S) * 1e6
        if is_old or (tag and any(map(self.members.is_dead, tags_of(tag)))):
            from service.cluster.sharded.deletion import delete_shards

            run_in_background(delete_shards(left, tenant, name))

    async def tag_of(self, name: str, engine: Engine, tenant: Tenant) -> str | None:
        """The tag of a sequence of which an engine has a shard, or all; None where it was deleted.

        Raises LostSequence, NotReady where an engine with a shard may come back.
        """
        tenant = self.members.acting_for(tenant)
        looks, before, ranks = 0, self.members.changes, 1
        while looks < MAX_SHARD_LOOKS:
            first = await shard_at(engine, name, tenant)
            if is_whole(first):
                return engine.tag
            engines = self.members.engines
            left = dict[Engine, dict[str, Any]]()
            views = await gather_all([shard_at(one, name, tenant) for one in engines])
            for one, shard in zip(engines, views, strict=True):
                if is_whole(shard):
                    return one.tag
                if isinstance(shard, dict):
                    left[one], ranks = shard, shard["ranks"]
            if not left:
                return None
            tags = {shard["rank"]: one.tag for one, shard in left.items()}
            if len(tags) == ranks:
                return BETWEEN.join(tags[rank] for rank in range(ranks))
            self.members.check_reachable()
            await asyncio.sleep(LOOK_PAUSE_S)  # a shard may be moving
            looks = looks + 1 if self.members.changes == before else 0
            before = self.members.changes
        self.delete_remains(name, tenant, left)
        raise LostSequence([name])

    async def holders(
        self, ids: Sequence[str], tenant: Tenant, engines: Iterable[Engine]
    ) -> dict[str, Engine]:
        """The engine of each sequence that one of `engines` has. Raises NotReady where an engine
        that may have some does not reply."""
        asked, tenant = list(engines), self.members.acting_for(tenant)
        found: dict[str, Engine] = {}
        looks = await results_of([known_at(engine, ids, tenant) for engine in asked])
        for engine, known in zip(asked, looks, strict=True):
            if isinstance(known, BaseException):
                await self.members.wait_for_fate([engine.tag])
                if not self.members.is_dead(engine.tag):
                    raise known
                continue  # its sequences died with it
            found |= dict.fromkeys(known, engine)
        return found

    def learn(self, call: Call, ids: Iterable[str], home: Home) -> None:
        """Remembers where sequences are."""
        for name in ids:
            self.tags.learn((call.tenant.namespace, name), home.tag)

    def forget(self, call: Call, ids: Iterable[str]) -> None:
        for name in ids:
            self.tags.forget((call.tenant.namespace, name))


def chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(ids), IDS_PER_CALL):
        yield ids[begin : begin + IDS_PER_CALL]


async def in_time(asking: Awaitable[EngineReply], engine: Engine) -> EngineReply:
    """A reply within `SILENT_S`. Raises NotReady where none comes."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await asking
    except TimeoutError:
        detail = f"{engine.name} has not replied for {SILENT_S:g} s: retry later"
        raise NotReady(detail) from None


async def question(
    engine: Engine, operation: Operation, tenant: Tenant, fields: dict[str, Any]
) -> EngineReply:
    """As `Engine.question`, within `SILENT_S`. Raises ProblemText, NotReady."""
    return await in_time(engine.question(operation, tenant, fields), engine)


Shard = dict[str, Any] | Literal["moving"] | None


async def shard_at(engine: Engine, name: str, tenant: Tenant) -> Shard:
    """The shard of a sequence that an engine has, rank 0 of 1 for all of it; None for nothing."""
    try:
        view = await question(engine, GET_SEQUENCE, tenant, {"id": name})
    except ProblemText as error:
        match outcome_of(error):
            case Outcome.MOVING:
                return "moving"
            case Outcome.UNKNOWN:
                return None
        raise
    return dict(view.fields.get("shard") or {"rank": 0, "ranks": 1})


def is_whole(shard: Shard) -> bool:
    """Whether an engine has all of a sequence, or answers for it while it moves."""
    return shard == "moving" or (isinstance(shard, dict) and shard["ranks"] == 1)


async def known_at(engine: Engine, ids: Sequence[str], tenant: Tenant) -> list[str]:
    """The sequences that an engine has: a gather of no rows reports the unknown ones."""
    fields = {"layer": 0, "sequences": list(ids), "stop": 0}
    try:
        await question(engine, GATHER, tenant, fields)
    except ProblemText as error:
        named = set(error.problem.get("sequences", ()))
        others = [name for name in ids if name not in named]
        match outcome_of(error):
            case Outcome.MOVING:  # here until the move is over
                return [*named, *(await known_at(engine, others, tenant) if others else ())]
            case Outcome.UNKNOWN:
                return others
        raise
    return list(ids)
