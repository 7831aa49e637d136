"""New sequences: placed, given ids, and made on their engines, all or none."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine, EngineReply, RawReply
from service.cluster.placement.inflight_prompts import InflightPrompt, Wait
from service.cluster.placement.placer import Placer
from service.cluster.placement.prefixes import prefix_of
from service.cluster.placement.unique_ids import UniqueIds
from service.cluster.routing.outcomes import (
    NEXT_ENGINE,
    RETRY_PAUSE_S,
    Outcome,
    outcome_of,
    unknown_ids,
)
from service.cluster.routing.replies import longest, reply, results_of, run_in_background
from service.cluster.routing.sequence_calls import SequenceCalls
from service.cluster.routing.tags import new_id, refuse_anchor
from service.core.prefix.keys import Prefix
from service.doors.kit.problems import ProblemText
from service.errors import (
    AttndError,
    InvalidRequest,
    LostSequence,
    SequenceExists,
    SequenceMoving,
)
from service.image.json_text import Pieces
from service.operations.schema.spec import Prepared
from service.road.caller_end.caller import AnswerLost

MAX_NEW: Final = 1000
"""Maximum number of sequences per call, as in an engine's reply (`json_text.MAX_LISTS`)."""
PIECE_S: Final = 0.005
"""Seconds of placing in one pass of the loop."""
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class New:
    """A sequence to make: its fields as given, and the keys of its prompt's pages."""

    fields: Fields
    prefix: Prefix | None
    arrays: Mapping[str, Array]
    prompt: InflightPrompt = field(default_factory=InflightPrompt)

    @property
    def id(self) -> str | None:
        name: str | None = self.fields.get("id")
        return name

    @property
    def parent(self) -> str | None:
        name: str | None = self.fields.get("parent")
        return name


def new_sequences(call: Call, prepared: Prepared, page_size: int) -> list[New]:
    """The sequences to make, each with its part of the tensors. Raises InvalidRequest."""
    fields = prepared.fields
    if (count := len(fields.sequences)) > MAX_NEW:
        rule = f"at most {MAX_NEW} per call to a cluster: send more calls"
        raise InvalidRequest("sequences", f"{count} items", rule)
    if fields.confirm_s is not None:
        rule = "is for one engine: a cluster confirms by itself"
        raise InvalidRequest("confirm_s", fields.confirm_s, rule)
    arrays = call.arrays(prepared.layout)
    sums, found = fields.prefix_indptr, []
    for index, one in enumerate(fields.sequences):
        given = one.model_dump(exclude_unset=True)
        refuse_anchor(f"sequences.{index}.id", one.id)
        if one.held is not None:
            rule = "is for one engine: use a prefix instead"
            raise InvalidRequest(f"sequences.{index}.held", given["held"], rule)
        rows: dict[str, Array] = {}
        if one.prefix is not None:
            span = slice(None) if sums is None else slice(sums[index], sums[index + 1])
            rows = {name: array[span] for name, array in arrays.items()}
        found.append(New(given, prefix_of(one.prefix, rows, page_size), rows))
    return found


