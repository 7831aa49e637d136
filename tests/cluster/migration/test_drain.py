"""An engine that is emptied while callers go on: every number stays right, whoever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from service.cluster.membership.local_engines import LocalEngines
from service.cluster.migration import drain, families, ownership
from service.cluster.migration.drain import Drain
from service.cluster.migration.families import Family
from service.cluster.migration.transfer import Transfer
from service.operations.transfer import CANCEL_IMPORT
from tests.cluster.checked_calls import Book
from tests.cluster.harness import ATOL, HEADS, LAYERS, PAGE, PAGES, Cluster, rows, run
from tests.cluster.sharded.test_ranks_doors import another_door, prefix_states

Array = Any
SOURCE = "engine-0"
AGAIN = {"sequence_moving", "not_ready", "overloaded", "sequence_taken"}
GONE = {"lost_sequence", "unknown_sequence"}


@dataclass
class Caller:
    """One that appends to, decodes, forks and cuts sequences of its own, and knows what they hold;
    `may_lose`: engines are killed meanwhile."""

    door: Cluster
    number: int
    may_lose: bool = False
    ranks: int = 1
    held: dict[str, list[tuple[Array, Array]]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    calls: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.number)

    async def ask(self, name: str, fields: Any, about: str, **arrays: Array) -> Any:
        """The answer, None where the sequence is lost; what may be tried again is."""
        async with asyncio.timeout(60):
            while True:
                told = await self.door.call(name, fields, **arrays)
                self.calls += 1
                if told.status < 300:
                    return told
                code = told.fields["code"]
                if self.may_lose and code in GONE | {"deadline_exceeded"}:
                    self.lost.add(about)
                    self.held.pop(about, None)
                    return None
                assert code in AGAIN, (name, fields, told.fields)
                await asyncio.sleep(0.01)

    async def begin(self, count: int) -> None:
        none = rows(self.rng, 0)
        for index in range(count):
            name = f"c{self.number}-{index}"
            new = {"sequences": [{"id": name, "ranks": self.ranks}]}
            if await self.ask("create_sequences", new, name) is not None:
                self.held[name] = [(none, none)] * LAYERS
                await self.append(name, 3 * PAGE + self.number)

    async def append(self, name: str, count: int) -> None:
        for layer in range(LAYERS):
            if name not in self.held:
                return
            k, v = self.held[name][layer]
            new = rows(self.rng, count), rows(self.rng, count)
            fields = {
                "layer": layer,
                "sequences": [name],
                "append_indptr": [0, count],
                "offsets": [len(k)],
            }
            told = await self.ask("append", fields, name, k=new[0], v=new[1])
            if told is not None:
                both = np.concatenate((k, new[0])), np.concatenate((v, new[1]))
                self.held[name][layer] = both

    async def decode(self, name: str) -> None:
        for layer in range(LAYERS):
            if name not in self.held:
                return
            k, v = self.held[name][layer]
            new = rows(self.rng, 1), rows(self.rng, 1)
            q = rows(self.rng, 1, 2 * HEADS)
            fields = {"layer": layer, "sequences": [name], "offsets": [len(k)]}
            told = await self.ask("decode", fields, name, q=q, k=new[0], v=new[1])
            if told is not None:
                k, v = np.concatenate((k, new[0])), np.concatenate((v, new[1]))
                self.held[name][layer] = k, v
                o, lse = prefix_states(q[0], k, v)
                np.testing.assert_allclose(told.arrays["o"][0], o[-1], atol=ATOL, err_msg=name)
                np.testing.assert_allclose(told.arrays["lse"][0], lse[-1], atol=ATOL)

    async def fork(self, name: str, fork: str) -> None:
        new = {"sequences": [{"id": fork, "parent": name}]}
        if await self.ask("create_sequences", new, name) is not None:
            self.held[fork] = list(self.held[name])

    async def cut(self, name: str, length: int) -> None:
        if await self.ask("truncate", {"id": name, "length": length}, name) is not None:
            self.held[name] = [(k[:length], v[:length]) for k, v in self.held[name]]

    async def work(self, until: asyncio.Event) -> None:
        number = 0
        while not until.is_set() and self.held:
            names = sorted(self.held)
            name, number = names[int(self.rng.integers(len(names)))], number + 1
            length = len(self.held[name][0][0])
            match int(self.rng.integers(8)):
                case 0 if len(names) < 6:
                    await self.fork(name, f"c{self.number}-f{number}")
                case 1 if length > 4 * PAGE:
                    await self.cut(name, int(self.rng.integers(length)))
                case 2 if length < 8 * PAGE:
                    await self.append(name, int(self.rng.integers(1, 2 * PAGE)))
                case _ if length < 10 * PAGE:
                    await self.decode(name)
                case _:
                    await self.cut(name, PAGE + 1)
            await asyncio.sleep(0)

    async def check(self) -> None:
        for name in sorted(self.held):
            for layer in range(LAYERS):
                fields = {"layer": layer, "sequences": [name], "dtype": "fp32"}
                told = await self.ask("gather", fields, name)
                if told is None:
                    break
                for part, want in zip("kv", self.held[name][layer], strict=True):
                    np.testing.assert_array_equal(told.arrays[part], want, err_msg=name)


async def left_at(cluster: Cluster, name: str) -> int:
    """How many sequences an engine has; 0 where it is gone."""
    told = (await cluster.told("engines", {})).fields["engines"]
    return sum(int(one["sequences"]) for one in told if one["name"] == name)


async def emptied(cluster: Cluster, name: str = SOURCE) -> None:
    async with asyncio.timeout(60):
        while await left_at(cluster, name):
            await asyncio.sleep(0.05)


async def all_there(cluster: Cluster) -> None:
    await cluster.until(lambda: len(cluster.router.members.engines) == 3, "it is back")


async def only_on(cluster: Cluster, name: str, is_so: bool = True) -> None:
    """New sequences go to one engine only."""
    for engine in cluster.router.members.engines:
        engine.is_leaving = is_so and engine.name != name


async def begin_at_source(doors: Sequence[Cluster], callers: Sequence[Caller], count: int) -> None:
    """Every caller's first sequences, all on the engine that is to be emptied."""
    for cluster in doors:
        await only_on(cluster, SOURCE)
    for caller in callers:
        await caller.begin(count)
    for cluster in doors:
        await only_on(cluster, SOURCE, False)


