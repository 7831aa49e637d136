"""New sequences: placed, named, made on their engines, all or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice, tee
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from service.cluster.answering import each, longest, reply, unknown_in
from service.cluster.engine import Call, Engine, Told, refusal_in
from service.cluster.names import BETWEEN, made_id, tags_of
from service.cluster.placement import choose
from service.cluster.prefixes import chained_keys
from service.cluster.ranks import Home, Ranks
from service.core.keys import Prefix, as_keys
from service.doors.problems import ProblemText
from service.errors import (
    AttndError,
    InvalidRequest,
    LostSequence,
    NotReady,
    Overloaded,
    SequenceExists,
)
from service.image.dtypes import Array
from service.operations.sequences import DELETE_SEQUENCES
from service.operations.spec import Prepared
from service.road.caller import Answered
from service.road.slots import Slot

if TYPE_CHECKING:
    from service.cluster.router import Router

ELSEWHERE: Final = frozenset({429, 503, 507})
"""An engine that refuses like this may be passed over for another."""
UNDO_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class New:
    """One sequence to make: its fields as they were given, and its names of pages."""

    fields: dict[str, Any]
    prefix: Prefix | None
    arrays: dict[str, Array]

    @property
    def id(self) -> str | None:
        name: str | None = self.fields.get("id")
        return name

    @property
    def ranks(self) -> int:
        """Over how many engines its pages are dealt out."""
        return self.fields.get("ranks") or 1

    @property
    def parent(self) -> str | None:
        name: str | None = self.fields.get("parent")
        return name


class Failed(Exception):
    """Engines that did not make their sequences, with what each said."""

    def __init__(self, errors: Mapping[str, BaseException]) -> None:
        super().__init__()
        self.errors = errors


async def create(router: Router, call: Call, prepared: Prepared) -> tuple[Answered, Slot]:
    """Make sequences: forks where their parents are, others where their prefix and room are.

    Raises SequenceExists, LostSequence and what engines refuse; then none is made.
    """
    new = news_of(call, prepared)
    own = {one.id: at for at, one in enumerate(new) if one.id is not None}
    names = [one.parent for one in new if one.parent is not None and one.parent not in own]
    parents = dict(zip(names, await router.homes.of(names, call.tenant), strict=True))
    passed_over: set[str] = set()
    found: set[str] = set()
    while True:
        homes: list[Home] = []
        for one in new:
            if one.ranks > 1:
                homes.append(place_ranks(router, one, passed_over))
            elif one.parent is None:
                homes.append(place_one(router, call, one, passed_over))
            elif one.parent in parents:
                homes.append(parents[one.parent])
            else:  # made by this request; one that comes later is refused there
                at = own[one.parent]
                homes.append(homes[at] if at < len(homes) else router.members.idlest())
        try:
            return await make(router, call, new, homes)
        except Failed as failed:
            moved = {name for name in unknown_parents(failed) if name in parents} - found
            if moved:
                found |= moved
                await router.homes.find(sorted(moved), call.tenant)  # raises where nobody has them
                parents = dict(zip(names, await router.homes.of(names, call.tenant), strict=True))
                continue
            dealt = {home.tag for home in homes if isinstance(home, Ranks)}
            bound = ({home.tag for home in parents.values()} | dealt) & failed.errors.keys()
            passed_over |= failed.errors.keys()
            open_ = {one.tag for one in router.members.engines if one.takes_new} - passed_over
            if bound or not open_ or not all(map(may_pass_over, failed.errors.values())):
                raise refusal(router, new, homes, failed) from failed


def unknown_parents(failed: Failed) -> list[str]:
    """The parents that engines did not know: they may have been moved."""
    problems = [e.problem for e in failed.errors.values() if isinstance(e, ProblemText)]
    return [name for one in problems for name in unknown_in(one)]


def news_of(call: Call, prepared: Prepared) -> list[New]:
    """The sequences to make; each has its own part of a tensor of page names."""
    fields = prepared.fields
    arrays = call.arrays(prepared.layout)
    sums, found = fields.prefix_indptr, []
    for index, one in enumerate(fields.sequences):
        given = one.model_dump(exclude_unset=True)
        if one.shard is not None:
            rule = "a cluster deals pages out by itself: give ranks instead"
            raise InvalidRequest(f"sequences.{index}.shard", given["shard"], rule)
        rows: dict[str, Array] = {}
        if one.prefix is not None:
            span = slice(None) if sums is None else slice(sums[index], sums[index + 1])
            rows = {name: array[span] for name, array in arrays.items()}
        found.append(New(given, prefix_of(one.prefix, rows), rows))
    return found


def prefix_of(named: Any, rows: Mapping[str, Array]) -> Prefix | None:
    if named is None:
        return None
    ids = rows.get("token_ids", named.ids_array)
    keys = rows.get("page_keys", named.keys_array)
    raw = None if keys is None else as_keys(np.ascontiguousarray(keys).tobytes())
    return Prefix(ids, raw, named.cache_salt)


def place_one(router: Router, call: Call, new: New, passed_over: Collection[str]) -> Engine:
    """The engine for a sequence without a parent; one that is known to exist goes where it is, to
    be refused there. Raises NotReady."""
    if new.id is not None:
        tag = router.homes.names.tag((call.tenant.namespace, new.id))
        known = router.members.by_tag.get(tag or "")
        if known is not None and known.tag not in passed_over:
            return known
    needed = 1
    if new.prefix is not None:
        needed = max(new.prefix.num_pages(router.members.info.page_size), 1)
    chosen, there = place_pages(router, call, new.prefix, needed, passed_over)
    chosen.give(there, needed)
    return chosen


def place_pages(
    router: Router, call: Call, prefix: Prefix | None, needed: int, passed_over: Collection[str]
) -> tuple[Engine, int]:
    """The engine for so many pages, of which the first have the prefix's names; and how many of
    those it has already. Raises NotReady."""
    members = router.members
    among = {
        one.tag: one for one in members.engines if one.takes_new and one.tag not in passed_over
    }
    if not among:
        return members.idlest(), 0
    loads = {tag: one.load_now for tag, one in among.items()}
    if prefix is None:
        chosen, there = among[choose(loads, {}, needed)], 0
    else:
        space, now = call.tenant.namespace, time.monotonic()
        known = members.prefixes_of(space)
        keys, again = tee(chained_keys(prefix, space, members.info.page_size))
        matched = known.matched(keys, now)
        chosen = among[choose(loads, matched, needed)]
        there = matched.get(chosen.tag, 0)
        known.expect(chosen.tag, islice(again, there, None), now)
    chosen.promised += max(needed - there, 1)
    return chosen, there


def place_ranks(router: Router, new: New, passed_over: Collection[str]) -> Home:
    """The engines with the most room, as many as wanted. Raises InvalidRequest where there are not
    so many, NotReady."""
    members = router.members
    there = [one for one in members.engines if one.takes_new]
    if new.ranks > len(there):
        rule = f"must be at most {len(there)}, the engines that there are"
        raise InvalidRequest("ranks", new.ranks, rule)
    there.sort(key=lambda one: (one.tag in passed_over, -one.load_now.room, one.name))
    chosen = there[: new.ranks]
    for engine in chosen:
        engine.promised += 1
    home = members.home(BETWEEN.join(engine.tag for engine in chosen))
    if home is None:
        raise RuntimeError("an engine went while nobody waited: this is a bug")
    return home


async def make(
    router: Router, call: Call, new: list[New], homes: list[Home]
) -> tuple[Answered, Slot]:
    """Make each at its engine. Raises Failed, SequenceExists; then none is made."""
    groups: dict[Home, list[int]] = {}
    for at, engine in enumerate(homes):
        groups.setdefault(engine, []).append(at)
    if len(groups) == 1 and isinstance(homes[0], Engine):
        return await make_at_one(router, call, new, homes[0])
    asked = {
        engine: fields_for(engine, [new[at] for at in some]) for engine, some in groups.items()
    }
    told = await each([engine.ask(call, *given) for engine, given in asked.items()])
    made: list[dict[str, Any]] = [{}] * len(new)
    errors: dict[str, BaseException] = {}
    for (engine, some), one in zip(groups.items(), told, strict=True):
        if isinstance(one, Told):
            for at, view in zip(some, one.fields["sequences"], strict=True):
                made[at] = view
        else:
            errors[engine.tag] = one
    if errors:
        await unmake(router, call, {view["id"]: homes[at] for at, view in enumerate(made) if view})
        raise Failed(errors)
    at_home = {view["id"]: engine for view, engine in zip(made, homes, strict=True)}
    await check_nowhere_else(router, call, new, at_home)
    for name, engine in at_home.items():
        router.homes.made(call, [name], engine)
    stages = longest(one.stages for one in told if isinstance(one, Told))
    return reply(router.arena, call, {"sequences": made}, stages=stages)


async def make_at_one(
    router: Router, call: Call, new: list[New], engine: Engine
) -> tuple[Answered, Slot]:
    """As `make`; the engine's answer is that of all."""
    fields, arrays = fields_for(engine, new)
    try:
        answered, slot = await engine.send(call, fields, arrays)
    except AttndError as error:
        raise Failed({engine.tag: error}) from error
    if answered.status >= 400:
        router.give_back(slot)
        raise Failed({engine.tag: refusal_in(answered)})
    made = {one["id"]: engine for one in fields["sequences"]}
    try:
        await check_nowhere_else(router, call, new, made)
    except BaseException:
        router.give_back(slot)
        raise
    router.homes.made(call, made, engine)
    return answered, slot