class Creation:
    """The attempts of one `create_sequences`: forks are made where their parents are, others where
    the placer says. An engine that fails is excluded from the next attempt."""

    def __init__(
        self, placer: Placer, calls: SequenceCalls, call: Call, prepared: Prepared
    ) -> None:
        self.placer, self.members, self.locator = placer, placer.members, placer.locator
        self.calls, self.prompts = calls, calls.prompts
        self.call = call
        self.making = replace(call, tenant=self.members.acting_for(call.tenant))
        """The request to engines: only routers ask for confirmation."""
        self.unique = UniqueIds(calls, call)
        self.new = new_sequences(call, prepared, self.members.info.page_size)
        self.index = {one.id: at for at, one in enumerate(self.new) if one.id is not None}
        self.shared_ids = self.index if len(self.members.by_name) > 1 else {}
        """Chosen ids that other engines may have; an only engine refuses its own by itself."""
        self.parents: dict[str, Engine] = {}
        """Homes of the parents that exist already."""
        self.has_looked = False
        """For the chosen ids, which were not taken, and for the parents."""
        self.excluded: set[str] = set()
        self.homes: list[Engine] = []
        self.errors: dict[str, Exception] = {}
        """Of the latest attempt, by the tag of the home."""

    async def attempt(self) -> RawReply:
        """Places and makes all. Raises SequenceExists and what engines raise; then none is made."""
        self.errors = {}
        if not self.has_looked:
            if self.shared_ids:
                await self.unique.refuse_taken(self.shared_ids)
            await self.locate_parents()
        waits = await self.placer.long_work.do(self.place(), self.call.tenant.namespace)
        await self.prompts.wait(self.making, waits)
        return await self.make()

    async def locate_parents(self) -> None:
        names = [one.parent for one in self.new if one.parent and one.parent not in self.index]
        places = await self.locator.locate(names, self.call.tenant)
        self.parents = {names[at]: home for home, some in places.items() for at in some}
        self.has_looked = True

    def place(self) -> Pieces[list[Wait]]:
        """In pieces: sets the home of each, and returns the prompts to wait for."""
        self.homes, waits, began = [], [], time.monotonic()
        for one in self.new:
            if time.monotonic() - began > PIECE_S:
                yield
                began = time.monotonic()
            if one.parent is None:
                placed = yield from self.placer.place_sequence(
                    self.call.tenant.namespace, one.prefix, self.excluded, one.prompt
                )
                self.homes.append(placed.engine)
                waits += [placed.wait] if placed.wait is not None else []
            elif one.parent in self.parents:
                self.homes.append(self.parents[one.parent])
            else:  # a parent made by this call; the engine rejects one that comes later
                at = self.index[one.parent]
                is_later = at >= len(self.homes)
                self.homes.append(self.members.least_busy() if is_later else self.homes[at])
        return waits

    async def make(self) -> RawReply:
        """Makes each at its home. After an error deletes the others and raises the first error."""
        groups: dict[Engine, list[int]] = {}
        for at, home in enumerate(self.homes):
            groups.setdefault(home, []).append(at)
        if len(groups) == 1:
            return await self.make_on(self.homes[0])
        asking = []
        for home, some in groups.items():
            fields, arrays = request_for(home, [self.new[at] for at in some])
            asking.append(home.ask(self.making, fields | self.unique.confirming, arrays))
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
            made = {view["id"]: self.homes[at] for at, view in enumerate(views) if view}
            await self.unique.undo(made)
            raise next(iter(self.errors.values()))
        made = {view["id"]: home for view, home in zip(views, self.homes, strict=True)}
        await self.unique.confirm(made, self.index)
        self.begin_prompts(made)
        stages = longest(one.stages for one in results if isinstance(one, EngineReply))
        return reply(self.members.arena, self.call, {"sequences": views}, stages=stages)

    async def make_on(self, engine: Engine) -> RawReply:
        """As `make`, all on one engine, whose reply is forwarded."""
        fields, arrays = request_for(engine, self.new)
        more = self.unique.confirming if self.shared_ids else {}
        try:
            answered, slot = await engine.send(self.making, fields | more, arrays)
        except (ProblemText, AttndError) as error:
            self.errors[engine.tag] = error
            if isinstance(error, AnswerLost) and not more:  # else they expire
                every = zip(self.new, fields["sequences"], strict=True)
                names = [made["id"] for one, made in every if one.id is None]
                run_in_background(self.unique.undo_when_back(engine.tag, names))
            raise
        made: dict[str, Engine] = {one["id"]: engine for one in fields["sequences"]}
        try:
            if self.shared_ids:
                await self.unique.confirm(made, self.shared_ids)
        except BaseException:
            self.members.arena.give_back(slot)
            raise
        self.begin_prompts(made)
        return answered, slot

    def begin_prompts(self, made: Mapping[str, Engine]) -> None:
        """Remembers the new sequences, and whose prompts are computed from now on."""
        for one, (name, home) in zip(self.new, made.items(), strict=True):
            self.locator.learn(self.call, [name], home)
            if one.prefix is not None:
                self.prompts.begin(self.call.tenant.namespace, name, one.prompt)

    # where an attempt has failed

    async def recover(self, outcome: Outcome, error: Exception) -> None:
        """Looks again for ids that were made since the look, and locates parents that have moved;
        else excludes the engines that failed, where others can do their work. Raises `error` where
        none can."""
        if self.has_looked and isinstance(error, SequenceExists):
            await self.look_again(list(self.shared_ids))
            return
        if not self.errors:
            raise error
        unknown = {name for one in self.errors.values() for name in unknown_ids(one)}
        if moved := sorted(unknown & self.parents.keys()):
            await self.calls.find(self.call, moved)
            self.has_looked = False
            return
        failed = self.errors.keys()
        self.excluded |= failed
        bound = {home.tag for home in self.parents.values()}
        may_retry = all(outcome_of(one) in NEXT_ENGINE for one in self.errors.values())
        if bound & failed or not may_retry or not self.placer.candidates(self.excluded):
            await self.check_parents()
            raise error

    async def look_again(self, ids: list[str]) -> None:
        """Prepares another look for chosen ids. Of doors that make one at once each may have found
        another's: the first to try again makes it. Where this call may have made it, at an engine
        whose session has ended, it is not confirmed, and looks as if it moved. Raises
        SequenceMoving."""
        if not self.call.may_retry():
            raise SequenceMoving(ids)
        self.has_looked = False
        await asyncio.sleep(random.uniform(0.0, RETRY_PAUSE_S + self.call.retrying_s))

    async def check_parents(self) -> None:
        """Raises LostSequence for parents that were lost with their engine, NotReady while that may
        come back."""
        by_tag = self.members.by_tag
        lost = {
            one.parent: home.tag
            for one, home in zip(self.new, self.homes, strict=True)
            if one.parent and home.tag in self.errors and home.tag not in by_tag
        }
        tags = set(lost.values())
        await self.members.wait_for_fate(tags)
        self.members.check_reachable(tags)
        if lost:
            raise LostSequence(list(lost))


def request_for(home: Engine, new: list[New]) -> tuple[Fields, dict[str, Array]]:
    """What one home is asked to make. Sequences without an id get one with the home's tag."""
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
