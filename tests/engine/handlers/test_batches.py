"""Calls as large as a scheduler's step: appends at many layers, cuts and commits of many sequences.

Each is done for all of its sequences and layers, or for none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.backend import PoolGeometry
from kernels.errors import NoMemory
from service.engine.store.store import StoreLost
from tests.engine.fake_backend import GEOMETRY, WAIT_S, FakeBackend
from tests.engine.harness import (
    Caller,
    NewCall,
    Refused,
    creation,
    fake_engine,
    gather,
    outcome,
    rows,
    truncate,
    unsliced,
)
from tests.engine.pool_model import CPU_GEOMETRY, Model, cpu_engine, indptr, on_cpu

PAGE = CPU_GEOMETRY.page_size
NUM_LAYERS = CPU_GEOMETRY.num_layers
Stored = dict[tuple[str, int], tuple[Any, Any]]

pools = pytest.mark.parametrize(
    ("dtype", "layout", "slice_ms"),
    [
        ("fp32", "NHD", 1e-6),
        ("bf16", "HND", 20.0),
        pytest.param("fp32", "NHD", 20.0, marks=pytest.mark.long),
        pytest.param("fp8_e4m3", "NHD", 1e-6, marks=pytest.mark.long),
        pytest.param("fp8_e5m2", "HND", 20.0, marks=pytest.mark.long),
    ],
)


def append_layers(
    names: Sequence[str], counts: Sequence[int], seed: int = 0, layers: Sequence[int] = (0, 1)
) -> NewCall:
    shape = (len(layers), sum(counts))
    k, v = (
        rows(seed + part, shape[0] * shape[1], CPU_GEOMETRY).reshape(
            *shape, CPU_GEOMETRY.num_kv_heads, CPU_GEOMETRY.head_dim
        )
        for part in (0, 1)
    )
    fields = {"layers": list(layers), "sequences": list(names), "append_indptr": indptr(*counts)}
    return NewCall("append", fields, {"k": k, "v": v})


def cut(**keeps: tuple[int, Sequence[int]]) -> NewCall:
    """A cut of many: for each sequence the length, and the tokens kept behind it."""
    fields: dict[str, Any] = {
        "sequences": list(keeps),
        "lengths": [length for length, _ in keeps.values()],
    }
    if any(keep for _, keep in keeps.values()):
        fields["keep"] = [at for _, keep in keeps.values() for at in keep]
        fields["keep_indptr"] = indptr(*(len(keep) for _, keep in keeps.values()))
    return NewCall("truncate_sequences", fields)


async def stored(caller: Caller, *names: str) -> Stored:
    """K and V of sequences at every layer."""
    held = {}
    with unsliced(caller):
        for name, layer in product(names, range(NUM_LAYERS)):
            fields = {"layer": layer, "sequences": [name], "dtype": "fp32"}
            reply = await caller.call("gather", fields)
            held[name, layer] = (np.array(reply.tensors["k"]), np.array(reply.tensors["v"]))
    return held


def assert_same(replies: Stored, wanted: Stored) -> None:
    assert replies.keys() == wanted.keys()
    for key, pair in wanted.items():
        for one, other in zip(replies[key], pair, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(key))


def kept(held: Stored, name: str, length: int, keep: Sequence[int]) -> Stored:
    """The tokens of a sequence after a cut."""
    chosen = [*range(length), *keep]
    return {key: (k[chosen], v[chosen]) for key, (k, v) in held.items() if key[0] == name}


async def family(caller: Caller) -> None:
    """`a` of 23 tokens; `b` and `c`, forks of it that went on; `d` by itself."""
    with unsliced(caller):
        await caller.create("a", "d")
        await caller.submit(append_layers(["a", "d"], [23, 9]))
        await caller.create("b", parent="a")
        new = {"id": "c", "parent": "a", "length": 17}
        await caller.submit(creation(new))
        await caller.submit(append_layers(["b", "c"], [8, 4], seed=7))


@pools
@cpu_engine()
async def test_an_append_at_many_layers_equals_appends_at_each(
    caller: Caller, geometry: PoolGeometry, slice_ms: float
) -> None:
    await caller.create("a", "b", "one", "two")
    for turn in range(2):
        counts = [7 + turn, 3]
        call = append_layers(["a", "b"], counts, seed=turn, layers=[1, 0])
        reply = await caller.submit(call.but(offsets=[7 * turn, 3 * turn]))
        assert reply.fields == {"lengths": [7 + 8 * turn, 3 + 3 * turn]}
        for at, layer in enumerate([1, 0]):
            fields = {"layer": layer, "sequences": ["one", "two"]}
            part = {name: call.tensors[name][at] for name in "kv"}
            await caller.call("append", fields | {"append_indptr": indptr(*counts)}, **part)
    stored_all = await stored(caller, "a", "b")
    wanted = await stored(caller, "one", "two")
    names = {"a": "one", "b": "two"}
    assert_same(stored_all, {key: wanted[names[key[0]], key[1]] for key in stored_all})


@cpu_engine()
async def test_an_append_at_many_layers_is_refused_whole(caller: Caller) -> None:
    call = append_layers(["a", "d"], [2, 2])
    one = {name: call.tensors[name][0] for name in "kv"}
    cases: list[tuple[NewCall, str]] = [
        (call.but(offsets=[23, 8]), "length_mismatch"),
        (call.but(sequences=["a", "missing"]), "unknown_sequence"),
        (call.but(layers=[0, 0]), "invalid_request"),
        (call.but(layers=[0, 2]), "invalid_request"),
        (call.but(layers=[]), "invalid_request"),
        (call.but(layer=0), "invalid_request"),
        (call.but(layers=[0]), "invalid_request"),
        (call.but(**one), "invalid_request"),
        (append_layers(["a", "d"], [10 * PAGE, 1000]), "out_of_pages"),
    ]

    await family(caller)
    before, numbers = await stored(caller, *"abcd"), await caller.pool()
    for wrong, expected in cases:
        assert await caller.code(wrong) == expected
        assert_same(await stored(caller, *"abcd"), before)
        assert (await caller.pool())["free"] == numbers["free"]
    uneven = {"layer": 1, "sequences": ["d"], "append_indptr": [0, 1]}
    await caller.call("append", uneven, k=one["k"][:1], v=one["v"][:1])
    refused = await outcome(caller.submit(call))
    assert "9 to 10 tokens" in str(refused)


@pytest.mark.parametrize("fails", [0, 1])
@fake_engine()
async def test_an_append_at_many_layers_that_fails_at_one_changes_none(
    caller: Caller, backend: FakeBackend, fails: int
) -> None:
    await caller.create("a")
    shape = (GEOMETRY.num_layers, 3, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
    k = np.ones(shape, np.float32)
    fields = {"layers": [*range(len(k))], "sequences": ["a"], "append_indptr": [0, 3]}
    backend.failures["append"] = [None] * fails + [RuntimeError("a bug")]
    call = NewCall("append", fields, {"k": k, "v": k})
    assert await caller.code(call) == "internal"
    reply = await caller.view("a")
    assert (reply["lengths"], reply["pages"]) == ([0] * len(k), 0)
    assert (await caller.submit(call)).fields == {"lengths": [3]}


@fake_engine(slice_ms=1e-6)
async def test_a_long_append_at_few_layers_is_written_in_slices(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, write = list[int](), backend.append

    def written(layer: int, k: Any, *given: Any) -> Any:
        sizes.append(len(k))
        return write(layer, k, *given)

    monkeypatch.setattr(backend, "append", written)
    await caller.create("a")
    k = np.ones((GEOMETRY.num_layers, 60, GEOMETRY.num_kv_heads, GEOMETRY.head_dim), np.float32)
    fields = {"layers": [*range(len(k))], "sequences": ["a"], "append_indptr": [0, 60]}
    reply = await caller.call("append", fields, k=k, v=k)
    assert reply.fields == {"lengths": [60]} and sum(reply.stages) < WAIT_S
    assert len(sizes) > len(k) and sum(sizes) == 60 * len(k), "each row is written once"


@pools
@cpu_engine()
async def test_tokens_kept_behind_a_cut_move_up_and_forks_stay_intact(
    caller: Caller, geometry: PoolGeometry, slice_ms: float
) -> None:
    cuts: list[dict[str, tuple[int, list[int]]]] = [
        {"d": (3, [5, 8])},
        {"b": (24, [26, 27, 30])},  # of its own pages
        {"b": (12, [13, 22, 25, 26])},  # within shared pages
        {"a": (5, [5, 6, 9]), "b": (20, [21, 22, 30]), "c": (0, [20])},
        {"c": (15, [16, 17, 18]), "a": (15, [22])},
        {"a": (23, []), "b": (31, []), "d": (0, [0, 1, 2, 3, 4, 5, 6, 7, 8])},
        {"a": (0, []), "b": (0, []), "c": (0, [])},
        {"a": (0, [*range(1, 23)]), "d": (0, [*range(8, 9)])},
    ]
    for chosen in cuts:
        await family(caller)
        before = await stored(caller, *"abcd")
        reply = await caller.submit(cut(**chosen))
        views = reply.fields["sequences"]
        wanted = dict(before)
        for view, (name, (length, keep)) in zip(views, chosen.items(), strict=True):
            assert (view["id"], view["length"]) == (name, length + len(keep))
            wanted |= kept(before, name, length, keep)
        assert_same(await stored(caller, *"abcd"), wanted)
        assert (await caller.pool())["integrity"] == "ok"
        await caller.call("delete_sequences", {"prefix": ""})
        assert (await caller.pool())["free"] == CPU_GEOMETRY.num_pages


@pytest.mark.parametrize("seed", range(3))
def test_random_cuts_of_many_leave_what_arrays_would_hold(seed: int) -> None:
    chance = random.Random(seed)

    async def scenario(caller: Caller) -> None:
        for turn in range(6):
            await family(caller)
            if chance.random() < 0.5:
                names = [*range(4 * PAGE)]
                await caller.call("commit", {"id": "a", "token_ids": names})
            before = await stored(caller, *"abcd")
            chosen = {}
            for name in chance.sample("abcd", chance.randint(1, 4)):
                held = len(before[name, 0][0])
                length = chance.randint(0, held)
                behind = range(length, held)
                keep = sorted(chance.sample(behind, chance.randint(0, len(behind))))
                chosen[name] = (length, keep)
            await caller.submit(cut(**chosen))
            wanted = dict(before)
            for name, (length, keep) in chosen.items():
                wanted |= kept(before, name, length, keep)
            assert_same(await stored(caller, *"abcd"), wanted)
            assert (await caller.pool())["integrity"] == "ok", turn
            await caller.call("delete_sequences", {"prefix": ""})
            await caller.call("clear")

    on_cpu(scenario, slice_ms=chance.choice([20.0, 1e-6]))


@cpu_engine()
async def test_a_single_truncate_keeps_tokens_too(caller: Caller) -> None:
    await family(caller)
    before = await stored(caller, *"abcd")
    reply = await caller.submit(truncate("b", 12).but(keep=[13, 22, 25]))
    assert (reply.fields["length"], reply.fields["pages"]) == (15, 3)
    assert_same(await stored(caller, *"abcd"), before | kept(before, "b", 12, [13, 22, 25]))
    refused = await outcome(caller.submit(truncate("b", 3).but(keep=[4], layer=0)))
    assert "leave layer out" in str(refused)


@cpu_engine()
async def test_a_cut_of_many_is_refused_whole(caller: Caller) -> None:
    good = {"d": (3, [5])}
    cases: list[tuple[NewCall, str]] = [
        (cut(**good, missing=(0, [])), "unknown_sequence"),
        (cut(**good, a=(24, [])), "invalid_request"),
        (cut(**good, a=(3, [2])), "invalid_request"),
        (cut(**good, a=(3, [23])), "invalid_request"),
        (cut(**good, a=(3, [5, 5])), "invalid_request"),
        (cut(**good, a=(3, [6, 5])), "invalid_request"),
        (cut(**good, a=(3, [6])).but(sequences=["d", "d"]), "invalid_request"),
        (cut(**good, a=(3, [6])).but(lengths=[3]), "invalid_request"),
        (cut(**good, a=(3, [6])).but(keep_indptr=[0, 1, 3]), "invalid_request"),
        (cut(**good).but(keep_indptr=None), "invalid_request"),
        (cut(d=(3, [])).but(keep_indptr=[0, 0]), "invalid_request"),
    ]

    await family(caller)
    before, numbers = await stored(caller, *"abcd"), await caller.pool()
    for wrong, expected in cases:
        assert await caller.code(wrong) == expected
        assert_same(await stored(caller, *"abcd"), before)
        assert (await caller.pool())["free"] == numbers["free"]

    for wrong, value in ((cases[1][0], ["a", 24]), (cases[2][0], ["a", 2])):
        await caller.refused(wrong, value=str(value))


@fake_engine(ends=StoreLost)
async def test_rows_that_fail_to_move_lose_the_pool(caller: Caller, backend: FakeBackend) -> None:
    await caller.fill(a=6)
    backend.failures["write_stored"] = [RuntimeError("a bug")]
    assert await caller.code(cut(a=(1, [3]))) == "not_ready"


@fake_engine()
async def test_rows_that_move_wait_for_the_memory_of_the_device(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=6)
    short = NoMemory("steps hold it")
    backend.failures = {"write_stored": [short, short], "read_stored": [None, None, short]}
    await caller.submit(cut(a=(1, [3, 5])))
    for layer in range(GEOMETRY.num_layers):
        held = (await caller.submit(gather("a", layer=layer))).tensors
        for seed, name in enumerate("kv"):
            np.testing.assert_array_equal(held[name], rows(seed, 6)[[0, 3, 5]])


@cpu_engine(slice_ms=1e-6)
async def test_what_long_work_holds_is_cut_when_that_is_over(caller: Caller) -> None:
    model = Model(caller)
    await model.create("a")
    await model.append("a", 40)
    before = await stored(caller, "a")
    gathers = [
        caller.call("gather", {"layer": 0, "sequences": ["a"], "dtype": "fp32"}) for _ in range(3)
    ]
    *reply, view = await asyncio.gather(*gathers, caller.submit(cut(a=(2, [39]))))
    for one in reply:
        np.testing.assert_array_equal(one.tensors["k"], before["a", 0][0])
    assert view.fields["sequences"][0]["length"] == 3


def named(**tokens: Sequence[int]) -> NewCall:
    fields = {
        "sequences": list(tokens),
        "token_ids": [one for ids in tokens.values() for one in ids],
        "names_indptr": indptr(*(len(ids) for ids in tokens.values())),
    }
    return NewCall("commit_sequences", fields)


async def matched(caller: Caller, tokens: Sequence[int]) -> int:
    reply = await caller.call("match_prefix", {"token_ids": list(tokens), "lease_s": 0.0})
    found: int = reply.fields["matched_len"]
    return found


@cpu_engine()
async def test_many_sequences_are_committed_and_go_on_from_where_they_are(caller: Caller) -> None:
    first, second = [*range(23)], [*range(100, 109)]

    await caller.create("a", "d")
    await caller.submit(append_layers(["a", "d"], [23, 9]))
    reply = await caller.submit(named(a=first[: 2 * PAGE], d=second))
    assert reply.fields["committed_lens"] == [2 * PAGE, PAGE]
    assert reply.fields["num_pages"] == [2, 1]
    rest = named(a=first[2 * PAGE :], d=second[PAGE:]).but(offsets=[2 * PAGE, PAGE])
    reply = await caller.submit(rest)
    assert reply.fields["committed_lens"] == [4 * PAGE, PAGE]
    assert (await matched(caller, first), await matched(caller, second)) == (4 * PAGE, PAGE)
    single = await caller.call(
        "commit", {"id": "a", "token_ids": first[3 * PAGE :], "offset": 3 * PAGE}
    )
    assert single.fields["committed_len"] == 4 * PAGE
    assert single.fields["last_key"] == reply.fields["last_keys"][0]


@cpu_engine()
async def test_a_commit_of_many_is_refused_whole(caller: Caller) -> None:
    tokens = [*range(23)]
    good = named(a=tokens, d=[*range(50, 59)])
    cases = [
        good.but(sequences=["a", "missing"]),
        good.but(offsets=[0, PAGE]),
        good.but(offsets=[0, 1]),
        good.but(offsets=[0]),
        good.but(names_indptr=[0, 22, 32]),
        good.but(names_indptr=[0, 23]),
        good.but(names_indptr=[0, 2, 32]),
        good.but(sequences=["a", "a"]),
        good.but(duration_s=1.0),
        good.but(page_keys=["0f" * 16]),
    ]

    await family(caller)
    for wrong in cases:
        assert isinstance(await outcome(caller.submit(wrong)), Refused)
        assert await matched(caller, tokens) == 0
    await caller.submit(good)


@pytest.mark.parametrize("deadline_s", [0.003, 0.01, 0.05])
@cpu_engine(slice_ms=1e-6)
async def test_a_cut_that_runs_out_of_time_is_done_or_has_never_been(
    caller: Caller, deadline_s: float
) -> None:
    length, keep = 3, [*range(4, 200, 2)]

    await caller.create("a")
    with unsliced(caller):
        await caller.submit(append_layers(["a"], [200]))
    before = await stored(caller, "a")
    reply = await outcome(caller.submit(cut(a=(length, keep)), deadline_s=deadline_s))
    if isinstance(reply, Refused):
        assert reply.code == "deadline_exceeded"
        assert_same(await stored(caller, "a"), before)
    else:
        assert_same(await stored(caller, "a"), kept(before, "a", length, keep))
    assert (await caller.pool())["integrity"] == "ok"


@cpu_engine(slice_ms=1e-6)
async def test_an_append_at_many_layers_that_runs_out_of_time_is_undone(caller: Caller) -> None:
    await caller.create("a")
    call = append_layers(["a"], [200])
    for deadline_s in (0.001, 0.003, 0.01):
        reply = await outcome(caller.submit(call, deadline_s=deadline_s))
        lengths = (await caller.view("a"))["lengths"]
        assert lengths == ([0, 0] if isinstance(reply, Refused) else [200, 200])
        if lengths[0]:
            break
    assert (await caller.pool())["integrity"] == "ok"
