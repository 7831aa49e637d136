"""A sequence over several engines is deleted at all of them, or at none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine, Told
from service.cluster.routing.replies import each, longest, unknown_in
from service.cluster.sharded.epochs import MEND_S, TRIES, Dealt, ask_anew, is_stale, know, pause
from service.doors.kit.problems import ProblemText
from service.errors import SequenceTaken
from service.operations.internal import HAND_OVER
from service.operations.sequences import DELETE_SEQUENCES, GET_SEQUENCE
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.sharded.ranks import Ranks


async def delete(ranks: Ranks, call: Call, fields: dict[str, Any], _: Mapping[str, Array]) -> Told:
    """No part goes before all are held: then none is on its way to another engine."""
    async with ranks.held(call, [fields["id"]]) as (one,):
        for number in range(TRIES):
            await pause(number)
            await know(ranks, [one], to_change=False)
            told = await asyncio.shield(delete_held(ranks, one))
            if any(map(is_stale, told)):
                ask_anew([one])
                continue
            for refused in told:  # an engine may have got another part of it for its own
                if isinstance(refused, ProblemText) and unknown_in(refused.problem):
                    raise refused
            whole = ranks.whole(told)
            ranks.forget(call, [one.id])
            return Told({}, {}, longest(answer.stages for answer in whole))
    raise SequenceTaken({one.id: one.epoch})


async def delete_held(ranks: Ranks, one: Dealt) -> Sequence[Told | BaseException]:
    """What the ranks say to holding their parts, where one refuses; else to deleting them."""
    call, count = ranks.own(HAND_OVER, one.tenant, MEND_S), len(ranks.engines)
    leaving = {"id": one.id, "state": "leaving", "epoch": one.epoch, "for_s": MEND_S}
    shards = [{"rank": rank, "ranks": count} for rank in range(count)]
    both = zip(ranks.engines, shards, strict=True)
    told = await each([engine.ask(call, leaving | {"shard": shard}) for engine, shard in both])
    held = [engine for engine, at in zip(ranks.engines, told, strict=True) if isinstance(at, Told)]
    if len(held) == count:
        return await each([let_go(engine, one, call) for engine in held])
    await each([engine.ask(call, {"id": one.id, "state": "back"}) for engine in held])
    return told


async def let_go(engine: Engine, one: Dealt, call: Call) -> Told:
    """Delete a part that is held, or has been for too long."""
    with suppress(ProblemText):
        return await engine.ask(call, {"id": one.id, "state": "gone"})
    asked = engine.own(DELETE_SEQUENCES, one.tenant, MEND_S)
    return await engine.ask(asked, {"ids": [one.id]})


async def delete_shards(engines: Sequence[Engine], tenant: Tenant, name: str) -> None:
    """Have the engines that can be called delete their shards of a sequence; a whole sequence of
    that name stays."""
    ready = [engine for engine in engines if engine.is_ready]
    await each([delete_shard(engine, tenant, name) for engine in ready])


async def delete_shard(engine: Engine, tenant: Tenant, name: str) -> None:
    with suppress(ProblemText):
        reply = await engine.ask(engine.own(GET_SEQUENCE, tenant, MEND_S), {"id": name})
        if "shard" in reply.fields:
            await engine.ask(engine.own(DELETE_SEQUENCES, tenant, MEND_S), {"ids": [name]})


async def delete_made(
    ranks: Ranks, call: Call, fields: dict[str, Any], _: Mapping[str, Array]
) -> Told:
    """What was made a moment ago: at every rank, also where one refuses."""
    told = await ranks.told_by_all(call, fields)
    ranks.forget(call, fields["ids"])
    return ranks.whole(told)[0]
