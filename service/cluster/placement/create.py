"""New sequences: placed, named, made on their engines, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine, Told, refusal_in
from service.cluster.placement.inflight_prompts import Wait
from service.cluster.placement.placer import New, news_of, place_one, place_ranks
from service.cluster.routing.replies import each, longest, reply, unknown_in
from service.cluster.routing.tags import made_id, tags_of
from service.doors.kit.problems import ProblemText
from service.errors import (
    AttndError,
    InvalidRequest,
    LostSequence,
    NotReady,
    Overloaded,
    SequenceExists,
)
from service.operations.schema.spec import Prepared
from service.operations.sequences import DELETE_SEQUENCES
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.cluster.routing.router import Router
    from service.cluster.sharded.ranks import Home

ELSEWHERE: Final = frozenset({429, 503, 507})
"""An engine that refuses like this may be passed over for another."""
UNDO_S: Final = 10.0
MAX_NEW: Final = 1000
"""Sequences of a call: as many as one engine's reply may describe (`json_text.MAX_LISTS`)."""
PLACED_AT_ONCE: Final = 128
"""Sequences placed in one pass of the loop: about 5 ms."""


class Failed(Exception):
    """Engines that did not make their sequences, with what each said."""

    def __init__(self, errors: Mapping[str, BaseException]) -> None:
        super().__init__()
        self.errors = errors


async def create(router: Router, call: Call, prepared: Prepared) -> tuple[Answered, Slot]:
    """Make sequences: forks where their parents are, others where their prefix and room are.

    Raises SequenceExists, LostSequence and what engines refuse; then none is made. Other calls have
    their turns while many are placed.
    """
    count = len(prepared.fields.sequences)
    if count > MAX_NEW:
        rule = f"at most {MAX_NEW} in a call to a cluster: send more calls"
        raise InvalidRequest("sequences", f"{count} items", rule)
    new = news_of(call, prepared)
    if any(one.id is not None for one in new):
        router.members.check_all_answer()
    own = {one.id: at for at, one in enumerate(new) if one.id is not None}
    names = [one.parent for one in new if one.parent is not None and one.parent not in own]
    parents = dict(zip(names, await router.homes.of(names, call.tenant), strict=True))
    passed_over: set[str] = set()
    found: set[str] = set()
    while True:
        homes: list[Home] = []
        waits: list[Wait] = []
        for number, one in enumerate(new, 1):
            if number % PLACED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if one.ranks > 1:
                homes.append(place_ranks(router, one, passed_over))
            elif one.parent is None:
                engine, wait = place_one(router, call, one, passed_over)
                homes.append(engine)
                waits += [wait] if wait is not None else []
            elif one.parent in parents:
                homes.append(parents[one.parent])
            else:  # made by this request; one that comes later is refused there
                at = own[one.parent]
                homes.append(homes[at] if at < len(homes) else router.members.idlest())
        await router.prompts.wait(call, waits)
        try:
            return await make(router, call, new, homes)
        except Failed as failed:
            moved = {name for name in unknown_parents(failed) if name in parents} - found
            if moved:
                found |= moved
                await router.homes.find(sorted(moved), call.tenant)  # raises where nobody has them
                parents = dict(zip(names, await router.homes.of(names, call.tenant), strict=True))
                continue
            sharded = {home.tag for home in homes if not isinstance(home, Engine)}
            bound = ({home.tag for home in parents.values()} | sharded) & failed.errors.keys()
            passed_over |= failed.errors.keys()
            open_ = {one.tag for one in router.members.engines if one.takes_new} - passed_over
            if bound or not open_ or not all(map(may_pass_over, failed.errors.values())):
                raise await refusal(router, new, homes, failed) from failed


def unknown_parents(failed: Failed) -> list[str]:
    """The parents that engines did not know: they may have been moved."""
    problems = [e.problem for e in failed.errors.values() if isinstance(e, ProblemText)]
    return [name for one in problems for name in unknown_in(one)]


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
    await keep_if_alone(router, call, new, at_home)
    remember(router, call, new, at_home)
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
        await keep_if_alone(router, call, new, made)
    except BaseException:
        router.give_back(slot)
        raise
    remember(router, call, new, made)
    return answered, slot


def remember(router: Router, call: Call, new: list[New], made: Mapping[str, Home]) -> None:
    """Where sequences are now, and that their prompts are under way."""
    for one, (name, home) in zip(new, made.items(), strict=True):
        router.homes.made(call, [name], home)
        if one.prefix is not None:
            router.prompts.begin(call.tenant.namespace, name, one.underway)


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


async def keep_if_alone(
    router: Router, call: Call, new: list[New], made: Mapping[str, Home]
) -> None:
    """Delete what was made unless no other engine has a sequence of an id that a caller chose.
    Raises SequenceExists, NotReady where an engine does not say."""
    try:
        await check_nowhere_else(router, call, new, made)
    except BaseException:
        await unmake(router, call, made)
        raise


async def check_nowhere_else(
    router: Router, call: Call, new: list[New], made: Mapping[str, Home]
) -> None:
    """No other engine has a sequence of an id that a caller chose.

    Every door looks after it has made, so of two that make the same id at once at least one sees
    the other's. Raises SequenceExists, NotReady.
    """
    chosen = {one.id: made[one.id] for one in new if one.id is not None}
    twice: list[str] = []
    for engine in router.members.engines:
        ids = [name for name, home in chosen.items() if engine.tag not in tags_of(home.tag)]
        if ids:
            twice += await router.homes.there(ids, call.tenant, [engine])
    if twice:
        raise SequenceExists(twice)
    if chosen:
        router.members.check_reachable()


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


async def refusal(
    router: Router, new: list[New], homes: list[Home], failed: Failed
) -> BaseException:
    """What to answer: parents that were lost with their engine, else what the first engine said.
    Raises NotReady where that engine may come back."""
    gone = {
        one.parent: tags_of(engine.tag)
        for one, engine in zip(new, homes, strict=True)
        if one.parent and engine.tag in failed.errors and router.homes.is_torn(engine.tag)
    }
    tags = {tag for some in gone.values() for tag in some}
    await router.members.fate_of(tags)
    router.members.check_reachable(tags)
    return LostSequence(list(gone)) if gone else next(iter(failed.errors.values()))
