"""An engine is drained while callers continue: every number stays right, whatever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.cluster.migration import drain, ownership, transfer
from service.cluster.migration.drain import Drain
from service.cluster.migration.transfer import Family, Transfer
from service.cluster.routing import locator
from service.doors.kit.problems import ProblemText
from service.errors import NotReady
from service.operations.rows import APPEND
from service.operations.sequences import CREATE_SEQUENCES
from service.operations.transfer import CANCEL_IMPORT
from service.tenants import OPEN
from tests.cluster.checked_calls import Book
from tests.cluster.harness import (
    DIM,
    FLOAT,
    HEADS,
    LAYERS,
    PAGE,
    PAGES,
    THREE,
    Cluster,
    another_door,
    run,
)
from tests.cluster.local_engines import LocalEngines

Array = Any
SOURCE = "engine-0"
AGAIN = frozenset({"sequence_moving", "not_ready", "overloaded"})
LOST = frozenset({"lost_sequence", "unknown_sequence", "deadline_exceeded"})


@dataclass
class Caller:
    """Appends to, decodes, forks and truncates sequences of its own, and checks their rows.
    `may_lose`: engines are killed meanwhile."""

    door: Cluster
    number: int
    may_lose: bool = False

    def __post_init__(self) -> None:
        rng, losing = (
            np.random.default_rng(self.number),
            LOST if self.may_lose else frozenset[str](),
        )
        self.book = Book(self.door, rng, retried=AGAIN, losing=losing)

    async def begin(self, count: int) -> None:
        for index in range(count):
            name = f"c{self.number}-{index}"
            await self.book.create(name)
            await self.book.append(name, 3 * PAGE + self.number)

    async def decode(self, name: str) -> None:
        for layer in range(LAYERS):
            if name in self.book.held:
                offsets = [len(self.book.held[name][layer][0])]
                await self.book.attend([name], [1], layer, appends=True, offsets=offsets)

    async def work(self, until: asyncio.Event) -> None:
        number, book = 0, self.book
        while not until.is_set() and book.held:
            names = sorted(book.held)
            name, number = names[int(book.rng.integers(len(names)))], number + 1
            length = len(book.held[name][0][0])
            match int(book.rng.integers(8)):
                case 0 if len(names) < 6:
                    await book.fork(name, f"c{self.number}-f{number}")
                case 1 if length > 4 * PAGE:
                    await book.truncate(name, int(book.rng.integers(length)))
                case 2 if length < 8 * PAGE:
                    await book.append(name, int(book.rng.integers(1, 2 * PAGE)))
                case _ if length < 10 * PAGE:
                    await self.decode(name)
                case _:
                    await book.truncate(name, PAGE + 1)
            await asyncio.sleep(0)

    async def check(self, door: Cluster | None = None) -> None:
        """Checks all sequences, by default at the caller's own door."""
        self.book.cluster = door or self.door
        for name in sorted(self.book.held):
            await self.book.check(name)


async def left_at(cluster: Cluster, name: str) -> int:
    """The number of sequences of an engine; 0 where it is not there."""
    view = await cluster.engine(name)
    return 0 if view is None else int(view["sequences"])


async def emptied(cluster: Cluster, name: str = SOURCE) -> None:
    async with asyncio.timeout(60):
        while await left_at(cluster, name):
            await asyncio.sleep(0.05)


async def all_there(cluster: Cluster, count: int = 3) -> None:
    engines = cluster.router.members.by_tag
    await cluster.until(lambda: len(engines) == count, f"{count} engines are there")


async def begin_at_source(doors: Sequence[Cluster], callers: Sequence[Caller], count: int) -> None:
    """Creates every caller's first sequences on the engine that will be drained."""
    for door in doors:
        door.only_on(SOURCE)
    for caller in callers:
        await caller.begin(count)
    for door in doors:
        door.only_on()


