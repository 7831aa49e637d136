"""Sharded sequences: results equal one engine's, and no change is left half done."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from service.cluster.membership import members
from service.cluster.membership.engine import Engine
from service.cluster.sharded.ranks import Ranks
from service.operations.rows import APPEND
from service.tenants import OPEN
from tests.cluster.checked_calls import Book
from tests.cluster.harness import DIM, HEADS, LAYERS, PAGE, PAGES, THREE, Cluster, rows, run
from tests.cluster.local_engines import LocalEngines

Array = Any
SCALE = DIM**-0.5


async def test_results_equal_one_engine_at_every_offset_in_a_page(cluster: Cluster) -> None:
    book = Book(cluster)
    await book.create("a", ranks=2)
    await book.create("plain")
    for count in (0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE - 1, 2):
        both = {"causal": count % 2 == 1, "window_left": (-1, 0, 5)[count % 3]}
        for layer in range(LAYERS):
            await book.attend(["a", "plain"], [count, 2], layer, appends=True, **both)
            await book.attend(["a"], [1], layer, appends=True, lse_base="2")
            await book.attend(["plain", "a"], [1, 1], layer, appends=False)
        await book.check("a")
    listed = (await cluster.ok("list_sequences", {"limit": 2})).fields["sequences"]
    assert [one["id"] for one in listed] == ["a", "plain"]
    assert listed[0]["length"] == len(book.held["a"][0][0])
    for name, expected in (("a", 1), ("unknown", 0), ("plain", 1)):
        reply = await cluster.ok("delete_sequences", {"ids": [name]})
        assert reply.fields == {"num_deleted": expected}


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_cut_that_an_engine_falls_silent_in_may_have_been_applied(
    cluster: Cluster, resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine replies again before the call ends."""
    book = Book(cluster)
    await book.create("a", ranks=2)
    for layer in range(LAYERS):
        await book.attend(["a"], [2 * PAGE + 1], layer, appends=True, causal=True)
    members, ask, replied = cluster.router.members, Engine.ask, list[Engine]()

    async def ask_once(engine: Engine, call: Any, *given: Any) -> Any:
        reply = await ask(engine, call, *given)
        if call.operation.name == "truncate":
            replied.append(engine)
            for one in replied:
                one.is_silent = not resumes or len(replied) == 1
        return reply

    monkeypatch.setattr(Engine, "ask", ask_once)
    status, code, _ = await cluster.error("truncate", {"id": "a", "length": 1})
    monkeypatch.undo()
    for engine in members.engines:
        engine.is_silent = False
    assert (status, code) == (504, "deadline_exceeded")
    await cluster.until(lambda: all(one.is_ready for one in members.engines), "engines reply")
    assert (await cluster.ok("get_sequence", {"id": "a"})).fields["length"] == 1
    await cluster.ok("delete_sequence", {"id": "a"})


async def test_sinks_enter_once_over_all_ranks(cluster: Cluster) -> None:
    sinks = np.linspace(-1, 3, 2 * HEADS).astype(np.float32)
    book = Book(cluster)
    await book.create("a", ranks=2)
    for name in ("b", "c", "d"):
        await book.create(name)
    for count in (3, PAGE + 1, 2 * PAGE):
        await book.attend(["a", "b"], [count, 2], 0, appends=True, causal=True, sinks=sinks)
        await book.attend(["a"], [1], 0, appends=True, lse_base="2", sinks=sinks)
        await book.attend(["b", "c", "d"], [1, 1, 1], 0, appends=True, sinks=sinks)
    sinks[1] = np.nan
    q = np.zeros((1, 2 * HEADS, DIM), np.float32)
    for name in ("a", "b"):
        fields = {"layer": 0, "sequences": [name]}
        status, code, _ = await cluster.error("decode", fields, q=q, sinks=sinks)
        assert (status, code) == (422, "invalid_request")


CHOICES = st.tuples(
    st.sampled_from(["append", "decode", "prefill", "fork", "truncate", "read"]),
    st.integers(0, 3 * PAGE),
    st.integers(0, 10**6),
    st.integers(-1, 2 * PAGE + 1),
)


@pytest.mark.long
@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(CHOICES, min_size=8, max_size=20))
def test_results_equal_one_engine_in_any_order_of_calls(
    two_engines: LocalEngines, steps: list[tuple[str, int, int, int]]
) -> None:
    async def test(cluster: Cluster) -> None:
        book = Book(cluster)
        await cluster.ok("delete_sequences", {"prefix": ""})  # of an example that failed
        await book.create("s0", ranks=2)
        for number, (kind, count, chosen, window) in enumerate(steps):
            names = sorted(book.held)
            name = names[chosen % len(names)]
            length = len(book.held[name][0][0])
            if kind == "append":
                await book.append(name, count)
            elif kind == "fork" and len(names) < 5:
                await book.fork(name, f"s{number + 1}", chosen % (length + 1))
            elif kind == "truncate":
                await book.truncate(name, chosen % (length + 1))
            elif kind == "read":
                await book.check(name)
            else:
                decodes = kind == "decode"
                counts = [1] * len(names) if decodes else [count, *[2] * (len(names) - 1)]
                how = {"window_left": window} | ({} if decodes else {"causal": True})
                for layer in range(LAYERS):
                    appends = chosen % 2 == 0
                    await book.attend(names, counts, layer, appends=appends, **how)
        for name in book.held:
            await book.check(name)

    run(two_engines, test)


