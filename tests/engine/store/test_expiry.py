"""What long work reads while expiry, deletion or a move ends its sequences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.engine.handlers import exports
from tests.engine.exports import ask_part, bring, export, grow, held
from tests.engine.harness import (
    Caller,
    NewCall,
    Refused,
    code,
    creation,
    fake_engine,
    outcome,
    queries,
    rows,
    unsliced,
    until,
)
from tests.engine.poison import has_poison, poison_freed_pages
from tests.engine.pool_model import CPU_GEOMETRY, cpu_engine

LAYERS = CPU_GEOMETRY.num_layers
LENGTH = 43
PROMPT = list(range(40))


async def ok(caller: Caller, name: str, **fields: Any) -> dict[str, Any]:
    reply = await outcome(caller.call(name, fields))
    assert not isinstance(reply, Exception), reply
    return dict(reply.fields)


async def begin(caller: Caller, monkeypatch: pytest.MonkeyPatch, ttl_s: float | None = None) -> Any:
    """`a` with its tokens, and `b` beside it; what `a` holds."""
    poison_freed_pages(monkeypatch, caller.engine.store)
    monkeypatch.setattr(exports, "MOVED_AT_ONCE", 1)
    new = [{"id": "a", "ttl_s": ttl_s}, {"id": "b"}]
    with unsliced(caller):
        await ok(caller, "create_sequences", sequences=new)
        for name in "ab":
            await grow(caller, name, (LENGTH,) * LAYERS, CPU_GEOMETRY)
        return await held(caller, "a", LAYERS)


async def taken_over(caller: Caller, seed: int) -> None:
    """Another sequence takes whatever pages have become free, and is looked at."""
    name = f"n{seed}"
    await ok(caller, "create_sequences", sequences=[{"id": name}])
    await grow(caller, name, (CPU_GEOMETRY.page_size,) * LAYERS, CPU_GEOMETRY, seed=100 + seed)
    await ok(caller, "get_sequence", id=name)


LONG = ("export", "gather", "prefill", "fork")
ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "expiry": ("get_sequence", {"id": "b"}),
    "deleted": ("delete_sequence", {"id": "a"}),
    "deleted by id": ("delete_sequences", {"ids": ["a"]}),
    "deleted by prefix": ("delete_sequences", {"prefix": "a"}),
    "cut": ("truncate", {"id": "a", "length": 0}),
    "committed elsewhere": ("commit", {"id": "a", "token_ids": PROMPT}),
    "cleared": ("clear", {}),
    "evicted": ("evict", {"num_pages": 96}),
    "drained": ("drain_engine", {"name": "engine"}),
}


READINGS = [
    pytest.param(long, end, marks=() if number % len(LONG) == at else pytest.mark.long)
    for number, end in enumerate(ENDS)
    for at, long in enumerate(LONG)
]


@pytest.mark.parametrize(("long", "end"), READINGS)
@cpu_engine(slice_ms=1e-6)
async def test_long_work_reads_the_rows_that_were_there_when_it_began(
    caller: Caller, long: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way to end a sequence comes while work of many slices reads it; freed pages are
    overwritten at once."""
    ttl_s = 1.0 if end == "expiry" else None

    before = await begin(caller, monkeypatch, ttl_s)
    if end == "committed elsewhere":
        await ok(caller, "commit", id="b", token_ids=PROMPT)
    q = queries(5, LENGTH, CPU_GEOMETRY)
    call = {
        "export": NewCall("export_sequence", {"id": "a"}),
        "gather": NewCall("gather", {"layer": 0, "sequences": ["a"], "dtype": "fp32"}),
        "prefill": NewCall(
            "prefill", {"layer": 0, "sequences": ["a"], "qo_indptr": [0, LENGTH]}, {"q": q}
        ),
        "fork": creation(*({"id": f"f{n}", "parent": "a"} for n in range(40))),
    }[long]
    if long == "export":
        reply = (await caller.submit(call)).fields
        header = reply["header"]
        keys = {key: header[key] for key in ("generation", "part_bytes")}
        call = call.but(part=0, before=reply["digest"], **keys)
    expected = None
    if long == "prefill":
        expected = np.array((await caller.submit(call, room=2**20)).o)
    if end == "expiry":
        caller.engine.store.tree.books.leaf("a")
        await asyncio.sleep(0.95)
    async with caller.another() as other:
        work = caller.attempt(call, room=2**20)
        for _ in range(3):
            await asyncio.sleep(0.001)
        name, fields = ENDS[end]
        ending = other.attempt(NewCall(name, fields))
        for seed in range(3):
            await taken_over(other, seed) if end != "drained" else None
        reply = await work
        ended = await ending
    assert isinstance(ended, Refused) or ended.status < 300, ended
    if isinstance(reply, Exception):
        assert code(reply) in ("unknown_sequence", "not_ready"), reply
    elif long == "prefill":
        # slices follow the measured pace, so two calls may differ in their last bits
        np.testing.assert_allclose(reply.o, expected, atol=2e-6, rtol=2e-6)
    elif long == "fork":
        forked = await held(caller, "f39", LAYERS)
        assert all(np.array_equal(a, b) for a, b in zip(forked, before, strict=True))
    else:
        assert not has_poison(reply.tensors["k"], reply.tensors["v"])
        assert np.array_equal(reply.tensors["k"][:LENGTH], before[0])
        assert np.array_equal(reply.tensors["v"][:LENGTH], before[1])
    assert (await caller.pool())["integrity"] == "ok"


