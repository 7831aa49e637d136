"""New sequences that a drain moves, or that others make as well, before their door has checked
their ids."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from service.cluster.placement.creation import Creation
from service.cluster.placement.unique_ids import UniqueIds
from tests.cluster.harness import DIM, FLOAT, HEADS, PAGE, THREE, Cluster, another_door
from tests.cluster.placement.test_cluster_imports import brought, exported

SOURCE, SECOND, THIRD = "engine-0", "engine-1", "engine-2"
Before = Callable[[], Awaitable[None]]


def before_the_check(monkeypatch: pytest.MonkeyPatch, work: Before) -> None:
    """Does work when the next sequences have been made and are not yet checked."""
    confirm, has_run = UniqueIds.confirm, False

    async def late(unique: UniqueIds, made: Any, chosen: Any) -> None:
        nonlocal has_run
        if not has_run:
            has_run = True
            await work()
        await confirm(unique, made, chosen)

    monkeypatch.setattr(UniqueIds, "confirm", late)


async def move(door: Cluster, to: str, source: str = SOURCE) -> None:
    """Moves all sequences of an engine to another one."""
    door.only_on(source, to)
    await door.drain(source)
    await door.drained(source)
    await door.end_drain(source)
    door.only_on()


async def holders(door: Cluster, name: str) -> list[str]:
    members = door.router.members
    locator = door.router.locator
    tenant = members.tenant
    found = [one.name for one in members.engines if await locator.holders([name], tenant, [one])]
    return sorted(found)


@THREE
async def test_a_sequence_that_a_drain_moves_before_its_door_has_checked_its_id_is_made_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with another_door(cluster) as second:
        before_the_check(monkeypatch, lambda: move(second, SECOND))
        cluster.only_on(SOURCE)
        made = await cluster.call("create_sequences", {"sequences": [{"id": "new"}, {"id": "b"}]})
        cluster.only_on()
        assert made.status == 201, made
        assert await holders(cluster, "new") == await holders(cluster, "b") == [SECOND]
        assert cluster.home("new") == SECOND
        row = np.zeros((1, HEADS, DIM), FLOAT)
        await cluster.ok("append", {"layer": 0, "sequences": ["new"]}, k=row, v=row)


@THREE
async def test_of_two_equal_ids_of_which_a_drain_moves_one_one_is_left(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with another_door(cluster) as second:
        other: list[int] = []

        async def rival() -> None:
            second.only_on(SECOND)
            made = await second.call("create_sequences", {"sequences": [{"id": "same"}]})
            other.append(made.status)
            await move(second, THIRD)

        before_the_check(monkeypatch, rival)
        cluster.only_on(SOURCE)
        monkeypatch.setattr(UniqueIds, "refuse_taken", lambda *_: asyncio.sleep(0))
        made = await cluster.call("create_sequences", {"sequences": [{"id": "same"}]})
        cluster.only_on()
        assert sorted([made.status, *other]) == [201, 409]
        assert len(await holders(cluster, "same")) == 1


@THREE
async def test_a_failed_call_lists_the_sequences_it_made_and_a_drain_moved(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.only_on(SECOND)
    await cluster.ok("create_sequences", {"sequences": [{"id": "parent"}]})
    cluster.only_on(SOURCE)
    undo, has_moved = UniqueIds.undo, []

    async def late(unique: UniqueIds, made: Any) -> list[str]:
        if made and not has_moved:
            has_moved.append(made)
            cluster.only_on()
            await asyncio.create_task(move(cluster, THIRD))
        return await undo(unique, made)

    monkeypatch.setattr(UniqueIds, "undo", late)
    new = [{"id": "one"}, {}, {"id": "two", "parent": "parent", "length": 99}]
    refused = await cluster.call("create_sequences", {"sequences": new})
    assert refused.status == 422 and has_moved
    assert "one" in refused.fields["done"] and len(refused.fields["done"]) == 2
    assert sorted(await cluster.ids()) == sorted(["parent", *refused.fields["done"]])


@THREE
async def test_an_import_and_a_new_sequence_of_one_id_are_not_both_made(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = await cluster.create(1)
    row = np.ones((PAGE, HEADS, DIM), FLOAT)
    fields = {"layer": 0, "sequences": [name], "append_indptr": [0, PAGE]}
    await cluster.ok("append", fields, k=row, v=row)
    head, parts = await exported(cluster, name)
    cluster.only_on(SOURCE)
    begin = {key: head.fields[key] for key in ("header", "digest")}
    await cluster.ok("import_sequence", {"id": "new"} | begin)
    async with another_door(cluster) as second:
        second.only_on(SECOND)
        await second.ok("create_sequences", {"sequences": [{"id": "new"}]})
    await brought(cluster, "new", parts)
    end = {"id": "new", "digest": parts[-1].fields["digest"]}
    refused = await cluster.call("import_sequence", end)
    cluster.only_on()
    assert (refused.status, refused.fields["code"]) == (409, "sequence_exists")
    assert await holders(cluster, "new") == [SECOND]


@THREE
async def test_what_others_made_under_the_same_id_meanwhile_is_not_undone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = UniqueIds.undo

    async def late(unique: UniqueIds, made: Any) -> list[str]:
        async with another_door(cluster) as second:
            await second.ok("delete_sequence", {"id": "one"})
            second.only_on(THIRD)
            await second.ok("create_sequences", {"sequences": [{"id": "one"}]})
        return await undo(unique, made)

    cluster.only_on(SECOND)
    await cluster.ok("create_sequences", {"sequences": [{"id": "parent"}]})
    cluster.only_on(SOURCE)
    monkeypatch.setattr(UniqueIds, "undo", late)
    new = [{"id": "one"}, {"id": "two", "parent": "parent", "length": 99}]
    refused = await cluster.call("create_sequences", {"sequences": new})
    cluster.only_on()
    assert refused.status == 422
    assert await holders(cluster, "one") == [THIRD]


@THREE
async def test_a_change_whose_session_ended_is_not_to_be_repeated(cluster: Cluster) -> None:
    """The engine lives and comes back: the append may have been applied."""
    await cluster.ok("create_sequences", {"sequences": [{"id": "here"}]})
    (engine,) = [one for one in cluster.router.members.engines if one.name == cluster.home("here")]
    row = np.zeros((1, HEADS, DIM), FLOAT)
    fields = {"layer": 0, "sequences": ["here"]}
    appending = asyncio.create_task(cluster.call("append", fields, k=row, v=row))
    while engine.link.caller is None or not engine.link.caller.pending:
        await asyncio.sleep(0)
    engine.link.caller.lose("the connection broke")
    reply = await appending
    assert (reply.status, reply.fields["code"]) == (504, "deadline_exceeded")
    assert "may have been applied" in reply.fields["detail"]
    await cluster.until(lambda: len(cluster.router.members.engines) == 3, "all engines")
    assert (await cluster.fields("get_sequence", {"id": "here"}))["lengths"][0] in (0, 1)


@THREE
async def test_a_fork_is_made_although_its_parent_moves_twice_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.only_on(SOURCE)
    await cluster.ok("create_sequences", {"sequences": [{"id": "parent"}]})
    cluster.only_on()
    make, moves = Creation.make, [(SECOND, SOURCE), (THIRD, SECOND)]
    async with another_door(cluster) as second:

        async def late(creation: Creation) -> Any:
            if moves:
                await move(second, *moves.pop(0))
            return await make(creation)

        monkeypatch.setattr(Creation, "make", late)
        new = [{"id": "fork", "parent": "parent"}]
        made = await cluster.call("create_sequences", {"sequences": new})
        assert made.status == 201, made
        assert await holders(cluster, "fork") == await holders(cluster, "parent") == [THIRD]