async def test_an_append_that_one_rank_refuses_is_undone_at_the_other(cluster: Cluster) -> None:
    book = Book(cluster)
    await book.create("a", ranks=2)
    await book.append("a", 2 * PAGE + 1)
    # fill the engine of rank 1 except for one page
    tags = cluster.router.locator.tags.tag(("default", "a")).split("-")
    full = next(e for e in cluster.router.members.engines if e.tag == tags[1])
    filler = {"sequences": [{"id": "filler"}]}
    for engine in cluster.router.members.engines:
        if engine is not full:
            engine.is_leaving = True
    await cluster.ok("create_sequences", filler)
    for engine in cluster.router.members.engines:
        engine.is_leaving = False
    taken = (PAGES - 1) * PAGE
    fields = {"layer": 0, "sequences": ["filler"], "append_indptr": [0, taken]}
    await cluster.ok("append", fields, k=rows(book.rng, taken), v=rows(book.rng, taken))
    free = await cluster.free_pages()
    count = 9 * PAGE
    new = {"k": rows(book.rng, count), "v": rows(book.rng, count)}
    fields = {"layer": 0, "sequences": ["a"], "append_indptr": [0, count]}
    reply = await cluster.call("append", fields, **new)
    assert (reply.status, reply.fields["code"]) == (507, "out_of_pages"), reply
    assert await cluster.free_pages() == free
    await book.check("a")
    await cluster.ok("delete_sequence", {"id": "filler"})
    for pause in (0.0, 0.0, 0.001, 0.003, 0.01):  # a caller that cancels at any moment
        asking = asyncio.ensure_future(cluster.call("append", fields, **new))
        await asyncio.sleep(pause)
        if asking.cancel():
            with suppress(asyncio.CancelledError):
                await asking
        else:
            await book.truncate("a", 2 * PAGE + 1)
        await book.check("a")
    await book.append("a", count)
    await book.check("a")


async def test_unsupported_operations_are_refused_and_change_nothing(cluster: Cluster) -> None:
    book = Book(cluster)
    await book.create("a", ranks=2)
    await book.append("a", PAGE + 2)
    free = await cluster.free_pages()
    q = rows(book.rng, 1, 2 * HEADS)
    level = {"sequences": ["a"], "qo_indptr": [0, 1]}
    ids = list(range(PAGE))
    one, new = {"sequences": ["a"]}, "create_sequences"
    at_0, elsewhere = {"layer": 0, "sequences": ["a"]}, "takes those on one"
    named = one | {"token_ids": ids, "names_indptr": [0, PAGE]}
    fork, shard = {"parent": "a", "length": PAGE + 3}, {"shard": {"rank": 0, "ranks": 2}}
    both = {name: np.zeros((2, 1, HEADS, DIM), np.float32) for name in "kv"}
    refused: list[tuple[str, dict[str, Any], dict[str, Array], int, str]] = [
        (new, {"sequences": [{"ranks": 3}]}, {}, 422, "at most 2"),
        (new, {"sequences": [{"id": "a", "ranks": 2}]}, {}, 409, "exists"),
        (new, {"sequences": [{"id": "a"}]}, {}, 409, "exists"),
        (new, {"sequences": [shard]}, {}, 422, "use ranks instead"),
        (new, {"sequences": [fork]}, {}, 422, "the parent's length"),
        ("truncate", {"id": "a", "length": PAGE + 3}, {}, 422, "the sequence's length"),
        ("truncate", {"id": "a", "length": 1, "keep": [3]}, {}, 422, "are on one engine"),
        ("truncate_sequences", one | {"lengths": [1]}, {}, 422, elsewhere),
        ("commit_sequences", named, {}, 422, elsewhere),
        ("append", one | {"layers": [0, 1]}, both, 422, "are on one engine"),
        ("commit", {"id": "a", "token_ids": ids}, {}, 422, elsewhere),
        ("page_table", one, {}, 422, elsewhere),
        ("cascade", {"layer": 0, "levels": [level]}, {"q": q}, 422, elsewhere),
        ("decode", at_0 | {"offsets": [3]}, {"q": q}, 409, "a has 6"),
        ("decode", at_0 | {"sequences": ["a", "no"]}, {"q": np.tile(q, (2, 1, 1))}, 404, "no"),
    ]
    for name, fields, arrays, status, words in refused:
        reply = await cluster.call(name, fields, **arrays)
        assert reply.status == status and words in reply.fields["detail"], (name, reply)
    assert await cluster.free_pages() == free
    await book.check("a")