@cpu_engine(slice_ms=1e-6)
async def test_a_cut_reads_shared_pages_before_it_frees_them(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence that shared them is deleted while rows of the cut move."""
    before = await begin(caller, monkeypatch)
    await caller.submit(creation({"id": "fork", "parent": "a"}))
    kept = list(range(9, LENGTH, 2))
    async with caller.another() as other:
        work = caller.attempt(NewCall("truncate", {"id": "fork", "length": 7, "keep": kept}))
        await asyncio.sleep(0.002)
        await ok(other, "delete_sequence", id="a")
        assert not isinstance(reply := await work, Exception), reply
    stays = [*range(7), *kept]
    found = await held(caller, "fork", LAYERS)
    assert all(np.array_equal(a, b[stays]) for a, b in zip(found, before, strict=True))
    assert (await caller.pool())["integrity"] == "ok"


@cpu_engine(slice_ms=1e-6)
async def test_work_ends_when_its_sequence_has_changed(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where nothing held the sequence back: no further row of it is read."""
    await begin(caller, monkeypatch)
    reply = (await caller.call("export_sequence", {"id": "a"})).fields
    store, seen = caller.engine.store, 0
    read_stored = store.backend.read_stored

    def read_and_free(*args: Any) -> Any:
        nonlocal seen
        seen += 1
        done = read_stored(*args)
        if seen == 3:
            store.tree.free(("a",))
        return done

    monkeypatch.setattr(store.backend, "read_stored", read_and_free)
    part = await outcome(ask_part(caller, "a", reply["header"], 0, reply["digest"]))
    assert (code(part), seen) == ("internal", 3)
    assert (await caller.pool())["integrity"] == "ok"


@cpu_engine()
async def test_an_imported_sequence_expires_when_its_own_time_is_over(
    caller: Caller, later: Callable[[float], None]
) -> None:
    new = [{"id": "a", "ttl_s": 60.0}]
    await ok(caller, "create_sequences", sequences=new)
    await grow(caller, "a", (9,) * LAYERS, CPU_GEOMETRY)
    given = await export(caller, "a")
    await bring(caller, given, "c", idle_s=30.0)
    later(40.0)
    view = await ok(caller, "get_sequence", id="c")
    assert view["ttl_s"] == 60.0, "the time of the import itself is over, not its own"
    later(61.0)
    for name in "ac":
        reply = await outcome(caller.call("get_sequence", {"id": name}))
        assert code(reply) == "unknown_sequence", name
    numbers = await caller.pool()
    assert (numbers["sequences"], numbers["referenced"], numbers["imports"]) == (0, 0, 0)


@cpu_engine()
async def test_an_import_ends_by_itself(
    caller: Caller,
) -> None:
    await caller.create("a")
    await grow(caller, "a", (9,) * LAYERS, CPU_GEOMETRY)
    given = await export(caller, "a")
    await caller.submit(given.begin("c", idle_s=0.05))
    store = caller.engine.store
    await until(lambda: "~c" not in store.tree.books)  # no calls: the engine wakes up by itself
    assert (await caller.pool())["imports"] == 0
    await ok(caller, "get_sequence", id="a")


WRITING = {
    "import": ["cancel", "idle", "deleted by prefix", "death"],
    "append": ["deleted", "deleted by prefix", "cut", "expiry", "death"],
}


@pytest.mark.parametrize(
    ("work", "end"), [(work, end) for work, ends in WRITING.items() for end in ends]
)
@cpu_engine(slice_ms=1e-6)
async def test_long_work_writes_no_page_that_another_sequence_has_now(
    caller: Caller, work: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a sequence ends while it is written to, its neighbours keep their rows."""
    await begin(caller, monkeypatch)
    given = await export(caller, "a")
    backend = caller.engine.store.backend
    for name in ("append", "write_stored"):
        slow_down(backend, name, monkeypatch)
    await ok(caller, "create_sequences", sequences=[{"id": "d", "ttl_s": 0.1}])
    async with caller.another() as writer:
        if work == "import":
            idle_s = 0.05 if end == "idle" else 9.0
            await writer.submit(given.begin("d2", idle_s=idle_s, share=False))
            call = given.part("d2", 0)
        else:
            fields = {"layer": 0, "sequences": ["d"], "append_indptr": [0, LENGTH]}
            k, v = (rows(seed, LENGTH, CPU_GEOMETRY) for seed in (71, 72))
            call = NewCall("append", fields, {"k": k, "v": v})
        writing = writer.attempt(call)
        await asyncio.sleep(0.01)
        ending = {
            "cancel": NewCall("cancel_import", {"id": "d2"}),
            "deleted": NewCall("delete_sequence", {"id": "d"}),
            "deleted by prefix": NewCall("delete_sequences", {"prefix": "d"}),
            "cut": NewCall("truncate", {"id": "d", "length": 0}),
        }.get(end)
        if end == "death":
            writer.road.close()
        elif ending is not None:
            asyncio.get_running_loop().create_task(outcome(caller.submit(ending)))
        for seed in range(4):
            await taken_over(caller, seed)
        await outcome(writing)
    await until(lambda: not caller.engine.jobs)
    for seed in range(4):
        grown = [
            rows(100 + seed + 2 * layer + half, CPU_GEOMETRY.page_size, CPU_GEOMETRY)
            for layer in range(LAYERS)
            for half in (0, 1)
        ]
        found = await held(caller, f"n{seed}", LAYERS)
        assert all(np.array_equal(a, b) for a, b in zip(found, grown, strict=True)), seed
    assert (await caller.pool())["integrity"] == "ok"


def slow_down(backend: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call of a backend's method take a millisecond more."""
    method = getattr(backend, name)

    def slowly(*args: Any) -> Any:
        time.sleep(0.001)
        return method(*args)

    monkeypatch.setattr(backend, name, slowly)


@fake_engine()
async def test_what_expires_without_a_call_is_in_the_metrics_soon(caller: Caller) -> None:
    await caller.submit(creation({"id": "a", "ttl_s": 0.3}))
    await until(lambda: caller.metric("attnd_sequences ") == 1)
    async with asyncio.timeout(10):
        await until(lambda: caller.metric("attnd_sequences ") == 0)
