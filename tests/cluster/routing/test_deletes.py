"""Bulk deletes while sequences move: each is deleted as a whole, or stays whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from service.cluster.membership import engine as engines_of
from service.cluster.membership.engine import Call, EngineReply
from service.cluster.membership.members import Members
from service.cluster.migration import ownership
from service.cluster.routing import deletes
from tests.cluster.checked_calls import Book
from tests.cluster.harness import PAGE, THREE, Cluster, another_door
from tests.cluster.migration.test_drain import SOURCE, emptied

TARGET = "engine-2"
Ask = Callable[..., Awaitable[EngineReply]]
NONE_LEFT = {"sequences": [], "next": None}


async def create_on_source(cluster: Cluster, book: Book, name: str, length: int) -> None:
    """A sequence on the engine that will be drained."""
    cluster.only_on(SOURCE)
    await book.create(name)
    await book.append(name, length)
    cluster.only_on()


async def moved(cluster: Cluster) -> None:
    """Drains the engine; then it accepts new sequences again."""
    await cluster.drain(SOURCE)
    await emptied(cluster)
    await cluster.drained(SOURCE)
    await cluster.end_drain(SOURCE)


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, state: str, then: Callable[[], Awaitable[None]]
) -> None:
    """Runs `then` once, when a moving sequence has reached a state."""
    left, set_state = [then], ownership.set_state

    async def hand(source: Any, tenant: Any, sequence: str, now: str, **given: Any) -> None:
        await set_state(source, tenant, sequence, now, **given)
        if now == state and left:
            await left.pop()()

    monkeypatch.setattr(ownership, "set_state", hand)


@THREE
@pytest.mark.parametrize("how", ["ids", "prefix", "path"])
async def test_a_sequence_that_moves_for_too_long_is_not_deleted_and_stays_whole(
    cluster: Cluster, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bulk delete deletes the others, and the same call again deletes the rest."""
    asked: tuple[str, dict[str, Any]] = {
        "ids": ("delete_sequences", {"ids": ["a", "b", "c"]}),
        "prefix": ("delete_sequences", {"prefix": ""}),
        "path": ("delete_sequence", {"id": "a"}),
    }[how]
    async with another_door(cluster) as second:
        book, answers = Book(cluster), []
        cluster.only_on(TARGET)
        await book.create("b")
        await create_on_source(cluster, book, "a", 5 * PAGE + 1)
        await create_on_source(cluster, book, "c", 5 * PAGE + 1)

        async def delete() -> None:
            monkeypatch.setattr(engines_of, "RETRY_BUDGET_S", 1.0)
            answers.append(await second.call(*asked))
            monkeypatch.setattr(engines_of, "RETRY_BUDGET_S", 10.0)

        await second.ok("get_sequence", {"id": "a"})
        meanwhile(monkeypatch, "leaving", delete)
        await moved(cluster)
        (reply,) = answers
        left = "a" if how == "path" else reply.fields["sequences"][0]
        assert (reply.status, reply.fields["code"]) == (503, "sequence_moving"), reply
        listed = (await cluster.fields("list_sequences", {"limit": 9}))["sequences"]
        assert [one["id"] for one in listed] == (["a", "b", "c"] if how == "path" else [left])
        for door in (cluster, second):
            await Book(door, held=book.held).check(left)
        await book.attend([left], [1], 0, appends=True)
        again = await second.ok(*asked)
        assert how == "path" or again.fields == {"num_deleted": 1}


@THREE
@pytest.mark.parametrize("how", [{"ids": ["a"]}, {"prefix": "a"}])
async def test_a_sequence_that_moves_to_an_engine_asked_before_is_deleted_there(
    cluster: Cluster, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with another_door(cluster) as second:
        book, is_moved = Book(cluster), asyncio.Event()
        await create_on_source(cluster, book, "a", 5 * PAGE + 1)
        for engine in cluster.router.members.engines:  # it is moved there
            engine.is_leaving = engine.name == "engine-1"

        def late(
            ask: Callable[..., Awaitable[EngineReply]],
        ) -> Callable[..., Awaitable[EngineReply]]:
            async def after(call: Call, *given: Any) -> EngineReply:
                if call.operation.name == "delete_sequences":
                    await is_moved.wait()
                return await ask(call, *given)

            return after

        for engine in second.router.members.engines:
            if engine.name != TARGET:
                monkeypatch.setattr(engine, "ask", late(engine.ask))
        deleting = asyncio.ensure_future(second.call("delete_sequences", how))
        await asyncio.sleep(0.05)
        await moved(cluster)
        assert cluster.router.locator.tags.tag(("default", "a")) is not None
        is_moved.set()
        assert (await deleting).fields == {"num_deleted": 1}
        assert (await cluster.fields("list_sequences", {"limit": 9})) == NONE_LEFT


@THREE
async def test_an_engine_is_drained_while_doors_delete_its_sequences(cluster: Cluster) -> None:
    async with another_door(cluster) as second:
        book, rng = Book(cluster), np.random.default_rng(5)
        for number in range(10):
            await create_on_source(cluster, book, f"d{number}", 5 * PAGE + 1)
        for number in range(10):
            await create_on_source(cluster, book, f"w{number}", 3 * PAGE + number)
        names = rng.permutation(sorted(book.held)).tolist()
        emptying = asyncio.ensure_future(moved(cluster))
        deleted = 0

        async def delete(door: Cluster, some: list[str]) -> None:
            nonlocal deleted
            await asyncio.sleep(float(rng.uniform(0, 0.15)))
            reply = await door.ok("delete_sequences", {"ids": some})
            deleted += reply.fields["num_deleted"]

        batches = [names[at : at + 5] for at in range(0, len(names) - 5, 5)]
        doors = (cluster, second, cluster)
        await asyncio.gather(
            *(delete(door, some) for door, some in zip(doors, batches, strict=True))
        )
        await emptying
        assert deleted == 15
        for name in names[15:]:
            await book.check(name)
        listed = (await second.fields("list_sequences", {"limit": 99}))["sequences"]
        assert [one["id"] for one in listed] == sorted(names[15:])
        refused = await cluster.call("delete_sequences", {"prefix": "d", "skip": True})
        assert (refused.status, refused.fields["field"]) == (422, "skip")


@THREE
async def test_a_sequence_at_an_engine_that_comes_during_a_look_is_deleted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look did not ask that engine, and says nothing about its sequences."""
    await create_on_source(cluster, Book(cluster), "a", PAGE)
    looks, ask_all = 0, deletes.ask_all

    async def look(members: Members, *given: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks > 2:
            return await ask_all(members, *given)
        (late,) = [one for one in members.engines if one.name == SOURCE]
        del members.by_tag[late.tag]
        replies = await ask_all(members, *given)
        members.by_tag[late.tag] = late
        members.changes += 1
        return replies

    monkeypatch.setattr(deletes, "ask_all", look)
    assert await cluster.fields("delete_sequences", {"ids": ["a"]}) == {"num_deleted": 1}
    assert looks == 3