@THREE
@pytest.mark.long
async def test_an_engine_is_drained_while_callers_at_another_door_continue(
    cluster: Cluster,
) -> None:
    async with another_door(cluster) as second:
        callers = [Caller((cluster, second, second, second)[one], one) for one in range(4)]
        await begin_at_source((cluster, second), callers, 2)
        assert await left_at(cluster, SOURCE) == 8
        over = asyncio.Event()
        working = [asyncio.ensure_future(caller.work(over)) for caller in callers]
        await asyncio.sleep(0.2)
        reply = await cluster.ok("drain_engine", {"name": SOURCE})
        assert reply.fields["draining"] is True and reply.fields["sequences"] >= 8
        await emptied(cluster)
        await asyncio.sleep(0.3)
        made = await second.create(2)  # none of them at the engine that is emptied
        over.set()
        await asyncio.gather(*working)
        for caller in callers:
            await caller.check()
        assert await left_at(cluster, SOURCE) == 0
        assert SOURCE not in {second.home(name) for name in made}
        listed = (await cluster.fields("list_sequences", {"limit": 100}))["sequences"]
        names = {name for caller in callers for name in caller.book.held} | set(made)
        assert {one["id"] for one in listed} == names, "no copy is left over"
        stopped = await second.ok("drain_engine", {"name": SOURCE, "stop": True})
        assert stopped.fields == {"name": SOURCE, "draining": False, "sequences": 0}
        refused = await cluster.call("drain_engine", {"name": "no-such-engine"})
        assert (refused.status, refused.fields["field"]) == (422, "name")


@THREE
@pytest.mark.long
async def test_shared_and_committed_pages_stay_shared_and_committed(cluster: Cluster) -> None:
    cluster.only_on(SOURCE)
    book = Book(cluster)
    await book.create("root", ttl_s=500.0)
    await book.append("root", 20 * PAGE + 1)
    ids = list(range(10 * PAGE))
    await cluster.ok("commit", {"id": "root", "token_ids": ids})
    for number in range(6):
        await book.fork("root", f"f{number}", (10 + number) * PAGE)
        await book.append(f"f{number}", number)
    await book.fork("f5", "uneven", 15 * PAGE)
    k = book.grow(["uneven"], [PAGE + 1], 1)
    fields = {"layer": 1, "sequences": ["uneven"], "append_indptr": [0, PAGE + 1]}
    await cluster.ok("append", fields, **k)
    await book.create("empty")
    cluster.only_on()
    before = PAGES * 3 - await cluster.free_pages()
    await cluster.drain(SOURCE)
    await emptied(cluster)
    await cluster.drained(SOURCE)
    reply = (await cluster.fields("engines"))["engines"]
    referenced = {one["name"]: one["referenced"] for one in reply}
    assert referenced[SOURCE] == 0
    assert sum(referenced.values()) == before, "shared pages are shared there too"
    for name in book.held:
        await book.check(name)
    view = await cluster.fields("get_sequence", {"id": "root"})
    assert (view["ttl_s"], view["parent"]) == (500.0, None)
    await cluster.ok("delete_sequences", {"prefix": ""})
    matched = await cluster.fields("match_prefix", {"token_ids": ids, "lease_s": 0.0})
    assert matched["matched_len"] == 10 * PAGE
    await cluster.end_drain(SOURCE)


@THREE
async def test_sequences_stay_while_no_other_engine_has_room(cluster: Cluster) -> None:
    book = Book(cluster)
    engines = sorted(one.name for one in cluster.router.members.engines)
    for name in engines:
        cluster.only_on(name)
        await book.create(f"at-{name}")
        count = 100 if name == SOURCE else 90
        await book.append(f"at-{name}", count * PAGE)
    cluster.only_on()
    await cluster.drain(SOURCE)
    await asyncio.sleep(1.5)
    assert await left_at(cluster, SOURCE) == 1
    await book.check(f"at-{SOURCE}")
    await book.attend([f"at-{SOURCE}"], [1], 0, appends=True)
    await cluster.ok("delete_sequence", {"id": f"at-{engines[1]}"})
    del book.held[f"at-{engines[1]}"]
    await emptied(cluster)
    for name in book.held:
        await book.check(name)
    assert cluster.home(f"at-{SOURCE}") == engines[1]
    await cluster.end_drain(SOURCE)


