"""A sequence that outgrows its engine goes on over several: the same numbers, whoever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cluster_book import Book
from cluster_calls import LAYERS, PAGE, PAGES, SETTINGS, Answer, Cluster, rows, run
from test_ranks_doors import another_door

from service.cluster import copying, dealing_out, handing
from service.cluster.dealing_out import deal_out
from service.cluster.engine import Engine
from service.cluster.local import LocalEngines, local_engines
from service.doors.problems import ProblemText
from service.operations.spec import Operation
from service.operations.transfer import CANCEL_IMPORT
from service.tenants import OPEN, Tenant, tenant_of

SOURCE = "engine-0"


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalEngines]:
    """Two engines that tests kill and start again."""
    with local_engines(2, SETTINGS) as engines:
        yield engines


async def only_on(cluster: Cluster, name: str) -> None:
    """New sequences go to one engine only."""
    for engine in cluster.router.members.engines:
        engine.is_leaving = engine.name != name


async def anywhere(cluster: Cluster) -> None:
    """They go anywhere, and every engine has told what it has now."""
    for engine in cluster.router.members.engines:
        engine.is_leaving = False
    await asyncio.sleep(0.3)


async def filled(cluster: Cluster, book: Book, left: int, at: str = SOURCE) -> None:
    """An engine that has so many pages left."""
    await only_on(cluster, at)
    view = next(
        one for one in (await cluster.told("engines", {})).fields["engines"] if one["name"] == at
    )
    await book.create(f"filler-{at}")
    await book.append(f"filler-{at}", (view["free"] + view["cached"] - left) * PAGE)
    await anywhere(cluster)


async def begun(cluster: Cluster, book: Book, name: str, length: int) -> None:
    await only_on(cluster, SOURCE)
    await book.create(name)
    await book.append(name, length)
    await anywhere(cluster)


def is_dealt(cluster: Cluster, name: str) -> bool:
    return "-" in (cluster.router.homes.names.tag(("default", name)) or "")


@pytest.mark.parametrize("length", [0, 3, 8 * PAGE - 1, 8 * PAGE, 8 * PAGE + 1])
@pytest.mark.parametrize("what", ["append", "prefill", "decode"])
def test_what_finds_no_page_goes_on_over_two_engines(
    pair: LocalEngines, length: int, what: str
) -> None:
    async def test(cluster: Cluster) -> None:
        book = Book(cluster)
        await begun(cluster, book, "a", length)
        least = {0: 2, 3: 1}.get(length, 0)  # what rank 0 needs, as it has nothing to give away
        await filled(cluster, book, least if what == "decode" else 2 + 4 * bool(least))
        if what == "append":
            await book.append("a", 11 * PAGE + 1)
        elif what == "prefill":
            for layer in range(LAYERS):
                how = {"causal": True, "window_left": 5 * layer - 1}
                await book.attend(["a"], [11 * PAGE + 1], layer, appends=True, **how)
        else:
            for _ in range(2 * PAGE + 1):
                for layer in range(LAYERS):
                    await book.attend(["a"], [1], layer, appends=True, window_left=9)
        assert is_dealt(cluster, "a")
        for layer in range(LAYERS):
            await book.attend(["a", "filler-engine-0"], [1, 1], layer, appends=False)
            await book.attend(["a"], [2], layer, appends=True, causal=True, window_left=7)
        await book.truncate("a", 1)
        await book.append("a", PAGE)
        await book.check("a")
        await book.check("filler-engine-0")

    run(pair, test, spill=2)


def test_forks_that_stay_keep_their_pages_and_what_they_share(pair: LocalEngines) -> None:
    async def test(cluster: Cluster) -> None:
        book = Book(cluster)
        await begun(cluster, book, "a", 20 * PAGE + 2)
        await book.fork("a", "short", 5 * PAGE + 1)
        await book.fork("a", "long")
        await book.fork("short", "below")
        await book.append("a", 30 * PAGE)
        await book.append("long", 3)
        await filled(cluster, book, 1)
        await book.append("a", 6 * PAGE)
        assert is_dealt(cluster, "a") and cluster.home("long") == SOURCE
        batch = ["long", "a", "short"]
        for layer in range(LAYERS):
            await book.attend(batch, [1, 2, 2], layer, appends=False, causal=True)
            await book.attend(["a", "below"], [1, 1], layer, appends=False)
        await book.fork("a", "after", 33 * PAGE - 1)
        await book.append("after", 2)
        for name in book.held:
            await book.check(name)
        await cluster.told("delete_sequence", {"id": "a"})
        del book.held["a"]
        for name in book.held:
            await book.check(name)
        assert (await cluster.told("pool", {})).fields["integrity"] == "ok"

    run(pair, test, spill=2)


def test_pages_with_names_are_dealt_out_too_and_those_of_others_stay_cached(
    pair: LocalEngines,
) -> None:
    async def test(cluster: Cluster) -> None:
        book = Book(cluster)
        await begun(cluster, book, "a", 40 * PAGE)
        ids = list(range(40 * PAGE))
        await book.fork("a", "other", 4 * PAGE)
        await cluster.told("commit", {"id": "a", "token_ids": ids})
        await filled(cluster, book, 0)
        await book.append("a", 9)
        assert is_dealt(cluster, "a")
        for name in book.held:
            await book.check(name)
        asked = {"token_ids": ids, "lease_s": 0.0}
        matched = (await cluster.told("match_prefix", asked)).fields
        assert matched["matched_len"] == 4 * PAGE
        refused = await cluster.call("commit", {"id": "a", "token_ids": ids})
        assert (refused.status, refused.fields["code"]) == (422, "invalid_request")

    run(pair, test, spill=2)


def test_a_batch_is_cut_where_one_of_its_sequences_is_dealt_out(
    pair: LocalEngines,
) -> None:
    async def test(cluster: Cluster) -> None:
        book = Book(cluster)
        names = ["a", "b", "c"]
        for number, name in enumerate(names):
            await begun(cluster, book, name, (8 + number) * PAGE)
        await only_on(cluster, "engine-1")
        await book.create("d")
        await book.append("d", PAGE)
        await filled(cluster, book, 1)
        for layer in range(LAYERS):
            await book.attend([*names, "d"], [1, 1, 1, 1], layer, appends=True)
        assert [is_dealt(cluster, name) for name in names] == [False, False, True]
        for name in book.held:
            await book.check(name)

    run(pair, test, spill=2)


def test_all_that_a_batch_needs_is_counted_before_one_of_it_is_dealt_out(
    pair: LocalEngines,
) -> None:
    """As many are dealt out as it takes, or none where all of them would not do."""

    async def test(cluster: Cluster) -> None:
        book, names = Book(cluster), ["a", "b", "c"]
        for name, pages in zip(names, (30, 4, 4), strict=True):
            await begun(cluster, book, name, pages * PAGE)
        await filled(cluster, book, 0)

        async def append(counts: list[int]) -> Answer:
            indptr = [0, *np.cumsum(counts).tolist()]
            fields = {"layer": 1, "sequences": names, "append_indptr": indptr}
            new = rows(np.random.default_rng(0), sum(counts))
            return await cluster.call("append", fields, k=new, v=new)

        for layer in range(LAYERS):  # layer 1 is shorter from here on
            await cluster.told("truncate", {"id": "c", "length": 4 * PAGE - layer, "layer": layer})
        refused = await append([PAGE, 20 * PAGE, 20 * PAGE])
        assert (refused.status, refused.fields["needed"]) == (507, 41), refused
        assert not any(is_dealt(cluster, name) for name in names)
        assert await cluster.free_pages() == PAGES
        told = await append([PAGE, 10 * PAGE, 10 * PAGE])
        assert told.status == 200, told
        assert [is_dealt(cluster, name) for name in names] == [True, True, False]

    run(pair, test, spill=2)


def test_another_door_finds_out_by_a_refusal(pair: LocalEngines) -> None:
    async def test(first: Cluster) -> None:
        async with another_door(first) as second:
            book, there = Book(first), Book(second)
            for number, look in enumerate(("get", "decode", "gather", "fork", "cut", "delete")):
                name = f"s{number}"
                await begun(first, book, name, 9 * PAGE)
                there.held = book.held
                await there.check(name)
                await filled(first, book, 0)
                await book.append(name, PAGE)
                assert is_dealt(first, name) and not is_dealt(second, name)
                match look:
                    case "get":
                        told = await second.told("get_sequence", {"id": name})
                        assert told.fields["lengths"] == [10 * PAGE] * LAYERS
                        assert "shard" not in told.fields
                    case "decode":
                        await there.attend([name], [1], 0, appends=True)
                        await there.attend([name], [1], 1, appends=True)
                    case "gather":
                        await there.check(name)
                    case "fork":
                        await there.fork(name, "fork", 7)
                        await book.append("fork", 3)
                    case "cut":
                        await there.truncate(name, 5)
                    case "delete":
                        await second.told("delete_sequence", {"id": name})
                        gone = await first.call("get_sequence", {"id": name})
                        assert gone.status == 404, gone
                        del book.held[name]
                for one in book.held:
                    await book.check(one)
                    await there.check(one)
                await first.told("delete_sequences", {"prefix": ""})
                book.held.clear()
                assert await first.free_pages() == 2 * PAGES

    run(pair, test, spill=2)


def test_whoever_may_only_append_outgrows_an_engine_too(pair: LocalEngines) -> None:
    writer, reader = (tenant_of("team", (scope,)) for scope in ("append", "read"))

    async def test(first: Cluster) -> None:
        async with another_door(first, True) as keyed, another_door(first, True) as other:
            await only_on(keyed, SOURCE)
            new = {"sequences": [{"id": "a"}]}
            assert (await keyed.call("create_sequences", new, writer)).status == 201
            await filled(first, Book(first), 20)
            k = rows(np.random.default_rng(0), 15 * PAGE)
            for begin in range(0, 30 * PAGE, 15 * PAGE):
                fields = {"layer": 0, "sequences": ["a"], "append_indptr": [0, 15 * PAGE]}
                await anywhere(keyed)
                told = await keyed.call("append", fields, writer, k=k, v=k)
                assert told.fields["lengths"] == [begin + 15 * PAGE], told
            for door in (other, keyed):
                read = {"layer": 0, "sequences": ["a"], "dtype": "fp32"}
                got = await door.call("gather", read, reader)
                np.testing.assert_array_equal(got.arrays["k"], np.concatenate((k, k)))
            told = await other.call("delete_sequence", {"id": "a"}, writer)
            assert told.status == 204
            await first.told("delete_sequences", {"prefix": ""})

    run(pair, test, spill=2)


def test_two_doors_that_are_refused_at_once_deal_it_out_once(pair: LocalEngines) -> None:
    async def test(first: Cluster) -> None:
        async with another_door(first) as second:
            book = Book(first)
            await begun(first, book, "a", 12 * PAGE)
            await filled(first, book, 0)
            new = [rows(book.rng, 3 * PAGE) for _ in range(4)]
            fields = {"layer": 0, "sequences": ["a"], "append_indptr": [0, 3 * PAGE]}
            doors = (first, second, first, second)
            calls = [
                door.call("append", fields, k=k, v=k) for door, k in zip(doors, new, strict=True)
            ]
            told = await asyncio.gather(*calls)
            assert {one.status for one in told} == {200}, told
            assert sorted(one.fields["lengths"][0] for one in told) == [
                12 * PAGE + 3 * PAGE * number for number in range(1, 5)
            ]
            got = await second.told("gather", fields_of("a"))
            for one, k in zip(told, new, strict=True):
                stop = one.fields["lengths"][0]
                np.testing.assert_array_equal(got.arrays["k"][stop - 3 * PAGE : stop], k)

    def fields_of(name: str) -> dict[str, object]:
        return {"layer": 0, "sequences": [name], "dtype": "fp32"}

    run(pair, test, spill=2)


def test_where_it_cannot_help_the_refusal_is_what_it_was(pair: LocalEngines) -> None:
    async def test(cluster: Cluster) -> None:
        book = Book(cluster)
        await begun(cluster, book, "a", 8 * PAGE)
        await filled(cluster, book, 2)
        free = await cluster.free_pages()
        await refused(cluster, "a", 3 * PAGES)  # more than both have
        await filled(cluster, book, 1, at="engine-1")
        await refused(cluster, "a", 4 * PAGE)
        assert not is_dealt(cluster, "a")
        await cluster.told("delete_sequence", {"id": "filler-engine-1"})
        del book.held["filler-engine-1"]
        await asyncio.sleep(0.3)
        # all that it has is shared with a fork: its part would have to be copied
        await book.fork("a", "b")
        await refused(cluster, "a", 4 * PAGE)
        assert not is_dealt(cluster, "a") and await cluster.free_pages() == free
        for name in book.held:
            await book.check(name)

    run(pair, test, spill=2)


def test_without_the_setting_nothing_is_dealt_out(pair: LocalEngines) -> None:
    async def test(cluster: Cluster) -> None:
        book = Book(cluster)
        await begun(cluster, book, "a", 8 * PAGE)
        await filled(cluster, book, 0)
        told = await refused(cluster, "a", 1)
        assert (told["needed"], told["free"]) == (1, 0)
        assert not is_dealt(cluster, "a")

    run(pair, test)


async def refused(cluster: Cluster, name: str, count: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    fields = {"layer": 0, "sequences": [name], "append_indptr": [0, count]}
    told = await cluster.call("append", fields, k=rows(rng, count), v=rows(rng, count))
    assert (told.status, told.fields["code"]) == (507, "out_of_pages"), told
    assert "raise pool.num_pages" in told.fields["detail"]
    return told.fields


class Died(Exception):
    """The door, in the middle."""


POINTS = ["leaving", "header", "part", "before", "after"]


@dataclass
class Point:
    """A moment of the work, where something is done."""

    name: str
    then: Callable[[], None]

    def is_here(self, operation: str, fields: Any) -> bool:
        imports = operation == "import_sequence"
        match self.name:
            case "leaving":
                return operation == "export_sequence"
            case "header":
                return imports and "header" in fields
            case "part":
                return imports and "part" in fields
            case "before":
                return fields.get("state") == "dealt"
        return imports and not {"header", "part"} & fields.keys()

    async def ask(
        self, engine: Engine, operation: Operation, tenant: Tenant, fields: Any, *more: Any
    ) -> Any:
        """In place of every question that the door asks."""
        if self.is_here(operation.name, fields):
            self.then()
        if fields.get("state") == "leaving" and self.name != "after":
            fields = fields | {"for_s": 0.5}  # the door does not live to see that
        return await REAL(engine, operation, tenant, fields, *more)


REAL = copying.ask


@pytest.mark.parametrize("name", POINTS)
def test_a_door_that_dies_leaves_it_whole_or_dealt_out(
    pair: LocalEngines, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a moment on nothing of its work comes, as when it is killed; another door goes on."""

    async def test(first: Cluster) -> None:
        async with another_door(first) as second:
            book, there = Book(first), Book(second)
            await begun(first, book, "a", 30 * PAGE + 3)
            await book.fork("a", "f", 2 * PAGE)
            there.held = book.held

            def die() -> None:
                point.is_here = lambda *_: True  # type: ignore[method-assign]
                raise Died

            point = Point(name, die)
            by_name = {one.name: one for one in first.router.members.engines}
            for module in (copying, dealing_out, handing):
                monkeypatch.setattr(module, "ask", point.ask)
            work = deal_out(first.router, OPEN, "a", [by_name[SOURCE], by_name["engine-1"]], 0)
            with nullcontext() if name == "after" else pytest.raises(Died):
                await work  # after: what it could not do is only logged
            monkeypatch.undo()
            assert not is_dealt(second, "a")
            await asyncio.sleep(0.6)
            for layer in range(LAYERS):
                await there.attend(["a", "f"], [1, 1], layer, appends=True)
            assert is_dealt(second, "a") == (name == "after")
            for one in book.held:
                await there.check(one)
            await given_up(second)

    run(pair, test, spill=2)


