"""A sharded sequence is deleted at all of its engines, or at none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attnd.wire.dtypes import Array

from service.cluster.membership.engine import ASK_S, Call, Engine, EngineReply
from service.cluster.routing.replies import longest, results_of
from service.cluster.sharded.epochs import (
    ShardedSequence,
    Stale,
    all_of,
    is_stale,
    retried,
)
from service.doors.kit.problems import ProblemText
from service.operations.internal import HAND_OVER
from service.operations.sequences import DELETE_SEQUENCES, GET_SEQUENCE
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.sharded.ranks import Ranks


async def delete(
    ranks: Ranks, call: Call, fields: dict[str, Any], _: Mapping[str, Array]
) -> EngineReply:
    """Marks all shards first: then none is moving to another engine."""

    async def attempt(sequences: list[ShardedSequence], _: bool) -> EngineReply:
        (one,) = sequences
        replies = await asyncio.shield(delete_marked(ranks, one))
        if not any(map(is_stale, replies)):
            for error in replies:  # an engine may have got another shard of it meanwhile
                match error:
                    case ProblemText(problem={"code": "unknown_sequence"}):
                        raise error
                    case ProblemText(problem={"code": "invalid_request", "field": "id"}):
                        raise Stale
        stages = longest(reply.stages for reply in all_of(replies))
        ranks.forget(call, [one.id])
        return EngineReply({}, {}, stages)

    return await retried(ranks, call, [fields["id"]], attempt)


async def delete_marked(ranks: Ranks, one: ShardedSequence) -> list[EngineReply | BaseException]:
    """Mark the shards at all ranks, and delete them; or take the marks back where one refuses."""
    count = len(ranks.engines)
    mark = {"id": one.id, "state": "leaving", "epoch": one.epoch, "for_s": ASK_S}
    marking = [
        engine.question(HAND_OVER, one.tenant, mark | {"shard": {"rank": rank, "ranks": count}})
        for rank, engine in enumerate(ranks.engines)
    ]
    replies = await results_of(marking)
    marked = [
        engine
        for engine, reply in zip(ranks.engines, replies, strict=True)
        if isinstance(reply, EngineReply)
    ]
    if len(marked) == count:
        return await results_of([delete_one(engine, one) for engine in marked])
    back = HAND_OVER, one.tenant, {"id": one.id, "state": "back"}
    await results_of([engine.question(*back) for engine in marked])
    return replies


async def delete_one(engine: Engine, one: ShardedSequence) -> EngineReply:
    """Delete a marked shard, also if the mark has expired, and at an engine that has fallen silent
    since: all or none."""
    gone = {"id": one.id, "state": "gone"}
    with suppress(ProblemText):
        return await engine.question(HAND_OVER, one.tenant, gone, is_poll=True)
    return await engine.question(DELETE_SEQUENCES, one.tenant, {"ids": [one.id]}, is_poll=True)


async def delete_shards(
    shards: Mapping[Engine, Mapping[str, Any]], tenant: Tenant, name: str
) -> None:
    """Has engines that can be called delete these shards of a sequence; not one that is moving, or
    that has changed since."""
    ready = [engine for engine in shards if engine.is_ready]
    await results_of([delete_shard(engine, shards[engine], tenant, name) for engine in ready])


async def delete_shard(engine: Engine, shard: Mapping[str, Any], tenant: Tenant, name: str) -> None:
    view = await engine.question(GET_SEQUENCE, tenant, {"id": name})
    if view.fields.get("shard") == shard:
        await engine.question(DELETE_SEQUENCES, tenant, {"ids": [name]})
