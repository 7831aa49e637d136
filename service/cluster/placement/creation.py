"""New sequences: placed, given ids, and made on their engines, all or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine, EngineReply, RawReply
from service.cluster.membership.members import Members
from service.cluster.placement.inflight_prompts import InflightPrompt, Wait
from service.cluster.placement.placer import Placer
from service.cluster.placement.prefixes import prefix_of
from service.cluster.routing.ids import Ids, known_at, new_id
from service.cluster.routing.outcomes import (
    NEXT_ENGINE,
    Outcome,
    outcome_of,
    retried,
    unknown_ids,
)
from service.cluster.routing.replies import longest, reply, results_of
from service.cluster.routing.sequence_calls import SequenceCalls
from service.core.prefix.keys import Prefix
from service.doors.kit.problems import ProblemText
from service.errors import (
    AttndError,
    DeadlineExceeded,
    InvalidRequest,
    LostSequence,
    SequenceExists,
)
from service.image.json_text import Pieces
from service.operations.schema.spec import Prepared
from service.operations.sequences import DELETE_SEQUENCES
from service.road.caller_end.caller import AnswerLost

MAX_NEW: Final = 1000
"""Maximum number of sequences per call, as in an engine's reply (`json_text.MAX_LISTS`)."""
PIECE_S: Final = 0.005
"""Seconds of placing in one pass of the loop."""
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class New:
    """A sequence to make: its fields as given, and the keys of its prompt's pages."""

    id: str | None
    parent: str | None
    fields: Fields
    prefix: Prefix | None
    arrays: Mapping[str, Array]
    prompt: InflightPrompt = field(default_factory=InflightPrompt)


def new_sequences(call: Call, prepared: Prepared, page_size: int) -> list[New]:
    """The sequences to make, each with its part of the tensors. Raises InvalidRequest."""
    fields = prepared.fields
    if (count := len(fields.sequences)) > MAX_NEW:
        rule = f"at most {MAX_NEW} per call to a cluster: send more calls"
        raise InvalidRequest("sequences", f"{count} items", rule)
    arrays = call.arrays(prepared.layout)
    sums, found = fields.prefix_indptr, []
    for index, one in enumerate(fields.sequences):
        rows: dict[str, Array] = {}
        if one.prefix is not None:
            span = slice(None) if sums is None else slice(sums[index], sums[index + 1])
            rows = {name: array[span] for name, array in arrays.items()}
        given = one.model_dump(exclude_unset=True)
        prefix = prefix_of(one.prefix, rows, page_size)
        found.append(New(one.id, one.parent, given, prefix, rows))
    return found


class Claims:
    """The chosen ids of one call in the map: an id that has an engine is sent there, which knows
    whether it is taken; any other is entered before it is made, so that equal ones go there too."""

    def __init__(self, ids: Ids, call: Call, chosen: Sequence[str]) -> None:
        self.ids, self.call, self.chosen = ids, call, chosen
        self.own: set[str] = set()
        """Those that this call has entered."""

    def engine(self, name: str | None) -> Engine | None:
        """The engine that may have an id already. Raises NotReady where that is not known, or
        cannot be called now."""
        if name is None:
            return None
        members, tag = self.ids.members, self.ids.tag((self.call.tenant.namespace, name))
        if (home := members.by_tag.get(tag)) is None:
            members.check_reachable([tag] if tag else ())
            members.check_known()
        return home

    def enter(self, name: str | None, engine: Engine) -> None:
        if name is None:
            return
        if self.ids.tag((self.call.tenant.namespace, name)) != engine.tag:
            self.ids.learn(self.call.tenant, [name], engine.tag)
            self.own.add(name)

    async def is_taken(self, names: Sequence[str], engine: Engine) -> bool:
        """Whether an engine has one of these ids, or another call is making one."""
        tenant = self.call.tenant
        there = await known_at(engine, names, self.ids.members.acting_for(tenant))
        return bool(there) or any(self.ids.is_made_by_others(tenant, name) for name in names)

    def withdraw(self, names: Iterable[str]) -> None:
        """These were not made: removes those that this call has entered, and no other makes."""
        tenant, mine = self.call.tenant, self.own.intersection(names)
        self.ids.forget_unmade(tenant, mine)
        self.own -= {name for name in mine if not self.ids.is_made_by_others(tenant, name)}


