"""New sequences: placed, given ids, and made on their engines, all or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.membership.engine import DoorCall, EngineSession, RawReply
from service.cluster.membership.members import Members
from service.cluster.placement.inflight_prompts import InflightPrompt, Wait
from service.cluster.placement.placer import Placer
from service.cluster.placement.prefixes import prefix_of
from service.cluster.routing.ids import new_id
from service.cluster.routing.outcomes import NEXT_ENGINE, outcome_of, unknown_ids
from service.cluster.routing.replies import longest, reply, results_of
from service.cluster.routing.sequence_calls import SequenceCalls
from service.core.keys import Prefix
from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import EngineReply
from service.errors import (
    AttndError,
    DeadlineExceeded,
    LostSequence,
    SequenceExists,
)
from service.operations.schema.spec import Prepared
from service.operations.sequences import DELETE_SEQUENCES
from service.road.caller_end.caller import AnswerLost

PIECE_S: Final = 0.005
"""Seconds of placing in one pass of the loop."""
Fields = dict[str, Any]
Groups = dict[EngineSession, list[int]]
"""The positions of the sequences that each engine is asked to make."""
Errors = dict[EngineSession, Exception]


@dataclass(frozen=True, slots=True)
class New:
    """A sequence to make: its fields as given, and the keys of its prompt's pages."""

    id: str | None
    parent: str | None
    fields: Fields
    prefix: Prefix | None
    arrays: Mapping[str, Array]
    prompt: InflightPrompt = field(default_factory=InflightPrompt)


def new_sequences(call: DoorCall, prepared: Prepared, page_size: int) -> list[New]:
    """The sequences to make, each with its part of the tensors. Raises InvalidRequest."""
    fields = prepared.fields
    arrays = call.arrays(prepared.layout) if prepared.layout.entries else {}
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


