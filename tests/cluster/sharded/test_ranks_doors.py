"""Two doors use one sharded sequence: changes are ordered, and no result is wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from service.cluster.membership.engine import Call
from service.cluster.placement.placer import Placer
from service.cluster.routing.tags import BETWEEN, tags_of
from service.cluster.sharded.ranks import Ranks
from service.operations.sequences import TRUNCATE
from tests.cluster.checked_calls import prefix_states
from tests.cluster.harness import (
    ATOL,
    DIM,
    FLOAT,
    HEADS,
    LAYERS,
    PAGE,
    PAGES,
    THREE,
    Cluster,
    another_door,
    rows,
)

Array = Any
NAME = "book"


@dataclass
class Written:
    """Rows of a call that succeeded, and its states if it was a decode."""

    layer: int
    k: Array
    v: Array
    q: Array = None
    o: Array = None
    lse: Array = None


@dataclass
class Hammer:
    """What writers and readers at one sequence were reply."""

    doors: list[Cluster]
    written: list[Written] = field(default_factory=list)
    read: list[Written] = field(default_factory=list)
    refused: list[Any] = field(default_factory=list)

    async def write(self, seed: int, times: int) -> None:
        rng = np.random.default_rng(seed)
        door = self.doors[seed % len(self.doors)]
        for number in range(times):
            layer, count = int(rng.integers(LAYERS)), int(rng.integers(1, 2 * PAGE))
            decodes = number % 2 == 1
            count = 1 if decodes else count
            k, v = rows(rng, count), rows(rng, count)
            fields: dict[str, Any] = {"layer": layer, "sequences": [NAME]}
            if decodes:
                q = rows(rng, 1, 2 * HEADS)
                reply = await door.call("decode", fields, q=q, k=k, v=v)
                done = Written(layer, k, v, q, reply.arrays.get("o"), reply.arrays.get("lse"))
            else:
                reply = await door.call("append", fields | {"append_indptr": [0, count]}, k=k, v=v)
                done = Written(layer, k, v)
            if reply.status == 200:
                self.written.append(done)
            else:
                self.refused.append(reply.fields)

    async def look(self, seed: int, times: int) -> None:
        rng = np.random.default_rng(seed)
        door = self.doors[seed % len(self.doors)]
        for number in range(times):
            layer = int(rng.integers(LAYERS))
            fields = {"layer": layer, "sequences": [NAME]}
            if number % 3 == 2:
                reply = await door.call("gather", fields | {"dtype": "fp32"})
                if reply.status == 200:
                    self.read.append(Written(layer, reply.arrays["k"], reply.arrays["v"]))
            else:
                q = rows(rng, 1, 2 * HEADS)
                reply = await door.call("decode", fields, q=q)
                if reply.status == 200:
                    o, lse = reply.arrays["o"], reply.arrays["lse"]
                    self.read.append(Written(layer, q[:0], q[:0], q, o, lse))
            if reply.status != 200:
                self.refused.append(reply.fields)

    async def check(self, before: list[Array]) -> None:
        """Every acknowledged row is there once, in one order, and calls saw the rows before."""
        whole = []
        for layer in range(LAYERS):
            fields = {"layer": layer, "sequences": [NAME], "dtype": "fp32"}
            replies = [(await door.ok("gather", fields)).arrays for door in self.doors]
            for other in replies[1:]:
                np.testing.assert_array_equal(replies[0]["k"], other["k"])
            whole.append((replies[0]["k"], replies[0]["v"]))
            mine = [one for one in self.written if one.layer == layer]
            count = len(before[layer]) + sum(len(one.k) for one in mine)
            assert len(whole[layer][0]) == count, f"layer {layer}: an answered append is lost"
        for one in self.written:
            k, v = whole[one.layer]
            at = int(np.flatnonzero((k == one.k[0]).all(axis=(1, 2)))[0])
            np.testing.assert_array_equal(k[at : at + len(one.k)], one.k)
            np.testing.assert_array_equal(v[at : at + len(one.v)], one.v)
            if one.q is not None:
                o, lse = prefix_states(one.q[0], k[: at + 1], v[: at + 1])
                np.testing.assert_allclose(one.o[0], o[-1], atol=ATOL)
                np.testing.assert_allclose(one.lse[0], lse[-1], atol=ATOL)
        for one in self.read:
            k, v = whole[one.layer]
            if one.q is None:
                np.testing.assert_array_equal(one.k, k[: len(one.k)])
                np.testing.assert_array_equal(one.v, v[: len(one.v)])
                continue
            o, lse = prefix_states(one.q[0], k, v)
            near = np.abs(o - one.o[0]).max(axis=(1, 2)) < ATOL
            near &= np.abs(lse - one.lse[0]).max(axis=1) < ATOL
            assert near.any(), "a read saw tokens that were never there"


async def test_concurrent_appends_through_two_doors_are_all_kept_in_one_order(
    cluster: Cluster,
) -> None:
    async with another_door(cluster) as second:
        await cluster.ok("create_sequences", {"sequences": [{"id": NAME, "ranks": 2}]})
        rng = np.random.default_rng(0)
        start = []
        for layer in range(LAYERS):
            fields = {"layer": layer, "sequences": [NAME]}
            start.append(rows(rng, 1))
            await cluster.ok("append", fields, k=start[layer], v=rows(rng, 1))
        hammer = Hammer([cluster, second])
        writers = [hammer.write(seed, 24) for seed in range(1, 5)]
        await asyncio.gather(*writers, *(hammer.look(seed, 24) for seed in (6, 7)))
        assert {one["code"] for one in hammer.refused} <= {"sequence_taken"}, hammer.refused
        assert len(hammer.written) > 48, hammer.refused
        await hammer.check(start)


async def test_of_two_appends_at_the_same_offset_one_succeeds_and_one_gets_the_new_length(
    cluster: Cluster,
) -> None:
    def fields_of(start: int) -> dict[str, Any]:
        return {"layer": 0, "sequences": [NAME], "dtype": "fp32", "start": start}

    async with another_door(cluster) as second:
        await cluster.ok("create_sequences", {"sequences": [{"id": NAME, "ranks": 2}]})
        rng, length = np.random.default_rng(1), 0
        for count in (1, PAGE, PAGE + 1, 3 * PAGE, 2, 5 * PAGE - 1):
            fields = {
                "layer": 0,
                "sequences": [NAME],
                "append_indptr": [0, count],
                "offsets": [length],
            }
            new = [rows(rng, count) for _ in range(2)]
            calls = [
                door.call("append", fields, k=k, v=k)
                for door, k in zip((cluster, second), new, strict=True)
            ]
            replies = await asyncio.gather(*calls)
            assert sorted(one.status for one in replies) == [200, 409], replies
            refused, done = sorted(replies, key=lambda one: -one.status)
            assert done.fields["lengths"] == [length + count]
            assert refused.fields["lengths"] == {NAME: length + count}
            there = await second.ok("gather", fields_of(length))
            winner = new[replies.index(done)]
            np.testing.assert_array_equal(there.arrays["k"], winner)
            length += count


async def test_a_door_notices_lengths_that_another_door_has_changed(cluster: Cluster) -> None:
    async with another_door(cluster) as second:
        await cluster.ok("create_sequences", {"sequences": [{"id": NAME, "ranks": 2}]})
        rng = np.random.default_rng(2)
        for number, door in enumerate((cluster, second, second, cluster, cluster, second) * 2):
            other = second if door is cluster else cluster
            k = rows(rng, 3)
            fields: dict[str, Any] = {
                "layer": 0,
                "sequences": [NAME],
                "append_indptr": [0, 3],
                "offsets": [3 * number],
            }
            await door.ok("append", fields, k=k, v=k)
            reply = (await other.ok("get_sequence", {"id": NAME})).fields
            assert reply["lengths"] == [3 * number + 3, 0]
            read = {"layer": 0, "sequences": [NAME]}
            q = rows(rng, 1, 2 * HEADS)
            both = [await one.ok("decode", read, q=q) for one in (door, other)]
            np.testing.assert_array_equal(both[0].arrays["o"], both[1].arrays["o"])
            gathered = (await other.ok("gather", read | {"dtype": "fp32"})).arrays["k"]
            np.testing.assert_array_equal(gathered[-3:], k)
        fork = {"id": "fork", "parent": NAME, "length": 0}
        await cluster.ok("create_sequences", {"sequences": [fork]})
        await second.ok("truncate", {"id": NAME, "length": 0})
        reply = (await cluster.ok("get_sequence", {"id": NAME})).fields
        assert reply["lengths"] == [0] * LAYERS
        k = rows(rng, 2)
        for door in (second, cluster):
            await door.ok("append", {"layer": 0, "sequences": ["fork"]}, k=k[:1], v=k[:1])
            await door.ok("append", {"layer": 1, "sequences": ["fork"]}, k=k[:1], v=k[:1])
        for door, name in ((second, "a"), (cluster, "b")):
            asked = {"sequences": [{"id": name, "parent": "fork"}]}
            made = (await door.ok("create_sequences", asked)).fields["sequences"]
            assert made[0]["lengths"] == [2, 2], "a fork has all of its parent"


async def test_concurrent_appends_and_truncations_leave_prefixes_of_appends_in_one_order(
    cluster: Cluster,
) -> None:
    """Every row is its append's number and its place in it, so that a torn append is seen."""

    async def append(door: Cluster, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in range(16):
            count = int(rng.integers(1, 2 * PAGE))
            k = np.zeros((count, HEADS, DIM), FLOAT)
            k[:, 0, 0], k[:, 0, 1] = 16 * seed + number, np.arange(count)
            for layer in range(LAYERS):
                fields = {"layer": layer, "sequences": [NAME], "append_indptr": [0, count]}
                reply = await door.call("append", fields, k=k, v=k)
                assert reply.status in (200, 409), reply

    async def truncate(door: Cluster, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(16):
            length = (await door.ok("get_sequence", {"id": NAME})).fields["length"]
            shorter = int(rng.integers(0, length + 1))
            reply = await door.call("truncate", {"id": NAME, "length": shorter})
            assert reply.status in (200, 409, 422), reply

    async with another_door(cluster) as second:
        await cluster.ok("create_sequences", {"sequences": [{"id": NAME, "ranks": 2}]})
        work = [append(cluster, 1), append(second, 2), truncate(cluster, 3), truncate(second, 4)]
        await asyncio.gather(*work)
        for layer in range(LAYERS):
            fields = {"layer": layer, "sequences": [NAME], "dtype": "fp32"}
            one, other = [(await door.ok("gather", fields)).arrays for door in (cluster, second)]
            np.testing.assert_array_equal(one["k"], one["v"])
            np.testing.assert_array_equal(one["k"], other["k"])
            number, place = one["k"][:, 0, 0], one["k"][:, 0, 1]
            begins = np.flatnonzero(np.diff(number, prepend=-1.0) != 0)
            assert not place[begins].any(), "an append without its cluster rows"
            follows = np.setdiff1d(np.arange(len(place)), begins)
            assert (place[follows] == place[follows - 1] + 1).all(), "rows in the wrong order"


async def engine_lost(door: Cluster, left: int) -> None:
    await door.until(lambda: len(door.router.members.engines) == left, "engine lost")


@pytest.mark.long
@THREE
async def test_a_rank_that_dies_under_two_doors_leaves_no_pages_behind(cluster: Cluster) -> None:
    engines = cluster.engines
    async with another_door(cluster) as second:
        await cluster.ok("create_sequences", {"sequences": [{"id": NAME, "ranks": 2}]})
        tags = (cluster.router.locator.tags.tag(("default", NAME)) or "").split("-")
        victim = next(one for one in cluster.router.members.engines if one.tag == tags[1])
        hammer = Hammer([cluster, second])
        asking = [asyncio.ensure_future(hammer.write(seed, 60)) for seed in range(1, 5)]
        await asyncio.sleep(0.3)
        engines.kill(victim.name)
        await asyncio.gather(*asking)
        codes = {one["code"] for one in hammer.refused}
        assert codes <= {"lost_sequence", "sequence_taken", "not_ready"}, hammer.refused
        for door in (cluster, second):
            await engine_lost(door, 2)
            lost = await door.call("get_sequence", {"id": NAME})
            assert lost.status == 410, lost
        async with asyncio.timeout(20):
            while await cluster.free_pages() != 2 * PAGES:
                await asyncio.sleep(0.05)
        engines.start(victim.name)
        await cluster.until(lambda: len(cluster.router.members.engines) == 3, "engine back")


async def test_a_door_finds_a_whole_sequence_of_an_id_that_it_knows_as_sharded(
    cluster: Cluster,
) -> None:
    await cluster.ok("create_sequences", {"sequences": [{"id": "same", "ranks": 2}]})
    k = np.zeros((1, HEADS, DIM), FLOAT)
    fields = {"layer": 0, "sequences": ["same"]}
    await cluster.ok("append", fields, k=k, v=k)
    async with another_door(cluster) as second:
        await second.ok("append", fields, k=k, v=k)  # the first door has to claim it again
        await second.ok("delete_sequence", {"id": "same"})
        await second.ok("create_sequences", {"sequences": [{"id": "same"}]})
        reply = await cluster.ok("append", fields, k=k, v=k)
        assert reply.fields["lengths"] == [1]


async def test_a_truncation_that_another_door_completes_does_not_cut_what_comes_after_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"layer": 0, "sequences": [NAME], "append_indptr": [0, PAGE]}
    k, broadcast, appended = rows(np.random.default_rng(4), PAGE), Ranks.broadcast, list[Any]()
    async with another_door(cluster) as second:
        await cluster.ok("create_sequences", {"sequences": [{"id": NAME, "ranks": 2}]})
        await cluster.ok("append", fields, k=k, v=k)
        await cluster.ok("append", fields | {"layer": 1}, k=k, v=k)

        async def late(ranks: Ranks, call: Call, *rest: Any) -> Any:
            if call.operation is TRUNCATE and not appended:  # one rank has cut it
                appended.append(await second.ok("append", fields, k=k[:1], v=k[:1]))
            return await broadcast(ranks, call, *rest)

        fields["append_indptr"] = [0, 1]
        monkeypatch.setattr(Ranks, "broadcast", late)
        cut = await cluster.ok("truncate", {"id": NAME, "length": 0})
        assert (appended[0].fields["lengths"], cut.fields["lengths"]) == ([1], [0, 0])
        for door in (cluster, second):
            assert (await door.fields("get_sequence", {"id": NAME}))["lengths"] == [1, 0]
        await cluster.ok("delete_sequence", {"id": NAME})


@pytest.mark.parametrize("operation", ["get_sequence", "gather", "append", "delete_sequence"])
async def test_a_door_finds_shards_that_another_door_has_made_at_the_same_engines_in_another_order(
    cluster: Cluster, operation: str
) -> None:
    rng = np.random.default_rng(3)
    old, k, row = rows(rng, 2 * PAGE), rows(rng, 2 * PAGE), rows(rng, 1)
    whole = {"layer": 0, "sequences": [NAME], "append_indptr": [0, 2 * PAGE]}
    read = {"layer": 0, "sequences": [NAME], "dtype": "fp32"}
    async with another_door(cluster) as second:
        await cluster.ok("create_sequences", {"sequences": [{"id": NAME, "ranks": 2}]})
        await cluster.ok("append", whole, k=old, v=old)
        await second.ok("delete_sequence", {"id": NAME})
        await make_in_reverse(second, cluster)
        await second.ok("append", whole, k=k, v=k)
        if operation == "append":
            await cluster.ok("append", {"layer": 1, "sequences": [NAME]}, k=row, v=row)
        if operation in ("append", "gather"):
            np.testing.assert_array_equal((await cluster.ok("gather", read)).arrays["k"], k)
        else:
            await cluster.ok(operation, {"id": NAME})
        left = [] if operation == "delete_sequence" else [NAME]
        assert await second.ids() == left
        await second.ok("delete_sequences", {"ids": left})


async def make_in_reverse(door: Cluster, other: Cluster) -> None:
    """Makes the sequence NAME at the engines where `other` knows it, in the opposite order."""
    tag = other.router.locator.tags.tag(("default", NAME)) or ""
    home = door.router.members.home(BETWEEN.join(reversed(tags_of(tag))))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Placer, "place_shards", lambda *_: home)
        await door.ok("create_sequences", {"sequences": [{"id": NAME, "ranks": 2}]})
