"""What a door has to delete is deleted as well at an engine that falls silent meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.cluster.membership import polling
from service.cluster.membership.engine import Engine
from service.cluster.placement.unique_ids import UniqueIds
from service.operations.sequences import CREATE_SEQUENCES
from service.tenants import OPEN
from tests.cluster.harness import THREE, Cluster

FIRST, SECOND = "engine-0", "engine-1"


async def names_at(cluster: Cluster, name: str) -> list[str]:
    """The engines that have a sequence, or a shard of it, once all of them reply."""
    members = cluster.router.members
    await cluster.until(lambda: not any(one.is_silent for one in members.engines), "replies")
    holders = cluster.router.locator.holders
    return [one.name for one in members.engines if await holders([name], members.tenant, [one])]


@THREE
async def test_a_new_sequence_of_a_taken_id_is_deleted_at_an_engine_that_has_fallen_silent(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {one.name: one for one in cluster.router.members.engines}
    confirm, ask, resumes = UniqueIds.confirm, polling.ask, asyncio.Event()

    async def stalled(engine: Engine, *given: Any, **fields: Any) -> Any:
        if engine.name == FIRST:
            await resumes.wait()
        return await ask(engine, *given, **fields)

    async def late(unique: UniqueIds, *given: Any) -> None:
        """Another door makes the id, and the new sequence's engine falls silent."""
        other, new = engines[SECOND], {"sequences": [{"id": "same"}]}
        await other.ask(other.own(CREATE_SEQUENCES, OPEN), new)
        monkeypatch.setattr(polling, "ask", stalled)
        await cluster.until(lambda: engines[FIRST].is_silent, "silence")
        await confirm(unique, *given)

    monkeypatch.setattr(UniqueIds, "confirm", late)
    cluster.only_on(FIRST)
    reply = await cluster.call("create_sequences", {"sequences": [{"id": "same"}]})
    resumes.set()
    cluster.only_on()
    assert await names_at(cluster, "same") == [SECOND], reply
    await cluster.ok("delete_sequence", {"id": "same"})