@pytest.mark.long
def test_an_engine_is_emptied_while_callers_at_another_door_go_on(
    three_engines: LocalEngines,
) -> None:
    async def test(first: Cluster) -> None:
        async with another_door(first) as second:
            callers = [Caller((first, second, second, second)[one], one) for one in range(4)]
            await begin_at_source((first, second), callers, 2)
            assert await left_at(first, SOURCE) == 8
            over = asyncio.Event()
            working = [asyncio.ensure_future(caller.work(over)) for caller in callers]
            await asyncio.sleep(0.2)
            told = await first.told("drain_engine", {"name": SOURCE})
            assert told.fields["draining"] is True and told.fields["sequences"] >= 8
            await emptied(first)
            await asyncio.sleep(0.3)
            made = await second.create(2)  # none of them at the engine that is emptied
            over.set()
            await asyncio.gather(*working)
            for caller in callers:
                await caller.check()
                assert not caller.lost
            assert await left_at(first, SOURCE) == 0
            assert SOURCE not in {second.home(name) for name in made}
            listed = (await first.told("list_sequences", {"limit": 100})).fields["sequences"]
            names = {name for caller in callers for name in caller.held} | set(made)
            assert {one["id"] for one in listed} == names, "no copy is left over"
            stopped = await second.told("drain_engine", {"name": SOURCE, "stop": True})
            assert stopped.fields == {"name": SOURCE, "draining": False, "sequences": 0}
            refused = await first.call("drain_engine", {"name": "nobody"})
            assert (refused.status, refused.fields["field"]) == (422, "name")

    run(three_engines, test)