class Creation:
    """One `create_sequences`: forks are made where their parents are, chosen ids where the map has
    them, others where the placer says. An engine that fails is excluded from then on."""

    def __init__(
        self, placer: Placer, calls: SequenceCalls, call: DoorCall, prepared: Prepared
    ) -> None:
        self.placer, self.members, self.ids = placer, placer.members, calls.ids
        self.prompts = calls.prompts
        self.call, self.tenant = call, call.tenant
        self.new = new_sequences(call, prepared, self.members.info.page_size)
        self.index = {one.id: at for at, one in enumerate(self.new) if one.id is not None}
        self.parents: dict[str, EngineSession] = {}
        """Engines of the parents that exist already."""
        self.excluded: set[str] = set()

    async def run(self) -> RawReply:
        names = [one.parent for one in self.new if one.parent and one.parent not in self.index]
        if names:
            await self.find(list(dict.fromkeys(names)))
        held = await self.ids.hold(self.tenant, self.index)
        try:
            while True:
                homes, waits = await self.place()
                await self.prompts.wait(self.call, waits)
                groups: Groups = {}
                for at, home in enumerate(homes):
                    groups.setdefault(home, []).append(at)
                errors: Errors = {}
                try:
                    made = await self.make(groups, errors)
                except BaseException:  # cancelled: the engines may make them
                    self.learn(groups)
                    raise
                if made is not None:
                    self.learn(groups)
                    return made
                self.learn({home: groups[home] for home in errors if is_unclear(errors[home])})
                await self.recover(groups, errors)
        finally:
            self.ids.release(held)

    async def find(self, parents: Sequence[str]) -> None:
        """Finds the engines of parents that exist already."""
        places = await self.ids.locate(parents, self.tenant)
        self.parents |= {parents[at]: home for home, some in places.items() for at in some}

    def learn(self, groups: Groups) -> None:
        """These engines have the chosen ids of their groups, or may have them."""
        for home, some in groups.items():
            if chosen := self.chosen(some):
                self.ids.learn(self.tenant, chosen, home.tag)

    def chosen(self, some: Sequence[int]) -> list[str]:
        return [name for at in some if (name := self.new[at].id) is not None]

    async def place(self) -> tuple[list[EngineSession], list[Wait]]:
        """The engine of each, and the prompts to wait for. Raises SequenceExists for a fork's id
        that another engine has than its parent's; NotReady."""
        homes: list[EngineSession] = []
        waits, began = list[Wait](), time.monotonic()
        for one in self.new:
            if time.monotonic() - began > PIECE_S:
                await asyncio.sleep(0)
                began = time.monotonic()
            home = None if one.id is None else self.ids.home_of_new(one.id, self.tenant)
            if one.parent in self.parents:
                parent = self.parents[one.parent]
                if one.id is not None and home is not None and home is not parent:
                    taken = await self.ids.taken(home, [one.id], self.tenant)
                    if taken:
                        raise SequenceExists(taken)
                homes.append(parent)
            elif one.parent is not None:  # made by this call; the engine rejects a later one
                at = self.index[one.parent]
                is_later = at >= len(homes)
                known = self.ids.home(one.parent, self.tenant) if is_later else homes[at]
                homes.append(known or self.members.least_busy())
            elif home is not None and home.tag not in self.excluded:
                homes.append(home)
            else:
                placed = await self.placer.place_sequence(
                    self.tenant.namespace, one.prefix, self.excluded, one.prompt
                )
                homes.append(placed.engine)
                waits += [placed.wait] if placed.wait is not None else []
        return homes, waits

    async def make(self, groups: Groups, errors: Errors) -> RawReply | None:
        """Makes each at its engine; the reply of one engine is forwarded. Returns None after
        `errors`, when the others are deleted again."""
        views: list[Fields] = [{}] * len(self.new)
        requests = {
            home: request_for(home, [self.new[at] for at in some]) for home, some in groups.items()
        }
        if len(groups) == 1:
            ((home, (fields, arrays)),) = requests.items()
            views = fields["sequences"]
            try:
                made = await home.send(self.call, fields, arrays)
            except (ProblemText, AttndError) as error:
                errors[home] = error
                return None
        else:
            asking = [home.ask(self.call, *request) for home, request in requests.items()]
            results = await results_of(asking)
            for (home, some), result in zip(groups.items(), results, strict=True):
                if isinstance(result, EngineReply):
                    for at, view in zip(some, result.fields["sequences"], strict=True):
                        views[at] = view
                elif isinstance(result, Exception):
                    errors[home] = result
                else:
                    raise result
            if errors:
                await asyncio.shield(self.undo(groups, views))
                return None
            stages = longest(one.stages for one in results if isinstance(one, EngineReply))
            made = reply(self.members.arena, self.call, {"sequences": views}, stages=stages)
        for one, view in zip(self.new, views, strict=True):
            if one.prefix is not None:
                self.prompts.begin(self.tenant.namespace, view["id"], one.prompt)
        return made

    async def undo(self, groups: Groups, views: Sequence[Fields]) -> None:
        """Deletes the sequences of a call that has failed at another engine. Raises
        DeadlineExceeded where an engine does not confirm that, and may have them still."""
        tenant = self.members.acting_for(self.tenant)
        for home, some in groups.items():
            if names := [views[at]["id"] for at in some if views[at]]:
                asked = DELETE_SEQUENCES, tenant, {"ids": names}
                (done,) = await results_of([home.question(*asked, is_poll=True)])
                if isinstance(done, Exception):
                    self.learn({home: some})
                    await refuse_unless_dead(self.members, home.tag, done)

    async def recover(self, groups: Groups, errors: Errors) -> None:
        """Finds parents again that were not where they were believed to be; else excludes the
        engines that failed, where others can do their work. Raises the error where none can."""
        unknown = {name for one in errors.values() for name in unknown_ids(one)}
        if gone := sorted(unknown & self.parents.keys()):
            await self.ids.find(gone, self.tenant)
            await self.find(gone)
            return
        error = next(iter(errors.values()))
        for home, why in errors.items():
            if is_unclear(why) and self.chosen(groups[home]):
                await refuse_unless_dead(self.members, home.tag, why)
        self.excluded |= {home.tag for home in errors}
        is_bound = any(home in errors for home in self.parents.values())
        may_retry = all(outcome_of(one) in NEXT_ENGINE for one in errors.values())
        if is_bound or not may_retry or not self.placer.candidates(self.excluded):
            await self.check_parents(errors)
            raise error
        for home in errors:  # an id that an engine has is not made elsewhere
            known = [n for n in self.chosen(groups[home]) if self.ids.home(n, self.tenant) is home]
            if known and await self.ids.taken(home, known, self.tenant):
                raise error

    async def check_parents(self, errors: Errors) -> None:
        """Raises LostSequence for parents that were lost with their engine, NotReady while that may
        come back."""
        by_tag = self.members.by_tag
        lost = {
            name: home.tag
            for name, home in self.parents.items()
            if home in errors and home.tag not in by_tag
        }
        await self.members.wait_for_fate(set(lost.values()))
        self.members.check_reachable(set(lost.values()))
        if lost:
            raise LostSequence(list(lost))


def is_unclear(error: Exception) -> bool:
    """Whether the engine may have done its part."""
    return isinstance(error, AnswerLost)


async def refuse_unless_dead(members: Members, tag: str, error: Exception) -> None:
    """Raises DeadlineExceeded after a lost reply, where the engine may have done its part and have
    it still."""
    await members.wait_for_fate([tag])
    if not members.is_dead(tag):
        text = (
            f"the session with its engine ended during the call; it may have been applied: {error}"
        )
        raise DeadlineExceeded(text) from error


def request_for(home: EngineSession, new: list[New]) -> tuple[Fields, dict[str, Array]]:
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
