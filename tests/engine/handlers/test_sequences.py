"""Sequences as callers see them: made, forked, listed, cut, deleted, their rows and page tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels.backend import DType, PoolGeometry
from tests.engine.harness import (
    Caller,
    append,
    code,
    creation,
    delete,
    fake_engine,
    gather,
    outcome,
    rows,
    truncate,
)
from tests.engine.pool_model import CPU_GEOMETRY, Model, cpu_engine, indptr, on_cpu

ROUNDING = {"fp32": 0.0, "fp16": 1e-3, "bf16": 1e-2, "fp8_e4m3": 0.07, "fp8_e5m2": 0.13}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@cpu_engine()
async def test_the_self_test_passes_on_every_pool_and_gather_reads_appended_rows(
    caller: Caller, dtype: DType, geometry: PoolGeometry, slice_ms: float
) -> None:
    assert (caller.state, caller.road.state.reason) == ("ready", "ready")
    info = await caller.pool()
    assert (info["free"], info["sequences"], info["integrity"]) == (96, 0, "ok")
    k, v = rows(1, 12, geometry), rows(2, 12, geometry)
    await caller.create("a", "b")
    fields = {"layer": 0, "sequences": ["a", "b"], "append_indptr": indptr(7, 5)}
    await caller.call("append", fields, k=k, v=v)
    reply = await caller.submit(gather("b", "a"))
    assert reply.fields == {"kv_indptr": [0, 5, 12]}
    for name, given, scale in zip("kv", (k, v), geometry.scales, strict=True):
        wanted = np.concatenate((given[7:], given[:7]))
        bar = ROUNDING[dtype] * np.abs(wanted) + (scale * 2e-2 if scale != 1.0 else 0.0)
        assert (np.abs(reply.tensors[name] - wanted) <= bar).all()
    some = await caller.submit(gather("b", "a").but(start=3, stop=6))
    assert some.fields == {"kv_indptr": [0, 2, 5]}
    for name in "kv":
        chosen = reply.tensors[name][[3, 4, 8, 9, 10]]
        np.testing.assert_array_equal(some.tensors[name], chosen)


@pytest.mark.parametrize(
    ("start", "stop", "wanted"),
    [(0, None, [0, 5, 5]), (2, None, [0, 3, 3]), (9, None, [0, 0, 0]), (0, 0, [0, 0, 0])],
)
@fake_engine()
async def test_a_part_of_a_sequence_ends_where_the_sequence_does(
    caller: Caller, start: int, stop: int | None, wanted: list[int]
) -> None:
    await caller.create("a", "empty")
    await caller.submit(append("a", 5))
    reply = await caller.submit(gather("a", "empty").but(start=start, stop=stop))
    assert reply.fields == {"kv_indptr": wanted}
    refused = await outcome(caller.submit(gather("a").but(start=3, stop=2)))
    assert code(refused) == "invalid_request"


@pytest.mark.parametrize("page_size", [1, 2, 64])
@pytest.mark.parametrize("num_pages", [1, 2, 5])
def test_the_self_test_fits_the_smallest_pools(num_pages: int, page_size: int) -> None:
    async def scenario(caller: Caller) -> None:
        assert caller.state == "ready"
        assert (await caller.pool())["free"] == num_pages

    on_cpu(scenario, replace(CPU_GEOMETRY, num_pages=num_pages, page_size=page_size))


@cpu_engine()
async def test_the_page_table_shows_every_level_of_the_tree(
    caller: Caller, slice_ms: float
) -> None:
    names = await Model(caller).family()
    reply = (await caller.call("page_table", {"sequences": names})).fields
    assert len(reply["levels"]) == 3
    assert sorted(reply["order"]) == list(range(len(names)))
    for row, at in enumerate(reply["order"]):
        pages: list[int] = []
        for level in reply["levels"]:
            segment = int(np.searchsorted(level["qo_indptr"], row, "right")) - 1
            begin, end = level["kv_indptr"][segment : segment + 2]
            pages += level["kv_indices"][begin:end]
        begin, end = reply["kv_indptr"][at : at + 2]
        assert pages == reply["kv_indices"][begin:end], names[at]


@cpu_engine()
async def test_sequences_are_made_with_ids_of_their_own_listed_cut_and_deleted(
    caller: Caller,
) -> None:
    made = await caller.submit(creation({}, {"id": "b"}, {}))
    assert made.status == 201
    names = [view["id"] for view in made.fields["sequences"]]
    assert len(set(names)) == 3
    assert names[0].startswith("seq-")
    empty = rows(0, 0, CPU_GEOMETRY)
    await Model(caller, {("b", layer): (empty, empty) for layer in (0, 1)}).append("b", 9)
    listed = (await caller.call("list_sequences", {"limit": 2})).fields
    assert [view["id"] for view in listed["sequences"]] == sorted(names)[:2]
    assert listed["next"] == sorted(names)[1]
    rest = (await caller.call("list_sequences", {"after": listed["next"]})).fields
    assert [view["id"] for view in rest["sequences"]] == sorted(names)[2:]
    assert rest["next"] is None
    wanted = {"id": "b", "length": 6, "lengths": [6, 6], "pages": 2, "last_page_len": 1}
    wanted |= {"parent": None, "ttl_s": None, "reserved_len": 0, "known_len": 0, "committed_len": 0}
    assert (await caller.submit(truncate("b", 6))).fields == wanted
    for name in names:
        assert (await caller.submit(delete(name))).status == 204
    assert (await caller.pool())["free"] == CPU_GEOMETRY.num_pages


@fake_engine()
async def test_a_fork_of_a_parent_whose_layers_differ_is_refused_unless_its_length_is_said(
    caller: Caller,
) -> None:
    await caller.create("a")
    await caller.submit(append("a", 6))
    await caller.submit(append("a", 4, layer=1))
    before = await caller.pool()
    refused = await caller.refused(creation({"id": "b", "parent": "a"}), status=422, field="parent")
    for part in ("4 to 6 tokens", "append to the other layers first", "length = 4"):
        assert part in refused.problem["rule"]
    assert await caller.pool() == before
    fork = {"id": "b", "parent": "a", "length": 4}
    await caller.submit(creation(fork))
    assert [await caller.length("b", layer) for layer in (0, 1)] == [4, 4]
    await caller.submit(append("a", 2, layer=1))
    await caller.create("c", parent="a")
    assert await caller.length("c") == 6


@fake_engine(max_sequences=3)
async def test_more_sequences_than_there_may_be_are_refused_with_the_numbers(
    caller: Caller,
) -> None:
    await caller.create("a", "b")
    before = await caller.pool()
    refused = await caller.refused(
        creation({"id": "c"}, {"id": "d"}), "out_of_sequences", status=507
    )
    numbers = [refused.problem[key] for key in ("needed", "free", "total")]
    assert numbers == [2, 1, 3]
    assert "engine.max_sequences" in str(refused)
    assert await caller.pool() == before
    await caller.create("c")
    await caller.submit(delete("a"))
    await caller.create("d")
    assert (await caller.call("info")).fields["limits"]["max_sequences"] == 3
