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


def without_the_first_looks(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
    """The next calls find no id taken before they make their sequences."""
    refuse_taken = UniqueIds.refuse_taken

    async def late(unique: UniqueIds, ids: Any) -> None:
        nonlocal count
        count -= 1
        if count < 0:
            await refuse_taken(unique, ids)

    monkeypatch.setattr(UniqueIds, "refuse_taken", late)


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
@pytest.mark.long
async def test_a_drain_moves_a_new_sequence_once_its_door_has_checked_its_id(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with another_door(cluster) as second:
        moving: list[asyncio.Task[None]] = []

        async def begin_move() -> None:
            moving.append(asyncio.create_task(move(second, SECOND)))
            await asyncio.sleep(0.3)
            assert await holders(cluster, "new") == [SOURCE]

        before_the_check(monkeypatch, begin_move)
        cluster.only_on(SOURCE)
        made = await cluster.call("create_sequences", {"sequences": [{"id": "new"}, {"id": "b"}]})
        cluster.only_on()
        assert made.status == 201, made
        await moving[0]
        assert await holders(cluster, "new") == await holders(cluster, "b") == [SECOND]
        row = np.zeros((1, HEADS, DIM), FLOAT)
        await cluster.ok("append", {"layer": 0, "sequences": ["new"]}, k=row, v=row)


@THREE
async def test_of_two_equal_ids_that_are_made_at_once_one_is_left(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with another_door(cluster) as second:
        other: list[asyncio.Task[Any]] = []

        async def rival() -> None:
            second.only_on(SECOND)
            new = {"sequences": [{"id": "same"}]}
            other.append(asyncio.create_task(second.call("create_sequences", new)))
            await asyncio.sleep(0.3)

        before_the_check(monkeypatch, rival)
        cluster.only_on(SOURCE)
        without_the_first_looks(monkeypatch, 2)
        made = await cluster.call("create_sequences", {"sequences": [{"id": "same"}]})
        cluster.only_on()
        assert (made.status, (await other[0]).status) == (201, 409)
        assert len(await holders(cluster, "same")) == 1


@THREE
async def test_of_two_doors_that_find_each_others_new_sequence_one_makes_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirm, both, num_confirmed = UniqueIds.confirm, asyncio.Barrier(2), 0

    async def at_once(unique: UniqueIds, made: Any, chosen: Any) -> None:
        nonlocal num_confirmed
        num_confirmed += 1
        if num_confirmed <= 2:
            await both.wait()
        await confirm(unique, made, chosen)

    without_the_first_looks(monkeypatch, 2)
    monkeypatch.setattr(UniqueIds, "confirm", at_once)
    async with another_door(cluster) as second:
        cluster.only_on(SOURCE)
        second.only_on(SECOND)
        new = {"sequences": [{"id": "same"}]}
        made = await asyncio.gather(
            *(one.call("create_sequences", new) for one in (cluster, second))
        )
        cluster.only_on()
        assert sorted(one.status for one in made) == [201, 409]
        assert len(await holders(cluster, "same")) == 1


@THREE
@pytest.mark.parametrize("name", ["append", "delete_sequence"])
async def test_calls_for_an_id_that_a_door_makes_a_second_time_are_for_the_first(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also through a door that believes the sequence to be where the second one is made."""
    row = np.zeros((1, HEADS, DIM), FLOAT)
    asked: dict[str, Any] = {"layer": 0, "sequences": ["same"]}
    given = (asked, {"k": row, "v": row}) if name == "append" else ({"id": "same"}, {})
    async with another_door(cluster) as second:
        calls: list[asyncio.Task[Any]] = []

        async def call() -> None:
            (source,) = [one for one in second.router.members.engines if one.name == SOURCE]
            second.router.locator.tags.learn(("default", "same"), source.tag)
            calls.append(asyncio.create_task(second.call(name, given[0], **given[1])))
            await asyncio.sleep(0.2)

        second.only_on(SECOND)
        await second.ok("create_sequences", {"sequences": [{"id": "same"}]})
        before_the_check(monkeypatch, call)
        without_the_first_looks(monkeypatch)
        cluster.only_on(SOURCE)
        made = await cluster.call("create_sequences", {"sequences": [{"id": "same"}]})
        cluster.only_on()
        assert (await calls[0]).status // 100 == 2
        left = await cluster.call("get_sequence", {"id": "same"})
        if name == "append":
            assert (made.status, left.fields["lengths"][0]) == (409, 1)
        else:  # the second look comes before or after the deletion
            assert (made.status, left.status) in [(409, 404), (201, 200)]


@THREE
async def test_a_failed_call_makes_nothing_also_while_a_drain_moves(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.only_on(SECOND)
    await cluster.ok("create_sequences", {"sequences": [{"id": "parent"}]})
    cluster.only_on(SOURCE)
    undo, moving = UniqueIds.undo, list[asyncio.Task[None]]()

    async def late(unique: UniqueIds, made: Any) -> None:
        if made and not moving:
            cluster.only_on()
            moving.append(asyncio.create_task(move(cluster, THIRD)))
            await asyncio.sleep(0.3)
        await undo(unique, made)

    monkeypatch.setattr(UniqueIds, "undo", late)
    new = [{"id": "one"}, {}, {"id": "two", "parent": "parent", "length": 99}]
    refused = await cluster.call("create_sequences", {"sequences": new})
    assert refused.status == 422 and moving and "done" not in refused.fields
    await moving[0]
    assert await cluster.ids() == ["parent"]


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
async def test_no_other_call_is_for_a_new_sequence_that_its_door_deletes_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo, seen = UniqueIds.undo, list[tuple[int, str]]()

    async def late(unique: UniqueIds, made: Any) -> None:
        async with another_door(cluster) as second:
            for name, fields in (
                ("get_sequence", {"id": "one"}),
                ("delete_sequence", {"id": "one"}),
                ("create_sequences", {"sequences": [{"id": "one"}]}),
            ):
                answer = await second.call(name, fields)
                seen.append((answer.status, answer.fields["code"]))
        await undo(unique, made)

    cluster.only_on(SECOND)
    await cluster.ok("create_sequences", {"sequences": [{"id": "parent"}]})
    cluster.only_on(SOURCE)
    monkeypatch.setattr(UniqueIds, "undo", late)
    new = [{"id": "one"}, {"id": "two", "parent": "parent", "length": 99}]
    refused = await cluster.call("create_sequences", {"sequences": new})
    assert refused.status == 422
    assert seen == [(503, "sequence_moving")] * 3
    await cluster.ok("create_sequences", {"sequences": [{"id": "one"}]})


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