@THREE
async def test_pins_and_leases_are_moved_and_imports_are_waited_for(cluster: Cluster) -> None:
    book, ids = Book(cluster), list(range(9 * PAGE))
    cluster.only_on(SOURCE)
    await book.create("root")
    await book.append("root", 9 * PAGE)
    named = {"token_ids": ids, "cache_salt": "x"}
    key = (await cluster.fields("commit", {"id": "root"} | named))["last_key"]
    page = {"page_key": key, "cache_salt": "x"}
    await cluster.ok("pin", page | {"hard": True})
    held = [(k[: 5 * PAGE], v[: 5 * PAGE]) for k, v in book.held.pop("root")]
    short = {"token_ids": ids[: 5 * PAGE], "cache_salt": "x", "lease_s": 60.0}
    lease = (await cluster.fields("match_prefix", short))["lease"]["id"]
    whole = await cluster.fields("match_prefix", named | {"lease_s": 60.0})
    other = whole["lease"]["id"]
    reply = await cluster.ok("export_sequence", {"id": "root"})
    header, digest = reply.fields["header"], reply.fields["digest"]
    begun = {"id": "came", "header": header, "digest": digest, "share": False}
    names = dict(reply.arrays)
    await cluster.ok("import_sequence", begun, **names)
    which = {"id": "root", "part": 0, "generation": header["generation"], "before": digest}
    part = await cluster.ok("export_sequence", which | {"part_bytes": header["part_bytes"]})
    await cluster.ok("delete_sequence", {"id": "root"})
    cluster.only_on()
    await cluster.drain(SOURCE)

    async def source() -> Any:
        every = (await cluster.fields("engines"))["engines"]
        return next(one for one in every if one["name"] == SOURCE)

    async with asyncio.timeout(60):
        while (await source())["leases"] or (await source())["pinned"]:
            await asyncio.sleep(0.02)
    assert ((await source())["sequences"], (await source())["imports"]) == (0, 1)
    assert not cluster.router.drains.tasks[SOURCE].done(), "the import is waited for"
    part_of = {"id": "came", "part": 0, "digest": part.fields["digest"]}
    await cluster.ok("import_sequence", part_of, **part.arrays)
    await cluster.ok("import_sequence", {"id": "came", "digest": part.fields["digest"]})
    await cluster.drained(SOURCE)
    assert cluster.home("came") != SOURCE
    holds = (await cluster.fields("holds"))["holds"]
    assert sorted(one["num_pages"] for one in holds) == [5, 9, 9]
    assert all(one["left_s"] is None or 30.0 < one["left_s"] <= 60.0 for one in holds)
    await cluster.ok("renew_lease", {"id": lease, "lease_s": 50.0})
    await cluster.ok("release_lease", {"id": other})
    refused = await cluster.call("renew_lease", {"id": other})
    assert (refused.status, refused.fields["code"]) == (404, "unknown_lease")
    await cluster.ok("delete_sequences", {"prefix": ""})
    await cluster.ok("clear")
    matched = await cluster.fields("match_prefix", named | {"lease_s": 0.0})
    assert matched["num_pages"] == 9, "the pin is kept"
    every = (await cluster.fields("engines"))["engines"]
    cluster.only_on(next(one["name"] for one in every if one["pinned"]))
    prefix = {"token_ids": ids[: 5 * PAGE], "cache_salt": "x"}
    await cluster.ok("create_sequences", {"sequences": [{"id": "new", "prefix": prefix}]})
    book.held["new"] = held
    await book.check("new")
    cluster.only_on()
    await cluster.ok("unpin", page)
    await cluster.ok("release_lease", {"id": lease})
    assert (await cluster.fields("holds")) == {"holds": []}
    await cluster.end_drain(SOURCE)