async def test_a_door_without_a_cache_finds_all_shards_and_cuts_an_unfinished_append(
    cluster: Cluster,
) -> None:
    book = Book(cluster)
    await book.create("a", ranks=2)
    await book.append("a", 3 * PAGE + 1)
    router = cluster.router
    home = router.members.home(router.locator.tags.tag(("default", "a")) or "")
    assert isinstance(home, Ranks)
    # a door dies after one of the engines has appended
    engine = home.engines[0]
    new = {"k": rows(book.rng, PAGE), "v": rows(book.rng, PAGE)}
    fields = {
        "layer": 0,
        "sequences": ["a"],
        "append_indptr": [0, PAGE],
        "offsets": [3 * PAGE + 1],
        "epochs": [home.books["default", "a"].epoch],
    }
    await engine.ask(engine.own(APPEND, OPEN), fields, new)
    router.locator.tags.known.clear()
    router.locator.batches.clear()
    router.members.ranks.clear()
    await book.check("a")
    await book.attend(["a"], [1], 0, appends=True)
    await book.check("a")


@pytest.mark.long
@THREE
async def test_a_rank_that_dies_loses_its_sequences_and_no_others(cluster: Cluster) -> None:
    engines = cluster.engines
    book = Book(cluster)
    homes = {}
    for name in ("a", "b", "c"):
        await book.create(name, ranks=2)
        await book.append(name, 3 * PAGE)
        tags = cluster.router.locator.tags.tag(("default", name)).split("-")
        homes[name] = {
            engine.name for engine in cluster.router.members.engines if engine.tag in tags
        }
    await book.create("d", ranks=3)
    await book.append("d", 4 * PAGE)
    victim = sorted(homes["a"])[0]
    lost = [name for name in homes if victim in homes[name]] + ["d"]
    kept = [name for name in homes if name not in lost]
    q = rows(book.rng, 1, 2 * HEADS)
    asking = [
        asyncio.ensure_future(cluster.call("decode", {"layer": 0, "sequences": [name]}, q=q))
        for name in lost * 20
    ]
    await asyncio.sleep(0.01)
    engines.kill(victim)
    answers = await asyncio.gather(*asking)
    assert {reply.status for reply in answers} <= {200, 410, 503}, answers
    await cluster.until(lambda: len(cluster.router.members.engines) == 2, "engine lost")
    for name in lost:
        reply = await cluster.call("decode", {"layer": 0, "sequences": [name]}, q=q)
        assert (reply.status, reply.fields["sequences"]) == (410, [name]), reply
    for name in kept:
        await book.check(name)
    pages = sum(-(-len(book.held[name][0][0]) // PAGE) for name in kept)
    async with asyncio.timeout(20):
        while await cluster.free_pages() != 2 * PAGES - pages:
            await asyncio.sleep(0.05)
    engines.start(victim)
    await cluster.until(lambda: len(cluster.router.members.engines) == 3, "engine back")
    await book.create("a", ranks=3)  # the id is free again
    await book.append("a", 5 * PAGE)
    await book.check("a")


@THREE
async def test_more_ranks_than_engines_that_accept_sequences_get_503(cluster: Cluster) -> None:
    book = Book(cluster)
    await cluster.ok("drain_engine", {"name": "engine-2"})
    await cluster.until(lambda: cluster.router.drains.tasks["engine-2"].done(), "drained")
    for ranks, status, code in ((3, 503, "not_ready"), (4, 422, "invalid_request")):
        new = {"sequences": [{"id": "a", "ranks": ranks}]}
        reply = await cluster.call("create_sequences", new)
        assert (reply.status, reply.fields["code"]) == (status, code), reply
    await cluster.ok("drain_engine", {"name": "engine-2", "stop": True})
    members = cluster.router.members
    await cluster.until(lambda: all(one.takes_new for one in members.engines), "all engines")
    await book.create("a", ranks=3)


@THREE
async def test_engines_that_ids_name_in_any_order_use_bounded_memory(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MOST_RANKS", 4)
    book, known = Book(cluster), cluster.router.members.ranks
    await book.create("a", ranks=2)
    await book.append("a", PAGE)
    own = cluster.router.locator.tags.tag(("default", "a"))
    tags = [one.tag for one in cluster.router.members.engines]
    for count in (2, 3):
        for some in itertools.product(tags, repeat=count):
            name = f"x.{'-'.join(some)}"
            reply = await cluster.call("get_sequence", {"id": name})
            assert reply.status == 404, reply
            assert len(known) <= 4 and own in known
    assert all(len(set(tag.split("-"))) == len(tag.split("-")) for tag in known)
    await book.check("a")