class Creation:
    """The attempts of one `create_sequences`: forks are made where their parents are, chosen ids
    where the map has them, others where the placer says. An engine that fails is excluded from the
    next attempt."""

    def __init__(
        self, placer: Placer, calls: SequenceCalls, call: Call, prepared: Prepared
    ) -> None:
        self.placer, self.members, self.ids = placer, placer.members, calls.ids
        self.prompts = calls.prompts
        self.call = call
        self.new = new_sequences(call, prepared, self.members.info.page_size)
        self.index = {one.id: at for at, one in enumerate(self.new) if one.id is not None}
        self.claims = Claims(self.ids, call, list(self.index))
        self.parents: dict[str, Engine] | None = None
        """Engines of the parents that exist already; None: to be looked for."""
        self.excluded: set[str] = set()
        self.homes: list[Engine] = []
        self.errors: dict[str, Exception] = {}
        """Of the latest attempt, by the tag of the engine."""

    async def run(self) -> RawReply:
        with self.ids.being_made(self.call.tenant, self.claims.chosen):
            try:
                made = await retried(self)
                for one, home in zip(self.new, self.homes, strict=True):
                    if one.id is not None:  # newer than what calls see that began before
                        self.ids.learn(self.call.tenant, [one.id], home.tag)
                return made
            except BaseException as error:
                self.withdraw(error)
                raise

    def withdraw(self, error: BaseException) -> None:
        """Removes the entries of ids that were not made. An engine whose reply was lost may have
        made its own."""
        unsure = {tag for tag, one in self.errors.items() if isinstance(one, AnswerLost)}
        is_cut_short = not isinstance(error, ProblemText | AttndError)
        taken = error.problem.get("sequences", ()) if isinstance(error, ProblemText) else ()
        homes = dict(zip((one.id for one in self.new), self.homes, strict=False))
        self.claims.withdraw(
            name
            for name, home in homes.items()
            if name is not None
            and not is_cut_short
            and home.tag not in unsure
            and name not in taken
        )

    async def attempt(self) -> RawReply:
        """Places and makes all. Raises what engines raise; then none is made."""
        self.errors = {}
        if self.parents is None:
            names = [one.parent for one in self.new if one.parent and one.parent not in self.index]
            places = await self.ids.locate(names, self.call.tenant)
            self.parents = {names[at]: home for home, some in places.items() for at in some}
            await self.refuse_taken_elsewhere()
        waits = await self.placer.long_work.do(self.place(), self.call.tenant.namespace)
        for one, home in zip(self.new, self.homes, strict=True):
            self.claims.enter(one.id, home)
        await self.prompts.wait(self.call, waits)
        return await self.make()

    async def refuse_taken_elsewhere(self) -> None:
        """Raises SequenceExists for a fork's id that another engine has than its parent's."""
        for one in self.new:
            parent = (self.parents or {}).get(one.parent or "")
            home = None if parent is None else self.claims.engine(one.id)
            if one.id is not None and home is not None and home is not parent:
                if await self.claims.is_taken([one.id], home):
                    raise SequenceExists([one.id])
                self.ids.forget_unmade(self.call.tenant, [one.id])

    def place(self) -> Pieces[list[Wait]]:
        """In pieces: sets the engine of each, and returns the prompts to wait for."""
        self.homes, waits, began = [], [], time.monotonic()
        parents = self.parents or {}
        for one in self.new:
            if time.monotonic() - began > PIECE_S:
                yield
                began = time.monotonic()
            if one.parent in parents:
                self.claims.engine(one.id)
                self.homes.append(parents[one.parent])
            elif one.parent is not None:  # made by this call; the engine rejects a later one
                at = self.index[one.parent]
                is_later = at >= len(self.homes)
                home = self.claims.engine(one.parent) if is_later else self.homes[at]
                self.homes.append(home or self.members.least_busy())
            elif (home := self.claims.engine(one.id)) is not None and home.tag not in self.excluded:
                self.homes.append(home)
            else:
                placed = yield from self.placer.place_sequence(
                    self.call.tenant.namespace, one.prefix, self.excluded, one.prompt
                )
                self.homes.append(placed.engine)
                waits += [placed.wait] if placed.wait is not None else []
        return waits

    async def make(self) -> RawReply:
        """Makes each at its engine. After an error deletes the others and raises the first one."""
        groups: dict[Engine, list[int]] = {}
        for at, home in enumerate(self.homes):
            groups.setdefault(home, []).append(at)
        if len(groups) == 1:
            return await self.make_on(self.homes[0])
        with self.ids.hiding(self.call.tenant, self.claims.own):
            return await self.make_apart(groups)

    async def make_apart(self, groups: Mapping[Engine, Sequence[int]]) -> RawReply:
        asking = []
        for home, some in groups.items():
            fields, arrays = request_for(home, [self.new[at] for at in some])
            asking.append(home.ask(self.call, fields, arrays))
        results = await results_of(asking)
        views: list[Fields] = [{}] * len(self.new)
        for (home, some), one in zip(groups.items(), results, strict=True):
            if isinstance(one, EngineReply):
                for at, view in zip(some, one.fields["sequences"], strict=True):
                    views[at] = view
            elif isinstance(one, Exception):
                self.errors[home.tag] = one
            else:
                raise one
        if self.errors:
            await asyncio.shield(self.undo(groups, views))
            raise next(iter(self.errors.values()))
        self.begin_prompts([view["id"] for view in views])
        stages = longest(one.stages for one in results if isinstance(one, EngineReply))
        return reply(self.members.arena, self.call, {"sequences": views}, stages=stages)

    async def make_on(self, engine: Engine) -> RawReply:
        """As `make`, all on one engine, whose reply is forwarded."""
        fields, arrays = request_for(engine, self.new)
        try:
            made = await engine.send(self.call, fields, arrays)
        except (ProblemText, AttndError) as error:
            self.errors[engine.tag] = error
            raise
        self.begin_prompts([one["id"] for one in fields["sequences"]])
        return made

    async def undo(self, groups: Mapping[Engine, Sequence[int]], views: Sequence[Fields]) -> None:
        """Deletes the sequences of a call that has failed at another engine. Raises
        DeadlineExceeded where an engine does not confirm that, and may have them still."""
        tenant = self.members.acting_for(self.call.tenant)
        for home, some in groups.items():
            if names := [views[at]["id"] for at in some if views[at]]:
                asked = DELETE_SEQUENCES, tenant, {"ids": names}
                (done,) = await results_of([home.question(*asked, is_poll=True)])
                if isinstance(done, Exception):
                    await refuse_unless_dead(self.members, home.tag, done)

    def begin_prompts(self, made: Sequence[str]) -> None:
        """Remembers whose prompts are computed from now on."""
        for one, name in zip(self.new, made, strict=True):
            if one.prefix is not None:
                self.prompts.begin(self.call.tenant.namespace, name, one.prompt)

    # where an attempt has failed

    async def recover(self, outcome: Outcome, error: Exception) -> None:
        """Locates parents again that were not where they were believed to be; else excludes the
        engines that failed, where others can do their work. Raises `error` where none can."""
        parents = self.parents or {}
        if not self.errors:
            raise error
        unknown = {name for one in self.errors.values() for name in unknown_ids(one)}
        if gone := sorted(unknown & parents.keys()):
            await self.ids.find(gone, self.call.tenant)
            self.parents = None
            return
        for tag, why in self.errors.items():
            if isinstance(why, AnswerLost) and self.names_at(tag):
                await refuse_unless_dead(self.members, tag, why)
        failed = self.errors.keys()
        self.excluded |= failed
        is_bound = bool({home.tag for home in parents.values()} & failed)
        may_retry = all(outcome_of(one) in NEXT_ENGINE for one in self.errors.values())
        if is_bound or not may_retry or not self.placer.candidates(self.excluded):
            await self.check_parents()
            raise error
        await self.free_ids(error)

    async def free_ids(self, error: Exception) -> None:
        """Lets the chosen ids of engines that failed be made elsewhere. Raises `error` where such
        an engine has one, or may."""
        for tag in self.errors:
            if not (names := self.names_at(tag)):
                continue
            others = [name for name in names if name not in self.claims.own]
            engine = self.members.by_tag.get(tag)
            if others and (engine is None or await self.claims.is_taken(others, engine)):
                raise error
            self.ids.forget_unmade(self.call.tenant, others)
            self.claims.withdraw(names)
            if self.claims.own.intersection(names):  # others make them there
                raise error

    def names_at(self, tag: str) -> list[str]:
        """The chosen ids that an engine was asked to make."""
        some = zip(self.new, self.homes, strict=True)
        return [one.id for one, home in some if one.id is not None and home.tag == tag]

    async def check_parents(self) -> None:
        """Raises LostSequence for parents that were lost with their engine, NotReady while that may
        come back."""
        by_tag = self.members.by_tag
        lost = {
            one.parent: home.tag
            for one, home in zip(self.new, self.homes, strict=True)
            if one.parent and home.tag in self.errors and home.tag not in by_tag
        }
        await self.members.wait_for_fate(set(lost.values()))
        self.members.check_reachable(set(lost.values()))
        if lost:
            raise LostSequence(list(lost))


async def refuse_unless_dead(members: Members, tag: str, error: Exception) -> None:
    """Raises DeadlineExceeded after a lost reply, where the engine may have done its part and have
    it still."""
    await members.wait_for_fate([tag])
    if not members.is_dead(tag):
        text = (
            f"the session with its engine ended during the call; it may have been applied: {error}"
        )
        raise DeadlineExceeded(text) from error


def request_for(home: Engine, new: list[New]) -> tuple[Fields, dict[str, Array]]:
    """What one engine is asked to make. Sequences without an id get one with its tag."""
    fields: Fields = {"sequences": [one.fields | {"id": one.id or new_id(home.tag)} for one in new]}
    names = {name for one in new for name in one.arrays}
    arrays: dict[str, Array] = {}
    for name in names:
        parts = [one.arrays[name] for one in new if name in one.arrays]
        arrays[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if arrays and len(new) > 1:
        counts = [max((len(rows) for rows in one.arrays.values()), default=0) for one in new]
        fields["prefix_indptr"] = [0, *np.cumsum(counts).tolist()]
    return fields, arrays
