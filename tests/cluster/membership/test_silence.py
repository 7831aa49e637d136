"""A silent engine may have all its sequences: none is lost, created twice or deleted meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest

from service.cluster.membership import engine as engines_of
from service.cluster.membership import polling
from service.cluster.routing.router import Router
from tests.cluster.checked_calls import Book
from tests.cluster.harness import PAGE, SETTINGS, Cluster, rows, run
from tests.cluster.local_engines import LocalEngines, local_engines

pytestmark = pytest.mark.long

STALL_S = 1.5
PAIR = pytest.mark.parametrize("cluster", ["pair"], indirect=True)


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalEngines]:
    with local_engines(2, SETTINGS) as engines:
        yield engines


@pytest.fixture(scope="module")
def remote_pair() -> Iterator[LocalEngines]:
    """Two engines that are called over TCP, and may be out of reach for a second."""
    with local_engines(2, SETTINGS, over_tcp=True) as engines:
        yield engines


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine counts as silent early, so that a stall need not be long."""
    for module in (polling, engines_of):
        monkeypatch.setattr(module, "SILENT_S", 0.3)


@contextmanager
def stopped(engines: LocalEngines, name: str) -> Iterator[None]:
    process = engines.processes[name]
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def door_that_starts(first: Cluster, count: int) -> AsyncIterator[Cluster]:
    """A router with sessions with `count` engines."""
    router = Router(SETTINGS.server)
    try:
        async with asyncio.timeout(30):
            await router.connect(str(first.engines.roster), "new", first.engines.secret)
        door = Cluster(router, first.engines)
        await door.until(lambda: len(router.members.engines) == count, "the engines it can meet")
        yield door
    finally:
        router.close()


async def filled(cluster: Cluster) -> Book:
    """`here` on engine-0, `there` on engine-1."""
    book = Book(cluster)
    for name, at in (("here", "engine-0"), ("there", "engine-1")):
        for engine in cluster.router.members.engines:
            engine.is_leaving = engine.name != at
        await book.create(name)
    for engine in cluster.router.members.engines:
        engine.is_leaving = False
    for name in book.held:
        await book.append(name, 5 * PAGE + 1)
    return book


async def is_refused(cluster: Cluster, name: str, fields: Any, **arrays: Any) -> None:
    reply = await cluster.call(name, fields, deadline_s=2.0, **arrays)
    assert reply.status in (503, 504), (name, reply)


async def all_is_there(cluster: Cluster, book: Book) -> None:
    again = Book(cluster, held=book.held)
    for name in book.held:
        await again.check(name)
        await again.append(name, PAGE)
        await again.check(name)


def both_there(cluster: Cluster) -> bool:
    members = cluster.router.members
    return len(members.engines) == 2 and all(one.is_ready for one in members.engines)


@pytest.mark.parametrize("kind", ["pair", "remote_pair"])
def test_sequences_of_a_stalled_engine_are_refused_and_there_afterwards(
    kind: str, request: pytest.FixtureRequest
) -> None:
    engines = request.getfixturevalue(kind)

    async def test(cluster: Cluster) -> None:
        book = await filled(cluster)
        with stopped(engines, "engine-1"):
            await asyncio.sleep(STALL_S)
            for name in ("there", "unknown"):
                await is_refused(cluster, "get_sequence", {"id": name})
            one = rows(np.random.default_rng(0), 1)
            new = {"layer": 0, "sequences": ["there"], "append_indptr": [0, 1]}
            await is_refused(cluster, "append", new, k=one, v=one)
            await is_refused(cluster, "create_sequences", {"sequences": [{"id": "there"}]})
            await cluster.ok("create_sequences", {"sequences": [{"id": "new"}]})
            await is_refused(cluster, "delete_sequences", {"prefix": "t"})
            await is_refused(cluster, "list_sequences", {})
            await book.check("here")
            await book.append("here", 1)
            (made,) = await cluster.create(1)
            await cluster.ok("delete_sequence", {"id": made})
            reply = (await cluster.fields("engines"))["engines"]
            assert [view["name"] for view in reply] == ["engine-0"]
        await cluster.until(lambda: both_there(cluster), "the engine answers again")
        await all_is_there(cluster, book)
        assert cluster.home("new") == "engine-0", "the router knew all ids of the silent one"

    run(engines, test)


@pytest.mark.parametrize("kind", ["pair", "remote_pair"])
def test_a_door_that_starts_while_an_engine_is_stalled_loses_nothing(
    kind: str, request: pytest.FixtureRequest
) -> None:
    pair = request.getfixturevalue(kind)

    async def test(first: Cluster) -> None:
        book = await filled(first)
        tagged = next(one for one in await first.create_apart() if first.home(one) == "engine-1")
        with stopped(pair, "engine-1"):
            async with door_that_starts(first, 1) as door:
                assert door.router.state[0] == "starting"
                door.router.ready()  # sequences of other engines are served
                for name in ("there", "unknown", tagged):
                    await is_refused(door, "get_sequence", {"id": name})
                    await is_refused(door, "gather", {"layer": 0, "sequences": [name]})
                    await is_refused(door, "delete_sequence", {"id": name})
                await is_refused(door, "delete_sequences", {"ids": ["there"]})
                await is_refused(door, "create_sequences", {"sequences": [{"id": "there"}]})
                await Book(door, held=book.held).check("here")
                await asyncio.sleep(STALL_S)
                await is_refused(door, "get_sequence", {"id": "there"})
                pair.processes["engine-1"].send_signal(signal.SIGCONT)
                await door.until(lambda: both_there(door), "both engines")
                await door.until(lambda: door.router.state[0] == "ready", "their ids")
                await all_is_there(door, book)
                await door.ok("get_sequence", {"id": tagged})
                assert (await door.call("get_sequence", {"id": "unknown"})).status == 404
        await all_is_there(first, book)

    run(pair, test)


@PAIR
async def test_a_session_that_ends_is_no_engine_that_dies(cluster: Cluster) -> None:
    book = await filled(cluster)
    for _ in range(3):
        engine = cluster.router.members.by_name["engine-1"].engine
        assert engine is not None and engine.link.caller is not None
        engine.link.caller.lose("the connection broke")
        reply = await cluster.call("get_sequence", {"id": "there"})
        assert reply.status in (200, 503), reply
        await cluster.until(lambda: both_there(cluster), "it is met again")
        await asyncio.sleep(0.1)
        await all_is_there(cluster, book)


@PAIR
async def test_an_engine_that_refuses_a_poll_stays(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.errors import Overloaded

    async def refuse(*_: Any) -> None:
        raise Overloaded("the arena is full", retry_after_s=1.0)

    book = await filled(cluster)
    before = list(cluster.router.members.engines)
    with monkeypatch.context() as patched:
        patched.setattr(polling, "poll", refuse)
        await asyncio.sleep(0.6)
    assert cluster.router.members.engines == before
    await all_is_there(cluster, book)