@THREE
@pytest.mark.long
async def test_pins_stay_while_no_other_engine_has_room(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    book, ids = Book(cluster), list(range(60 * PAGE))
    for name in (SOURCE, "engine-1", "engine-2"):
        cluster.only_on(name)
        await book.create(name)
        await book.append(name, 90 * PAGE if name != SOURCE else 60 * PAGE)
    reply = await cluster.ok("commit", {"id": SOURCE, "token_ids": ids})
    page = {"page_key": reply.fields["last_key"]}
    await cluster.ok("pin", page | {"hard": True})
    await cluster.ok("delete_sequence", {"id": SOURCE})
    cluster.only_on()
    await asyncio.sleep(0.3)
    await cluster.drain(SOURCE)
    await asyncio.sleep(1.0)
    (hold,) = (await cluster.fields("holds"))["holds"]
    assert hold["num_pages"] == 60 and not cluster.router.drains.tasks[SOURCE].done()
    await cluster.ok("delete_sequence", {"id": "engine-2"})
    await cluster.drained(SOURCE)
    reply = await cluster.ok("engines")
    pinned = {one["name"]: one["pinned"] for one in reply.fields["engines"]}
    assert pinned == {SOURCE: 0, "engine-1": 0, "engine-2": 60}
    await cluster.ok("unpin", page)
    await cluster.end_drain(SOURCE)


@pytest.mark.long
@pytest.mark.parametrize("victim", [SOURCE, "engine-1"])
def test_an_engine_that_dies_during_a_drain_loses_only_its_own_sequences(
    three_engines: LocalEngines, victim: str
) -> None:
    engines = three_engines

    async def test(first: Cluster) -> None:
        async with another_door(first) as second:
            callers = [Caller((first, second)[one % 2], one, may_lose=True) for one in range(4)]
            await begin_at_source((first, second), callers, 3)
            over = asyncio.Event()
            working = [asyncio.ensure_future(caller.work(over)) for caller in callers]
            await first.drain(SOURCE)
            at_first = await left_at(first, SOURCE)
            async with asyncio.timeout(60):
                while await left_at(first, SOURCE) > at_first - 3:
                    await asyncio.sleep(0.002)
            engines.kill(victim)
            await all_there(first, 2)
            if victim != SOURCE:
                await emptied(first)
            await asyncio.sleep(0.3)
            over.set()
            await asyncio.gather(*working)
            for caller in callers:
                await caller.check()
            assert any(caller.book.held for caller in callers), "something has lived on"
            for door in (first, second):
                door.router.drains.stop(SOURCE)
            engines.start(victim)
            for door in (first, second):
                await all_there(door)
            await first.end_drain(SOURCE)
            async with asyncio.timeout(90):  # abandoned imports are cancelled
                while True:
                    pool = await first.fields("pool")
                    if pool["imports"] == 0:
                        break
                    await asyncio.sleep(0.2)

    run(engines, test)


class Died(Exception):
    """The door has died during a move."""


async def abandon(
    cluster: Cluster, source: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have a door die while it moves a sequence from `source`."""
    finish = Transfer.finish

    async def die(begun: Any, *_: Any) -> None:
        if when == "named":
            await finish(begun)
        if when == "given up":
            asked = begun.target.own(CANCEL_IMPORT, begun.tenant)
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
        await cluster.drain(source)
        await cluster.until(cluster.router.drains.tasks[source].done, "the door has died")


@THREE
@pytest.mark.long
@pytest.mark.parametrize("when", ["leaving", "handed", "named", "given up"])
async def test_a_door_that_dies_while_a_sequence_moves_loses_nothing(
    cluster: Cluster, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call at another door settles its owner."""
    async with another_door(cluster) as second:
        book = Book(cluster)
        cluster.only_on(SOURCE, "engine-1")
        await book.create("a")
        await book.append("a", 6 * PAGE + 1)
        cluster.only_on()
        await Book(second, held=book.held).check("a")
        source = cluster.home("a")
        await abandon(cluster, source, when, monkeypatch)
        await cluster.end_drain(source)
        for door in (second, cluster):
            again = Book(door, held=book.held)
            await again.check("a")
            await again.append("a", PAGE)
            await again.check("a")
        listed = (await second.fields("list_sequences"))["sequences"]
        assert [one["id"] for one in listed] == ["a"]


@THREE
async def test_a_drain_settles_the_owner_where_a_door_has_died(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the sequence is not called any more."""
    async with another_door(cluster) as second:
        book = Book(cluster)
        cluster.only_on(SOURCE, "engine-1")
        await book.create("a")
        await book.append("a", 3 * PAGE)
        cluster.only_on()
        source = cluster.home("a")
        await abandon(cluster, source, "named", monkeypatch)
        await cluster.end_drain(source)
        await second.drain(source)
        await second.drained(source)
        await second.end_drain(source)
        await Book(second, held=book.held).check("a")


async def test_a_sequence_is_there_once_although_the_reply_to_its_transfer_is_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another door has just finished its import."""
    cluster.only_on(SOURCE)
    book = Book(cluster)
    await book.create("a")
    await book.append("a", 3 * PAGE)
    cluster.only_on()
    engines, set_state = cluster.router.members.engines, ownership.set_state

    async def lose_reply(source: Any, tenant: Any, name: str, state: str, **given: Any) -> None:
        await set_state(source, tenant, name, state, **given)
        if state == "handed":
            for engine in engines:
                await ownership.finish_import(engine, name, tenant)
            raise NotReady("the session ended")

    monkeypatch.setattr(ownership, "set_state", lose_reply)
    await cluster.drain(SOURCE)
    await cluster.drained(SOURCE)
    await cluster.end_drain(SOURCE)
    homes = [engine.name for engine in engines if await locator.known_at(engine, ["a"], OPEN)]
    assert len(homes) == 1 and homes != [SOURCE]
    await book.check("a")


@THREE
async def test_the_owner_of_a_sequence_is_settled_although_two_doors_have_died_as_they_moved_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines have handed it over, one after the other."""
    book = Book(cluster)
    cluster.only_on(SOURCE)
    await book.create("a")
    await book.append("a", 3 * PAGE)
    for source, target in ((SOURCE, "engine-1"), ("engine-1", "engine-2")):
        cluster.only_on(target)
        await abandon(cluster, source, "named", monkeypatch)
        await cluster.end_drain(source)
    await book.check("a")
    listed = (await cluster.fields("list_sequences"))["sequences"]
    assert [one["id"] for one in listed] == ["a"]


async def count_nothing(*_: Any) -> int:
    return 0


@THREE
@pytest.mark.long
async def test_copies_expire_soon_after_their_door_has_died(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living door keeps them in use."""
    monkeypatch.setattr(drain, "ANCHOR_TTL_S", 0.6)
    monkeypatch.setattr(transfer, "ANCHOR_TTL_S", 0.6)
    book, begun = Book(cluster), asyncio.Event()
    cluster.only_on(SOURCE)
    await book.create("a")
    await book.append("a", 6 * PAGE)
    cluster.only_on()

    async def wait(*_: Any) -> None:
        begun.set()
        await asyncio.sleep(1000)

    async def nothing(*_: Any) -> None:
        pass

    with monkeypatch.context() as patched:
        patched.setattr(ownership, "set_state", wait)
        patched.setattr(Family, "delete_anchors", nothing)
        await cluster.drain(SOURCE)
        await begun.wait()
        await asyncio.sleep(1.5)
        assert len(await cluster.ids()) == 2, "the copy is used again and again"
        cluster.router.drains.stop(SOURCE)
        await asyncio.sleep(1.5)
        assert await cluster.ids() == ["a"]
    await cluster.end_drain(SOURCE)
    await book.check("a")


@pytest.mark.long
async def test_copies_that_an_earlier_drain_has_left_at_both_engines_do_not_keep_it_from_ending(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "ANCHOR_TTL_S", 4.0)
    name, k = "moving.0123456789abcdef", np.zeros((LAYERS, 2 * PAGE, HEADS, DIM), FLOAT)
    rows = {"layers": list(range(LAYERS)), "sequences": [name]}
    for engine in cluster.router.members.engines:
        new = {"sequences": [{"id": name, "ttl_s": 4.0}]}
        await engine.ask(engine.own(CREATE_SEQUENCES, OPEN), new)
        indptr = {"append_indptr": [0, 2 * PAGE]}
        await engine.ask(engine.own(APPEND, OPEN), rows | indptr, {"k": k, "v": k})
    async with asyncio.timeout(40):
        await cluster.drain(SOURCE)
        await cluster.drained(SOURCE)
        await cluster.end_drain(SOURCE)
        while await cluster.ids():
            await asyncio.sleep(0.1)


async def test_a_move_that_failed_before_its_owner_changed_does_not_look_for_it_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine without the import refuses to cancel it. An unawaited look is a warning."""
    looks, states = list[Any](), list[str]()

    async def refuse(*_: Any, **__: Any) -> None:
        raise ProblemText("{}")

    async def set_state(source: Any, tenant: Any, sequence: str, state: str) -> None:
        states.append(state)

    monkeypatch.setattr(ownership, "set_state", set_state)
    monkeypatch.setattr(ownership, "has_arrived", lambda *asked: looks.append(asked))
    engine: Any = SimpleNamespace(question=refuse)
    family = Family(OPEN, ["a"], target=engine)
    members: Any = None
    await ownership.roll_back(members, engine, family, "a", is_handed=False)
    assert states == ["back"] and not looks