def test_what_forks_share_and_names_of_pages_are_kept(three_engines: LocalEngines) -> None:
    async def test(cluster: Cluster) -> None:
        await only_on(cluster, SOURCE)
        book = Book(cluster)
        await book.create("root", ttl_s=500.0)
        await book.append("root", 20 * PAGE + 1)
        ids = list(range(10 * PAGE))
        await cluster.told("commit", {"id": "root", "token_ids": ids})
        for number in range(6):
            await book.fork("root", f"f{number}", (10 + number) * PAGE)
            await book.append(f"f{number}", number)
        await book.fork("f5", "uneven", 15 * PAGE)
        k = book.grow(["uneven"], [PAGE + 1], 1)
        fields = {"layer": 1, "sequences": ["uneven"], "append_indptr": [0, PAGE + 1]}
        await cluster.told("append", fields, **k)
        await book.create("empty")
        await only_on(cluster, SOURCE, False)
        before = PAGES * 3 - await cluster.free_pages()
        await cluster.told("drain_engine", {"name": SOURCE})
        await emptied(cluster)
        await cluster.until(lambda: cluster.router.drains.tasks[SOURCE].done(), "it is over")
        told = (await cluster.told("engines", {})).fields["engines"]
        referenced = {one["name"]: one["referenced"] for one in told}
        assert referenced[SOURCE] == 0
        assert sum(referenced.values()) == before, "shared pages are shared there too"
        for name in book.held:
            await book.check(name)
        view = (await cluster.told("get_sequence", {"id": "root"})).fields
        assert (view["ttl_s"], view["parent"]) == (500.0, None)
        await cluster.told("delete_sequences", {"prefix": ""})
        matched = (await cluster.told("match_prefix", {"token_ids": ids, "lease_s": 0.0})).fields
        assert matched["matched_len"] == 10 * PAGE
        await cluster.told("drain_engine", {"name": SOURCE, "stop": True})

    run(three_engines, test)


@pytest.mark.long
def test_parts_of_sequences_are_moved_while_callers_at_two_doors_go_on(
    three_engines: LocalEngines,
) -> None:
    async def test(first: Cluster) -> None:
        async with another_door(first) as second:
            doors = first, second
            callers = [Caller((first, second)[one % 2], one, ranks=2) for one in range(3)]
            for cluster in doors:  # over the source and another
                for engine in cluster.router.members.engines:
                    engine.is_leaving = engine.name == "engine-2"
            for caller in callers:
                await caller.begin(2)
                await caller.fork(f"c{caller.number}-0", f"c{caller.number}-f")
            for cluster in doors:
                await only_on(cluster, SOURCE, False)
            over = asyncio.Event()
            working = [asyncio.ensure_future(caller.work(over)) for caller in callers]
            await asyncio.sleep(0.2)
            await first.told("drain_engine", {"name": SOURCE})
            await emptied(first)
            await asyncio.sleep(0.3)
            over.set()
            await asyncio.gather(*working)
            three_engines.kill(SOURCE)
            for cluster in doors:
                await cluster.until(lambda: len(first.router.members.engines) == 2, "it is gone")
            await asyncio.sleep(0.3)
            for caller in callers:
                for caller.door in doors:
                    await caller.check()
                assert not caller.lost
            listed = (await first.told("list_sequences", {"limit": 100})).fields["sequences"]
            names = {name for caller in callers for name in caller.held}
            assert {one["id"] for one in listed} == names, "no copy is left over"
            three_engines.start(SOURCE)
            for cluster in doors:
                await all_there(cluster)

    run(three_engines, test)


def test_parts_that_share_pages_share_them_there_too(three_engines: LocalEngines) -> None:
    async def test(cluster: Cluster) -> None:
        book = Book(cluster)
        for engine in cluster.router.members.engines:
            engine.is_leaving = engine.name == "engine-2"
        await book.create("root", ranks=2)
        await book.append("root", 20 * PAGE + 1)
        for number in range(4):
            await book.fork("root", f"f{number}", (10 + 3 * number) * PAGE)
            await book.append(f"f{number}", number)
        await only_on(cluster, SOURCE, False)
        before = PAGES * 3 - await cluster.free_pages()
        await cluster.told("drain_engine", {"name": SOURCE})
        await emptied(cluster)
        await cluster.until(lambda: cluster.router.drains.tasks[SOURCE].done(), "it is over")
        assert PAGES * 3 - await cluster.free_pages() == before
        for name in book.held:
            await book.check(name)
            await book.attend([name], [1], 0, appends=True)
        # the other one's parts have nowhere to go: on every other engine is one already
        await cluster.told("drain_engine", {"name": "engine-1"})
        await asyncio.sleep(1.0)
        assert await left_at(cluster, "engine-1") >= 5
        await cluster.told("drain_engine", {"name": "engine-1", "stop": True})
        await cluster.told("drain_engine", {"name": SOURCE, "stop": True})
        for name in book.held:
            await book.check(name)

    run(three_engines, test)