@pytest.mark.parametrize(
    ("name", "victim"), [("done", SOURCE), ("part", "engine-1"), ("done", "engine-1")]
)
def test_an_engine_that_dies_takes_it_along_where_it_had_a_part(
    pair: LocalEngines, victim: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = pair

    async def test(first: Cluster) -> None:
        async with another_door(first) as second:
            book = Book(first)
            await begun(first, book, "a", 9 * PAGE)
            await Book(second, held=book.held).check("a")
            await filled(first, book, 0)
            if name == "part":
                point = Point(name, lambda: engines.kill(victim))
                for module in (copying, dealing_out, handing):
                    monkeypatch.setattr(module, "ask", point.ask)
            fields = {"layer": 0, "sequences": ["a"], "append_indptr": [0, PAGE]}
            k = rows(book.rng, PAGE)
            told = await first.call("append", fields, k=k, v=k)
            monkeypatch.undo()
            if name == "done":
                assert told.status == 200 and is_dealt(first, "a")
                engines.kill(victim)
            for door in (first, second):
                await has_engines(door, 1)
            try:
                await check(first, second, book, told)
            finally:
                engines.start(victim)
            for door in (first, second):
                await has_engines(door, 2)

    async def check(first: Cluster, second: Cluster, book: Book, told: Answer) -> None:
        there = [await door.call("get_sequence", {"id": "a"}) for door in (first, second)]
        if victim == "engine-1" and name == "part":
            assert told.status == 507
            await book.check("a")
            await Book(second, held=book.held).check("a")
            return
        assert told.status == 200
        assert (there[0].status, there[0].fields["code"]) == (410, "lost_sequence")
        assert there[1].status in (404, 410)  # by then it may not have been there for that door
        await first.told("delete_sequences", {"prefix": ""})
        async with asyncio.timeout(5):
            while await first.free_pages() != PAGES:
                await asyncio.sleep(0.05)

    run(engines, test, spill=2)


async def has_engines(door: Cluster, count: int) -> None:
    await door.until(lambda: len(door.router.members.engines) == count, f"{count} engines")


async def given_up(cluster: Cluster) -> None:
    """Imports that nobody will finish are not waited for."""
    for engine in cluster.router.members.engines:
        with suppress(ProblemText):
            await engine.ask(engine.own(CANCEL_IMPORT, OPEN, 5.0), {"id": "a"})
