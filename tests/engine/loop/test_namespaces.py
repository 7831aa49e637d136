"""Namespaces in the engine: visibility of sequences, and the order of turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.engine.loop import job as work
from service.errors import NotReady
from service.keys import line_of
from service.road.caller_end.caller import RoadCaller
from tests.engine.fake_backend import GEOMETRY, FakeBackend
from tests.engine.harness import (
    ARENA_BYTES,
    Caller,
    NewCall,
    Refused,
    append,
    code,
    create,
    decode,
    delete,
    fake_engine,
    gather,
    no_turns,
    outcome,
    queries,
    truncate,
    until,
    with_engine,
)
from tests.engine.long_calls import SLICE_MS, finish, long_prefill

KEYS = {
    "ours": ("ours", ["read", "append"]),
    "ours too": ("ours", ["read", "append"]),
    "theirs": ("theirs", ["read", "append"]),
    "reader": ("ours", ["read"]),
    "writer": ("ours", ["append"]),
    "operator": ("ops", ["read", "admin"]),
}


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("\n".join(line_of(key, *held) for key, held in KEYS.items()))
    return str(path)


@asynccontextmanager
async def session(caller: Caller, key: str) -> AsyncIterator[Caller]:
    """Another session with the same engine, by one of the keys."""
    road = await RoadCaller.connect(caller.running.path, ARENA_BYTES, key=key)
    try:
        yield Caller(caller.running, road)
    finally:
        road.close()


@fake_engine(key="ours")
async def test_the_same_ids_in_two_namespaces_are_different_sequences(
    ours: Caller, keys_file: str
) -> None:
    async with session(ours, "theirs") as theirs:
        await create(ours, "a", "b")
        await create(theirs, "a")
        await ours.submit(append("a", 5))
        await theirs.submit(append("a", 3, seed=9))
        assert (await ours.call("get_sequence", {"id": "a"})).fields["length"] == 0
        mine, other = [await one.submit(gather("a")) for one in (ours, theirs)]
        assert mine.fields == {"kv_indptr": [0, 5]} and other.fields == {"kv_indptr": [0, 3]}
        assert not np.array_equal(mine.tensors["k"][:3], other.tensors["k"])
        await theirs.submit(delete("a"))
        assert (await ours.submit(gather("a"))).fields == {"kv_indptr": [0, 5]}


def everything_about(name: str) -> list[NewCall]:
    """Every operation that names a sequence, of this one."""
    q = {"q": queries(0, 1)}
    return [
        NewCall("get_sequence", {"id": name}, {}),
        NewCall("page_table", {"sequences": [name]}, {}),
        NewCall("create_sequences", {"sequences": [{"parent": name}]}, {}),
        NewCall(
            "create_sequences", {"sequences": [{"id": "new", "parent": name, "length": 1}]}, {}
        ),
        append(name, 1),
        append(name, 1, offsets=[0]),
        decode(name),
        decode(name, new=True),
        NewCall("prefill", {"layer": 0, "sequences": [name], "qo_indptr": [0, 1]}, q),
        NewCall("cascade", {"layer": 0, "levels": [{"sequences": [name], "qo_indptr": [0, 1]}]}, q),
        gather(name),
        NewCall("export_sequence", {"id": name}, {}),
        truncate(name, 0),
        delete(name),
    ]


@fake_engine(key="ours")
async def test_a_foreign_sequence_is_what_never_was(ours: Caller, keys_file: str) -> None:
    async with session(ours, "theirs") as theirs:
        await create(ours, "secret")
        await ours.submit(append("secret", 5))
        for foreign, absent in zip(
            everything_about("secret"), everything_about("absent"), strict=True
        ):
            reply, other = [await outcome(theirs.submit(one)) for one in (foreign, absent)]
            assert isinstance(reply, Refused) and isinstance(other, Refused), foreign
            assert (reply.status, reply.code) == (404, "unknown_sequence")
            as_absent = str(other.problem).replace("absent", "secret")
            assert str(reply.problem) == as_absent, foreign.name
        assert (await theirs.call("list_sequences", {})).fields["sequences"] == []
        assert (await ours.submit(gather("secret"))).fields == {"kv_indptr": [0, 5]}


@fake_engine(key="ours")
async def test_lists_forks_and_answers_show_names_as_their_callers_gave_them(
    ours: Caller, keys_file: str
) -> None:
    async with session(ours, "theirs") as theirs:
        await create(theirs, "0", "a", "m", "z")
        await create(ours, *(f"s-{number}" for number in range(5)))
        fork = {"sequences": [{"id": "fork", "parent": "s-1"}, {"parent": "s-2"}]}
        made = (await ours.call("create_sequences", fork)).fields["sequences"]
        assert [one["parent"] for one in made] == ["s-1", "s-2"]
        assert made[0]["id"] == "fork" and made[1]["id"].startswith("seq-")
        listed: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = (await ours.call("list_sequences", {"limit": 2} | after)).fields
            listed += [one["id"] for one in page["sequences"]]
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        wanted = ["fork", *(f"s-{number}" for number in range(5)), made[1]["id"]]
        assert listed == sorted(wanted)


@fake_engine(key="ours")
async def test_errors_name_sequences_as_their_callers_do(ours: Caller, keys_file: str) -> None:
    cases: list[tuple[NewCall, dict[str, Any]]] = [
        (NewCall("create_sequences", {"sequences": [{"id": "a"}]}, {}), {"sequences": ["a"]}),
        (append("a", 1, offsets=[7]), {"lengths": {"a": 5}}),
        (decode("a", "b"), {"sequences": ["b"]}),
        (truncate("a", 9), {"field": "length", "value": 9}),
        (
            NewCall("create_sequences", {"sequences": [{"parent": "a"}]}, {}),
            {"field": "parent", "value": "a"},
        ),
        (decode("a", "a"), {"field": "sequences", "value": "a"}),
    ]

    await create(ours, "a")
    await ours.submit(append("a", 5))
    for call, numbers in cases:
        reply = await outcome(ours.submit(call))
        assert isinstance(reply, Refused), (call, reply)
        assert {name: reply.problem[name] for name in numbers} == numbers
        assert "ours" not in str(reply.problem), reply.problem


@fake_engine(key="ours")
async def test_a_scope_that_lacks_is_403_and_changes_nothing(ours: Caller, keys_file: str) -> None:
    await create(ours, "a")
    await ours.submit(append("a", 5))
    async with session(ours, "reader") as reader, session(ours, "writer") as writer:
        refused: list[tuple[Caller, NewCall, str]] = [
            (reader, append("a", 1), "append"),
            (reader, decode("a", new=True), "append"),
            (reader, truncate("a", 0), "append"),
            (reader, delete("a"), "append"),
            (reader, NewCall("create_sequences", {"sequences": [{}]}, {}), "append"),
            (writer, gather("a"), "read"),
            (writer, decode("a"), "read"),
            (writer, NewCall("list_sequences", {}, {}), "read"),
        ]
        for caller, call, scope in refused:
            reply = await outcome(caller.submit(call))
            assert isinstance(reply, Refused), call
            assert (reply.status, reply.code, reply.problem["scope"]) == (
                403,
                "forbidden",
                scope,
            )
        assert (await reader.submit(gather("a"))).fields == {"kv_indptr": [0, 5]}
        assert code(await outcome(reader.submit(decode("a")))) == "ok"
        assert code(await outcome(writer.submit(append("a", 1)))) == "ok"


@pytest.mark.parametrize("key", ["", "no such key", "Ours"])
@fake_engine(key="ours")
async def test_a_session_without_a_valid_key_is_refused(
    ours: Caller, keys_file: str, key: str
) -> None:
    with pytest.raises(NotReady, match=r"refused the session: .*key"):
        async with session(ours, key):
            pass


@fake_engine(key="ours")
async def test_a_key_that_is_taken_back_ends_its_sessions_and_a_changed_one_changes_them(
    ours: Caller, keys_file: str
) -> None:
    async with session(ours, "theirs") as theirs, session(ours, "ours too") as too:
        await create(ours, "a")
        lines = [
            line_of("ours", "ours", ["read"]),
            line_of("ours too", "ours", ["read", "append"]),
            line_of("fresh", "fresh", ["read"]),
        ]
        Path(keys_file).write_text("\n".join(lines))
        ours.engine.read_keys_again()
        await until(lambda: theirs.road.lost != "")
        assert "was removed" in theirs.road.lost
        assert code(await outcome(ours.submit(delete("a")))) == "forbidden"
        assert code(await outcome(too.submit(delete("a")))) == "ok"
        async with session(ours, "fresh") as fresh:
            assert (await fresh.call("list_sequences", {})).fields["sequences"] == []


# Turns.


async def hold(caller: Caller, backend: FakeBackend) -> asyncio.Task[Any]:
    """Keep a launch in flight, behind which barriers wait."""
    count = len(backend.launches)
    backend.gate.clear()
    task = caller.start(decode("held"))
    await until(lambda: len(backend.launches) > count)
    return task


@fake_engine(key="ours")
async def test_a_single_call_shares_its_launch_with_one_of_another_namespaces_many(
    ours: Caller, backend: FakeBackend, keys_file: str
) -> None:
    async with session(ours, "theirs") as theirs:
        await create(ours, "a", "held")
        await create(theirs, "b")
        await ours.submit(append("a", 5))
        await theirs.submit(append("b", 9, seed=5))
        del backend.launches[:]
        with no_turns(ours):
            many = [ours.start(decode("a", seed=number)) for number in range(100)]
            await until(lambda: ours.num_waiting == 100)
            single = theirs.start(decode("b"))
            await until(lambda: ours.num_waiting == 101)
        await asyncio.gather(single, *many)
        sizes = [len(launch) for launch in backend.launches]
        assert sizes[0] <= 2, f"the single call waited in a launch of {sizes[0]}"
        assert sum(sizes) == 101


@fake_engine(key="ours")
async def test_two_busy_namespaces_share_launches(
    ours: Caller, backend: FakeBackend, keys_file: str
) -> None:
    async with session(ours, "theirs") as theirs:
        await create(ours, "a", "held")
        await create(theirs, "b")
        await ours.submit(append("a", 5))
        await theirs.submit(append("b", 9, seed=5))
        del backend.launches[:]
        with no_turns(ours):
            every = [ours.start(decode("a", seed=number)) for number in range(30)]
            every += [theirs.start(decode("b", seed=number)) for number in range(30)]
            await until(lambda: ours.num_waiting == 60)
        await asyncio.gather(*every)
        assert len(backend.launches) <= 2, [len(launch) for launch in backend.launches]


@fake_engine(late=True, key="ours", queue_depth=8)
async def test_a_full_queue_of_one_namespace_refuses_only_its_own(
    ours: Caller, backend: FakeBackend, keys_file: str
) -> None:
    async with session(ours, "theirs") as theirs:
        await create(ours, "a", "held")
        await create(theirs, "b")
        await theirs.submit(append("b", 9, seed=5))
        first = await hold(ours, backend)
        waiting = [ours.start(truncate("held", 0)) for _ in range(8)]
        await until(lambda: ours.num_waiting == 8)
        reply = await outcome(ours.submit(decode("a")))
        assert code(reply) == "overloaded"
        single = theirs.start(truncate("b", 0))
        await until(lambda: ours.num_waiting == 9)
        backend.gate.set()
        assert (await single).fields["length"] == 0
        await asyncio.gather(first, *waiting)


@fake_engine(key="ours", slice_ms=SLICE_MS)
async def test_slices_of_long_work_come_from_each_namespace_in_turn(
    ours: Caller, backend: FakeBackend, keys_file: str
) -> None:
    async with session(ours, "theirs") as theirs:
        await create(theirs, "b")
        await create(ours, "1", "2", "3", "4")
        for caller, names in ((ours, "1234"), (theirs, "b")):
            for name in names:
                await caller.submit(append(name, 4))
        steps = backend.step_by_step()
        alone = await finish(backend, theirs.start(long_prefill("b", new=False)))
        steps = backend.step_by_step()
        many = [ours.start(long_prefill(name, new=False)) for name in "1234"]
        await until(lambda: len(steps) == 1)
        single = theirs.start(long_prefill("b", new=False))
        await until(lambda: len(ours.engine.jobs) == 5)
        beside = await finish(backend, single)
        assert alone >= 5
        assert beside <= 2 * alone + 3, f"{beside} slices went by for {alone}"
        backend.let_all()
        await asyncio.gather(*many)


def import_of(**fields: Any) -> NewCall:
    """The beginning of an import of an empty sequence, with a digest that is wrong."""
    geometry = GEOMETRY
    header = {
        "generation": "0" * 32,
        "num_layers": geometry.num_layers,
        "page_size": geometry.page_size,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "dtype": geometry.dtype,
        "layout": geometry.layout,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "lengths": [0] * geometry.num_layers,
        "ttl_s": None,
        "num_named": 0,
        "cache_salt": "",
        "part_bytes": 1024,
        "num_parts": 0,
    }
    return NewCall(
        "import_sequence", {"id": "b", "header": header, "digest": "0" * 64} | fields, {}
    )


SHARD = {"rank": 0, "ranks": 2}
MOVING = [
    NewCall("hand_over", {"id": "a", "state": "leaving"}, {}),
    NewCall("claim", {"id": "a", "epoch": 3}, {}),
    NewCall("create_sequences", {"sequences": [{"id": "part", "shard": SHARD}]}, {}),
    import_of(base="a"),
    import_of(shard=SHARD | {"epoch": 1, "lengths": [0] * GEOMETRY.num_layers}),
]


@pytest.mark.parametrize("call", MOVING, ids=["hand over", "claim", "shard", "base", "part"])
@pytest.mark.parametrize(
    ("scopes", "may"),
    [
        (["read", "append"], False),
        (["read", "append", "move"], True),
        (["read", "append", "admin"], True),
    ],
    ids=["tenant", "mover", "operator"],
)
def test_what_moves_parts_of_sequences_needs_the_scope_move(
    call: NewCall, scopes: list[str], may: bool, tmp_path: Path
) -> None:
    """A key with all scopes from before `move` keeps its rights."""
    path = tmp_path / "keys"
    path.write_text(line_of("key", "ours", scopes))

    async def scenario(ours: Caller) -> None:
        await create(ours, "a")
        reply = await outcome(ours.submit(call))
        assert (code(reply) == "forbidden") == (not may), reply
        if isinstance(reply, Refused) and not may:
            assert reply.problem["scope"] == "move"

    with_engine(FakeBackend(), scenario, keys_file=str(path), key="key")


def test_a_broken_invariant_is_logged_and_names_no_namespace_to_others(
    keys_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(ours: Caller) -> None:
        async with session(ours, "theirs") as theirs, session(ours, "operator") as operator:
            await create(theirs, "secret")
            await theirs.submit(append("secret", 5))
            theirs.engine.store.tree.books.leaf("theirs/secret").start = 1
            verdicts = [
                (await one.call("pool", {})).fields["integrity"] for one in (ours, theirs, operator)
            ]
            broken = "broken: the service's log has the numbers"
            assert verdicts == ["ok", broken, broken]
            theirs.engine.store.tree.books.leaf("theirs/secret").start = 0

    with_engine(FakeBackend(), scenario, keys_file=keys_file, key="ours")
    assert caplog.text.count("theirs/secret with") == 2


@fake_engine()
async def test_a_pool_is_looked_at_between_the_turns_of_others(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a chain of forks runs some milliseconds at a time."""
    monkeypatch.setattr(work, "TURN_S", 0.0)

    await create(caller, "n0")
    for number in range(1, 50):
        await create(caller, f"n{number}", parent=f"n{number - 1}")
    before = caller.metric("attnd_slices_total")
    numbers = (await caller.call("pool", {})).fields
    assert (numbers["sequences"], numbers["integrity"]) == (50, "ok")
    assert caller.metric("attnd_slices_total") >= before + 100