def test_what_has_no_room_elsewhere_stays_until_there_is(three_engines: LocalEngines) -> None:
    async def test(cluster: Cluster) -> None:
        book = Book(cluster)
        engines = sorted(one.name for one in cluster.router.members.engines)
        for name in engines:
            await only_on(cluster, name)
            await book.create(f"at-{name}")
            count = 100 if name == SOURCE else 90
            await book.append(f"at-{name}", count * PAGE)
        await only_on(cluster, SOURCE, False)
        await cluster.told("drain_engine", {"name": SOURCE})
        await asyncio.sleep(1.5)
        assert await left_at(cluster, SOURCE) == 1
        await book.check(f"at-{SOURCE}")
        await book.attend([f"at-{SOURCE}"], [1], 0, appends=True)
        await cluster.told("delete_sequence", {"id": f"at-{engines[1]}"})
        del book.held[f"at-{engines[1]}"]
        await emptied(cluster)
        for name in book.held:
            await book.check(name)
        assert cluster.home(f"at-{SOURCE}") == engines[1]
        await cluster.told("drain_engine", {"name": SOURCE, "stop": True})

    run(three_engines, test)


def test_pins_and_leases_are_kept_and_imports_are_waited_for(three_engines: LocalEngines) -> None:
    async def test(cluster: Cluster) -> None:
        book, ids = Book(cluster), list(range(9 * PAGE))
        await only_on(cluster, SOURCE)
        await book.create("root")
        await book.append("root", 9 * PAGE)
        named = {"token_ids": ids, "cache_salt": "x"}
        key = (await cluster.told("commit", {"id": "root"} | named)).fields["last_key"]
        page = {"page_key": key, "cache_salt": "x"}
        await cluster.told("pin", page | {"hard": True})
        held = [(k[: 5 * PAGE], v[: 5 * PAGE]) for k, v in book.held.pop("root")]
        short = {"token_ids": ids[: 5 * PAGE], "cache_salt": "x", "lease_s": 60.0}
        lease = (await cluster.told("match_prefix", short)).fields["lease"]["id"]
        whole = (await cluster.told("match_prefix", named | {"lease_s": 60.0})).fields
        other = whole["lease"]["id"]
        told = await cluster.told("export_sequence", {"id": "root"})
        header, digest = told.fields["header"], told.fields["digest"]
        begun = {"id": "came", "header": header, "digest": digest, "share": False}
        names = dict(told.arrays)
        await cluster.told("import_sequence", begun, **names)
        which = {"id": "root", "part": 0, "generation": header["generation"], "before": digest}
        part = await cluster.told("export_sequence", which | {"part_bytes": header["part_bytes"]})
        await cluster.told("delete_sequence", {"id": "root"})
        await only_on(cluster, SOURCE, False)
        await cluster.told("drain_engine", {"name": SOURCE})

        async def source() -> Any:
            every = (await cluster.told("engines", {})).fields["engines"]
            return next(one for one in every if one["name"] == SOURCE)

        async with asyncio.timeout(60):
            while (await source())["leases"] or (await source())["pinned"]:
                await asyncio.sleep(0.02)
        assert ((await source())["sequences"], (await source())["imports"]) == (0, 1)
        assert not cluster.router.drains.tasks[SOURCE].done(), "the import is waited for"
        part_of = {"id": "came", "part": 0, "digest": part.fields["digest"]}
        await cluster.told("import_sequence", part_of, **part.arrays)
        await cluster.told("import_sequence", {"id": "came", "digest": part.fields["digest"]})
        await cluster.until(lambda: cluster.router.drains.tasks[SOURCE].done(), "it is over")
        assert cluster.home("came") != SOURCE
        holds = (await cluster.told("holds", {})).fields["holds"]
        assert sorted(one["num_pages"] for one in holds) == [5, 9, 9]
        assert all(one["left_s"] is None or 30.0 < one["left_s"] <= 60.0 for one in holds)
        await cluster.told("renew_lease", {"id": lease, "lease_s": 50.0})
        await cluster.told("release_lease", {"id": other})
        refused = await cluster.call("renew_lease", {"id": other})
        assert (refused.status, refused.fields["code"]) == (404, "unknown_lease")
        await cluster.told("delete_sequences", {"prefix": ""})
        await cluster.told("clear", {})
        matched = (await cluster.told("match_prefix", named | {"lease_s": 0.0})).fields
        assert matched["num_pages"] == 9, "the pin is kept"
        every = (await cluster.told("engines", {})).fields["engines"]
        await only_on(cluster, next(one["name"] for one in every if one["pinned"]))
        prefix = {"token_ids": ids[: 5 * PAGE], "cache_salt": "x"}
        await cluster.told("create_sequences", {"sequences": [{"id": "new", "prefix": prefix}]})
        book.held["new"] = held
        await book.check("new")
        await only_on(cluster, SOURCE, False)
        await cluster.told("unpin", page)
        await cluster.told("release_lease", {"id": lease})
        assert (await cluster.told("holds", {})).fields == {"holds": []}
        await cluster.told("drain_engine", {"name": SOURCE, "stop": True})

    run(three_engines, test)


