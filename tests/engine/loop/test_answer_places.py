"""The place of an answer: what does not fit is refused before anything is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.harness import (
    Caller,
    NewCall,
    append,
    creation,
    decode,
    delete,
    fake_engine,
    gather,
    get,
    outcome,
    queries,
    rows,
    truncate,
)

EVERY = {
    "create_sequences": creation({}, {"parent": "a"}),
    "list_sequences": NewCall("list_sequences"),
    "get_sequence": get("a"),
    "page_table": NewCall("page_table", {"sequences": ["a", "b"]}),
    "append": append("a", 2),
    "gather": gather("a", "b"),
    "decode": decode("a", "b", new=True),
    "prefill": decode("a", new=True).but("prefill", qo_indptr=[0, 1]),
    "cascade": NewCall(
        "cascade",
        {"layer": 0, "levels": [{"sequences": ["a"], "qo_indptr": [0, 2]}], "return_levels": True},
        {"q": queries(0, 2)},
    ),
    "ragged_prefill": NewCall(
        "ragged_prefill",
        {"qo_indptr": [0, 2], "kv_indptr": [0, 3]},
        {"q": queries(1, 2), "k": rows(1, 3), "v": rows(2, 3)},
    ),
    "merge": NewCall(
        "merge",
        {"indptr": [0, 1, 2]},
        {"o": np.ones((2, 1, 8), np.float32), "lse": np.zeros((2, 1), np.float32)},
    ),
    "info": NewCall("info"),
    "pool": NewCall("pool"),
    "truncate": truncate("a", 2),
    "delete_sequence": delete("a"),
}


@pytest.mark.parametrize("slice_ms", [20.0, 1e-6], ids=["whole", "sliced"])
@pytest.mark.parametrize("name", EVERY)
@fake_engine()
async def test_an_answer_too_large_for_its_place_names_the_size_and_changes_nothing(
    caller: Caller, name: str, slice_ms: float
) -> None:
    await caller.fill(a=6, b=3)
    before, call = await caller.pool(), EVERY[name]
    known = await caller.submit(decode("a", "b"))
    refused = await caller.refused(call, "answer_too_large", room=64, status=413)
    assert refused.needed == refused.problem["size"] > 64
    assert refused.problem["limit"] == 64
    assert await caller.pool() == before
    again = await caller.submit(decode("a", "b"))
    np.testing.assert_array_equal(again.o, known.o)
    still = await caller.refused(call, room=refused.needed - 64)
    assert still.needed == refused.needed
    assert (await caller.submit(call, room=refused.needed)).status < 300


@fake_engine(max_answer_bytes=10000)
async def test_an_answer_above_the_services_limit_is_refused_with_how_to_ask_for_less(
    caller: Caller,
) -> None:
    await caller.create("a")
    await caller.submit(append("a", 120))
    before = await caller.pool()
    refused = await caller.refused(gather("a"))
    assert (refused.status, refused.code, refused.needed) == (413, "answer_too_large", 0)
    assert refused.problem["size"] > refused.problem["limit"] == 10_000
    assert "start and stop" in str(refused)
    assert await caller.pool() == before
    replies = [await caller.submit(gather("a").but(start=at, stop=at + 60)) for at in (0, 60)]
    parts = np.concatenate([one.tensors["k"] for one in replies])
    np.testing.assert_array_equal(parts, append("a", 120).tensors["k"])


@fake_engine()
async def test_a_long_answer_is_not_written_beyond_its_place(caller: Caller) -> None:
    await caller.fill(a=6, b=3)
    guard: list[Any] = [caller.road.take(2**16) for _ in range(20)]
    for slot in guard:
        slot.view()[:] = b"\xa5" * slot.size
    guard[10].free()
    for call in EVERY.values():
        await outcome(caller.submit(call, room=2**15))
    for at, slot in enumerate(guard):
        assert at == 10 or bytes(slot.view()) == b"\xa5" * slot.size, at
