"""Finds the engine of a sequence: by memory, by its id, or by asking all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from service.cluster.membership.engine import Call, Engine, EngineReply
from service.cluster.membership.polling import SILENT_S
from service.cluster.routing.outcomes import Outcome, outcome_of
from service.cluster.routing.replies import gather_all, results_of
from service.cluster.routing.tags import Tags
from service.doors.kit.problems import ProblemText
from service.errors import LostSequence, NotReady, UnknownSequence
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
Places = dict[Engine, list[int]]
"""The positions of a batch's sequences, by their engine; that of the first sequence comes first."""
LOOK_PAUSE_S: Final = 0.005
"""Between two looks at all engines."""


class Locator:
    """The engines of sequences, for one router."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.tags = Tags()
        self.batches: dict[tuple[str, tuple[str, ...]], Places] = {}
        """Places of whole batches, which a step's layers repeat; valid while `changes` is."""
        self.num_ids = 0
        """Of the batches."""
        self.changes = (0, 0)

    def home(self, name: str, tenant: Tenant) -> Engine | None:
        """Where a sequence should be; None where that is not known, or cannot be called."""
        return self.members.by_tag.get(self.tags.tag((tenant.namespace, name)) or "")

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
        acting = self.members.acting_for(tenant)
        looks = [state_at(engine, name, acting) for name, engine in holders.items()]
        for name, state in zip(tuple(holders), await gather_all(looks), strict=True):
            if state is None:
                del holders[name]
            else:
                self.tags.learn((tenant.namespace, name), holders[name].tag)
        return [name for name in ids if name not in holders]

    async def raise_missing(self, ids: Sequence[str], tenant: Tenant, changes: int) -> None:
        """Raises LostSequence where an engine died with them, else UnknownSequence; NotReady while
        an engine that may have them cannot be called. Returns if the engines have changed since
        `changes`."""
        tags = {name: self.tags.tag((tenant.namespace, name)) for name in ids}
        await self.members.wait_for_fate({tag for tag in tags.values() if tag})
        self.members.check_reachable()
        if self.members.changes != changes:
            return
        lost = [name for name, tag in tags.items() if tag and tag not in self.members.by_tag]
        raise LostSequence(lost) if lost else UnknownSequence(ids)

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

    def learn(self, call: Call, ids: Iterable[str], home: Engine) -> None:
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


async def state_at(engine: Engine, name: str, tenant: Tenant) -> Literal["there", "moving"] | None:
    """Whether an engine has a sequence; None if it does not."""
    try:
        await question(engine, GET_SEQUENCE, tenant, {"id": name})
    except ProblemText as error:
        match outcome_of(error):
            case Outcome.MOVING:
                return "moving"
            case Outcome.UNKNOWN:
                return None
        raise
    return "there"


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