@pytest.mark.long
def test_a_pin_that_has_no_room_elsewhere_stays_until_there_is(
    three_engines: LocalEngines, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(cluster: Cluster) -> None:
        book, ids = Book(cluster), list(range(60 * PAGE))
        for name in (SOURCE, "engine-1", "engine-2"):
            await only_on(cluster, name)
            await book.create(name)
            await book.append(name, 90 * PAGE if name != SOURCE else 60 * PAGE)
        told = await cluster.told("commit", {"id": SOURCE, "token_ids": ids})
        page = {"page_key": told.fields["last_key"]}
        await cluster.told("pin", page | {"hard": True})
        await cluster.told("delete_sequence", {"id": SOURCE})
        await only_on(cluster, SOURCE, False)
        await asyncio.sleep(0.3)
        await cluster.told("drain_engine", {"name": SOURCE})
        await asyncio.sleep(1.0)
        (hold,) = (await cluster.told("holds", {})).fields["holds"]
        assert hold["num_pages"] == 60 and not cluster.router.drains.tasks[SOURCE].done()
        await cluster.told("delete_sequence", {"id": "engine-2"})
        await cluster.until(lambda: cluster.router.drains.tasks[SOURCE].done(), "it is over")
        told = await cluster.told("engines", {})
        pinned = {one["name"]: one["pinned"] for one in told.fields["engines"]}
        assert pinned == {SOURCE: 0, "engine-1": 0, "engine-2": 60}
        await cluster.told("unpin", page)
        await cluster.told("drain_engine", {"name": SOURCE, "stop": True})

    run(three_engines, test)


@pytest.mark.long
@pytest.mark.parametrize("victim", [SOURCE, "engine-1"])
def test_an_engine_that_dies_meanwhile_takes_only_its_own_along(
    mortal_engines: LocalEngines, victim: str
) -> None:
    engines = mortal_engines

    async def test(first: Cluster) -> None:
        async with another_door(first) as second:
            callers = [Caller((first, second)[one % 2], one, may_lose=True) for one in range(4)]
            await begin_at_source((first, second), callers, 3)
            over = asyncio.Event()
            working = [asyncio.ensure_future(caller.work(over)) for caller in callers]
            await first.told("drain_engine", {"name": SOURCE})
            at_first = await left_at(first, SOURCE)
            async with asyncio.timeout(60):
                while await left_at(first, SOURCE) > at_first - 3:
                    await asyncio.sleep(0.002)
            engines.kill(victim)
            await first.until(lambda: len(first.router.members.engines) == 2, "it is gone")
            if victim != SOURCE:
                await emptied(first)
            await asyncio.sleep(0.3)
            over.set()
            await asyncio.gather(*working)
            for caller in callers:
                await caller.check()
            assert any(caller.held for caller in callers), "something has lived on"
            for cluster in (first, second):
                cluster.router.drains.stop(SOURCE)
            engines.start(victim)
            for cluster in (first, second):
                await all_there(cluster)
            await first.told("drain_engine", {"name": SOURCE, "stop": True})
            async with asyncio.timeout(90):  # what nobody finished is given up
                while True:
                    pool = (await first.told("pool", {})).fields
                    if pool["imports"] == 0:
                        break
                    await asyncio.sleep(0.2)

    run(engines, test)


class Died(Exception):
    """The door, in the middle."""


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("when", ["leaving", "handed", "named", "given up"])
def test_a_door_that_dies_while_a_sequence_changes_its_engine_loses_nothing(
    three_engines: LocalEngines, ranks: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks next at another door finds out where it is."""

    async def test(first: Cluster) -> None:
        async with another_door(first) as second:
            book = Book(first)
            for engine in first.router.members.engines:
                engine.is_leaving = engine.name == "engine-2"
            await (book.create("a", ranks=2) if ranks == 2 else book.create("a"))
            await book.append("a", 6 * PAGE + 1)
            await only_on(first, SOURCE, False)
            await Book(second, held=book.held).check("a")
            source = SOURCE if ranks == 2 else first.home("a")
            finish = Transfer.finish

            async def die(begun: Any, *_: Any) -> None:
                if when == "named":
                    await finish(begun)
                if when == "given up":
                    asked = begun.target.own(CANCEL_IMPORT, begun.tenant, 5.0)
                    await begun.target.ask(asked, {"id": begun.sequence})
                raise Died

            async def nothing(*_: Any) -> None:
                pass

            with monkeypatch.context() as patched:
                patched.setattr(Drain, "copy_anchors", count_nothing)
                patched.setattr(ownership, "roll_back", nothing)
                if when == "leaving":
                    patched.setattr(drain, "begin_transfer", die)
                    patched.setattr(ownership, "ASK_S", 1.0)
                else:
                    patched.setattr(Transfer, "finish", die)
                await first.told("drain_engine", {"name": source})
                await first.until(first.router.drains.tasks[source].done, "the door has died")
            await first.told("drain_engine", {"name": source, "stop": True})
            for door in (second, first):
                again = Book(door, held=book.held)
                await again.check("a")
                await again.append("a", PAGE)
                await again.check("a")
            listed = (await second.told("list_sequences", {})).fields["sequences"]
            assert [one["id"] for one in listed] == ["a"]

    run(three_engines, test)


async def count_nothing(*_: Any) -> int:
    return 0


@pytest.mark.long
def test_copies_on_the_way_go_soon_where_their_door_has_died(
    three_engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A door that lives uses them again and again, however long it takes."""
    monkeypatch.setattr(drain, "ANCHOR_TTL_S", 0.6)
    monkeypatch.setattr(families, "ANCHOR_TTL_S", 0.6)

    async def test(cluster: Cluster) -> None:
        book, begun = Book(cluster), asyncio.Event()
        await only_on(cluster, SOURCE)
        await book.create("a")
        await book.append("a", 6 * PAGE)
        await only_on(cluster, SOURCE, False)

        async def wait(*_: Any) -> None:
            begun.set()
            await asyncio.sleep(1000)

        async def nothing(*_: Any) -> None:
            pass

        with monkeypatch.context() as patched:
            patched.setattr(ownership, "set_state", wait)
            patched.setattr(Family, "delete_anchors", nothing)
            await cluster.told("drain_engine", {"name": SOURCE})
            await begun.wait()
            await asyncio.sleep(1.5)
            assert len(await listed_ids(cluster)) == 2, "the copy is used again and again"
            cluster.router.drains.stop(SOURCE)
            await asyncio.sleep(1.5)
            assert await listed_ids(cluster) == ["a"]
        await cluster.told("drain_engine", {"name": SOURCE, "stop": True})
        await book.check("a")

    run(three_engines, test)


async def listed_ids(cluster: Cluster) -> list[str]:
    listed = (await cluster.told("list_sequences", {})).fields["sequences"]
    return [one["id"] for one in listed]