def fields_for(engine: Home, new: list[New]) -> tuple[dict[str, Any], dict[str, Array]]:
    """What one engine is asked to make; those without an id get one that tells the engine."""
    fields: dict[str, Any] = {
        "sequences": [one.fields | {"id": one.id or made_id(engine.tag)} for one in new]
    }
    names = {name for one in new for name in one.arrays}
    arrays: dict[str, Array] = {}
    for name in names:
        parts = [one.arrays[name] for one in new if name in one.arrays]
        arrays[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if arrays and len(new) > 1:
        counts = [max((len(rows) for rows in one.arrays.values()), default=0) for one in new]
        fields["prefix_indptr"] = [0, *np.cumsum(counts).tolist()]
    return fields, arrays


async def check_nowhere_else(
    router: Router, call: Call, new: list[New], made: Mapping[str, Home]
) -> None:
    """No other engine has a sequence of an id that a caller chose; else those made are unmade.

    Every door looks after it has made, so of two that make the same id at once at least one sees
    the other's. Raises SequenceExists.
    """
    chosen = {one.id: made[one.id] for one in new if one.id is not None}
    twice: list[str] = []
    for engine in router.members.engines:
        ids = [name for name, home in chosen.items() if engine.tag not in tags_of(home.tag)]
        if ids:
            twice += await router.homes.there(ids, call.tenant, [engine])
    if twice:
        await unmake(router, call, made)
        raise SequenceExists(twice)


async def unmake(router: Router, call: Call, homes: Mapping[str, Home]) -> None:
    """Delete sequences that were made a moment ago."""
    by_engine: dict[Home, list[str]] = {}
    for name, engine in homes.items():
        by_engine.setdefault(engine, []).append(name)
    deleting = [
        engine.ask(engine.own(DELETE_SEQUENCES, call.tenant, UNDO_S), {"ids": ids})
        for engine, ids in by_engine.items()
    ]
    await asyncio.shield(each(deleting))


def may_pass_over(error: BaseException) -> bool:
    """Whether another engine may do what this one did not."""
    if isinstance(error, ProblemText):
        return error.problem["status"] in ELSEWHERE
    return isinstance(error, NotReady | Overloaded)


def refusal(router: Router, new: list[New], homes: list[Home], failed: Failed) -> BaseException:
    """What to answer: parents that were lost with their engine, else what the first engine said."""
    gone = [
        one.parent
        for one, engine in zip(new, homes, strict=True)
        if one.parent and engine.tag in failed.errors and router.homes.is_torn(engine.tag)
    ]
    return LostSequence(gone) if gone else next(iter(failed.errors.values()))
