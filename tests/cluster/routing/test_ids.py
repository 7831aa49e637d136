"""The map from ids to engines."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from service.cluster.routing import ids as map_of_ids
from service.cluster.routing.ids import Ids, new_id, tag_in
from service.operations.schema.fields import ID_PATTERN
from service.tenants import OPEN, tenant_of
from tests.cluster.checked_calls import Book
from tests.cluster.fake_engines import fake_cluster
from tests.cluster.harness import PAGE, Cluster, restarted_router

RED, BLUE = tenant_of("red", ("read",)), tenant_of("blue", ("read",))
HERE, THERE = "aaaaaaaa", "bbbbbbbb"


def empty_map() -> Ids:
    members: Any = SimpleNamespace(changes=0, by_tag={HERE: "here", THERE: "there"})
    return Ids(members)


def test_a_generated_id_names_its_engine() -> None:
    name = new_id("01234567")
    assert tag_in(name) == "01234567"
    assert re.fullmatch(ID_PATTERN, name) and new_id("01234567") != name
    assert [tag_in(one) for one in ("chat-1", "a.b", "x.0123456", "y.0123456g")] == [None] * 4


def test_the_map_takes_precedence_over_the_id_and_namespaces_are_apart() -> None:
    ids, name = empty_map(), new_id(HERE)
    ids.learn(RED, [name, "chat"], THERE)
    ids.learn(BLUE, ["chat"], HERE)
    assert [ids.home(one, RED) for one in (name, "chat")] == ["there", "there"]
    assert [ids.home(one, BLUE) for one in (name, "chat")] == ["here", "here"]
    ids.forget(RED, [name, "chat"], ids.clock)
    assert [ids.home(one, RED) for one in (name, "chat")] == ["here", None]


def test_an_id_that_may_have_been_made_since_is_not_forgotten() -> None:
    ids = empty_map()
    ids.learn(RED, ["chat"], HERE)
    since = ids.clock
    ids.learn(RED, ["chat"], HERE)
    ids.forget(RED, ["chat"], since)
    assert ids.home("chat", RED) == "here", "it was made after the call began that missed it"
    ids.importing(RED, "chat", 60.0)
    ids.forget(RED, ["chat"], ids.clock)
    assert ids.home("chat", RED) == "here", "an import of it is under way"
    ids.imports.clear()
    ids.forget(RED, ["chat"], ids.clock)
    assert ids.home("chat", RED) is None


def test_imports_that_are_over_take_no_memory() -> None:
    ids = empty_map()
    for number in range(50):
        ids.importing(RED, f"{number}.{HERE}", 0.0)
    ids.importing(RED, "last", 60.0)
    ids.importing(RED, "newer", 60.0)
    ids.importing(RED, "last", 60.0)
    assert [name for _, name in ids.imports] == ["newer", "last"]


def test_a_bounded_number_of_ids_of_dead_engines_is_remembered(monkeypatch: Any) -> None:
    monkeypatch.setattr(map_of_ids, "MAX_LOST", 2)
    ids = empty_map()
    ids.learn(RED, ["a", "b", "c"], HERE)
    ids.learn(RED, ["d"], THERE)
    ids.bury(HERE)
    ids.learn(RED, ["a", "b", "c"], THERE)  # they were made again
    ids.bury(THERE)
    assert len(ids.entries) == 2 == len(ids.lost)


async def test_ids_of_an_engine_that_died_are_lost_up_to_their_limit(monkeypatch: Any) -> None:
    monkeypatch.setattr(map_of_ids, "MAX_LOST", 2)
    async with fake_cluster("ab") as cluster:
        ids, names = cluster.router.ids, ["x", "y", "z"]
        ids.learn(OPEN, names, cluster.engine_of("a").tag)
        cluster.lose("a", is_dead=True)
        status = [(await cluster.call("get_sequence", {"id": name})).status for name in names]
        assert sorted(status) == [404, 410, 410] and len(ids.entries) == 2


async def test_an_id_that_is_made_while_engines_are_asked_for_it_is_unknown_until_then() -> None:
    async with fake_cluster("ab") as cluster:
        ids, held = cluster.router.ids, list[tuple[str, str]]()

        async def made_meanwhile() -> None:
            held.extend(await ids.hold(OPEN, ["same"]))
            cluster.links["b"].ids.add("same")

        cluster.links["b"].do_next("gather", made_meanwhile)
        assert (await cluster.call("get_sequence", {"id": "same"})).status == 404
        ids.release(held)
        assert (await cluster.call("get_sequence", {"id": "same"})).status == 200


async def test_entries_of_sequences_that_have_expired_are_removed() -> None:
    async with fake_cluster("ab") as cluster:
        ids, engine = cluster.router.ids, cluster.engine_of("a")
        ids.learn(OPEN, [f"old-{number}" for number in range(5000)], engine.tag)
        cluster.links["a"].ids |= {"old-1", "made-by-a-session"}
        assert ids.has_too_many(engine.tag, 2) and not ids.has_too_many(engine.tag, 1000)
        await ids.read(engine)
        assert sorted(name for _, name in ids.entries) == ["made-by-a-session", "old-1"]


async def test_a_restarted_router_knows_every_id(cluster: Cluster) -> None:
    book = Book(cluster)
    for at, name in enumerate(["one", "two", "three"]):
        cluster.only_on(f"engine-{at % 2}")
        await book.create(name)
        await book.append(name, PAGE + at)
    cluster.only_on()
    (unnamed,) = await cluster.create(1)
    async with restarted_router(cluster) as again:
        assert [again.home(name) for name in book.held] == [cluster.home(one) for one in book.held]
        for name in book.held:
            await Book(again, held=book.held).check(name)
            taken = await again.call("create_sequences", {"sequences": [{"id": name}]})
            assert (taken.status, taken.fields["code"]) == (409, "sequence_exists")
        await again.ok("get_sequence", {"id": unnamed})
        assert await again.fields("delete_sequences", {"ids": ["one", unnamed, "x"]}) == {
            "num_deleted": 2
        }
    for name in ("one", unnamed):
        assert (await cluster.call("get_sequence", {"id": name})).status == 404
    await cluster.ok("create_sequences", {"sequences": [{"id": "one"}]})


async def test_a_sequence_of_a_session_is_found_by_asking_the_engines_once() -> None:
    async with fake_cluster("abc") as cluster:
        cluster.links["b"].ids.add("own")
        q = np.zeros((1, 2, 16), np.float32)
        fields = {"layer": 0, "sequences": ["own"]}
        for _ in range(3):
            await cluster.ok("decode", fields, q=q)
        assert [len(link.calls("gather")) for link in cluster.links.values()] == [1, 1, 1]
        cluster.links["b"].ids.remove("own")
        assert (await cluster.call("decode", fields, q=q)).status == 404
        assert [len(link.calls("gather")) for link in cluster.links.values()] == [2, 2, 2]
