"""Attention sinks through the engine, whole and in slices: they enter every row once."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import oracle
import pytest

from tests.engine.harness import Caller, NewCall, Refused, queries, rows
from tests.engine.pool_model import CPU_GEOMETRY, Model, close, cpu_engine, decode, indptr, prefill

HEADS = queries(0, 1, CPU_GEOMETRY).shape[1]
SINKS = np.linspace(-2, 3, HEADS).astype(np.float32)


def with_sinks(state: oracle.State, sinks: Any = SINKS) -> oracle.State:
    o, lse = state
    return oracle.merge([state, (np.zeros(o.shape), np.broadcast_to(sinks, lse.shape))])


@cpu_engine()
async def test_decodes_that_share_a_launch_have_their_own_sinks(
    caller: Caller, slice_ms: float
) -> None:
    model = Model(caller)
    names = await model.family()
    given = [SINKS, None, SINKS + 1]
    calls = []
    for seed, sinks in enumerate(given):
        call = decode(names, seed)
        if sinks is not None:
            call.tensors["sinks"] = sinks
        calls.append(call)
    replies = await asyncio.gather(*map(caller.submit, calls))
    for call, reply, sinks in zip(calls, replies, given, strict=True):
        ends = indptr(*[1] * len(names))
        wanted = model.expected(names, 0, call.tensors["q"], ends)
        close(reply, wanted if sinks is None else with_sinks(wanted, sinks))


@cpu_engine()
async def test_prefill_cascade_and_their_levels_have_sinks_once(
    caller: Caller, slice_ms: float
) -> None:
    model = Model(caller)
    names = await model.family()
    lens = [2] * len(names)
    call = prefill(names, lens, 3, **model.grow(names, lens, 0))
    call.tensors["sinks"] = SINKS
    wanted = model.expected(names, 0, call.tensors["q"], indptr(*lens), causal=True)
    close(await caller.submit(call), with_sinks(wanted))

    q, levels = queries(5, 1, CPU_GEOMETRY), []
    await model.create("apart")
    await model.append("apart", 9)
    for name in (names[0], "apart"):
        levels.append({"sequences": [name], "qo_indptr": [0, 1]})
    each = [model.expected([name], 0, q, [0, 1]) for name in (names[0], "apart")]
    for fields in ({}, {"return_levels": True}):
        given = {"layer": 0, "levels": levels} | fields
        reply = await caller.submit(NewCall("cascade", given, {"q": q, "sinks": SINKS}))
        close(reply, with_sinks(oracle.merge(each)))
        if fields:
            close((reply.tensors["o.1"], reply.tensors["lse.1"]), each[1])


@pytest.mark.parametrize("base", ["e", "2"])
@cpu_engine()
async def test_ragged_prefill_and_merge_have_sinks_once(
    caller: Caller, slice_ms: float, base: str
) -> None:
    unit = np.log(2) if base == "2" else 1.0

    q = queries(1, 4, CPU_GEOMETRY)
    k, v = rows(2, 7, CPU_GEOMETRY), rows(3, 7, CPU_GEOMETRY)
    tensors = {"q": q, "k": k, "v": v}
    fields = {"qo_indptr": [0, 1, 4], "kv_indptr": [0, 7, 7], "lse_base": base}
    plain = await caller.submit(NewCall("ragged_prefill", fields, tensors))
    reply = await caller.submit(NewCall("ragged_prefill", fields, {**tensors, "sinks": SINKS}))
    wanted = with_sinks((plain.o, plain.lse * unit))
    close((reply.o, reply.lse * unit), wanted)
    states = {"o": plain.o[:, None], "lse": plain.lse[:, None], "sinks": SINKS}
    merged = await caller.submit(NewCall("merge", {"lse_base": base}, states))
    close((merged.o, merged.lse * unit), wanted)


@pytest.mark.parametrize(
    ("sinks", "detail"),
    [
        (np.where(SINKS[1] == SINKS, np.nan, SINKS), r"nan of head 1: must be a finite number"),
        (np.where(SINKS[2] == SINKS, np.inf, SINKS), r"inf of head 2"),
        (SINKS[:-1], rf"must be \[{HEADS}\]"),
        (SINKS.astype(np.float16), r"must be F32"),
    ],
)
@cpu_engine()
async def test_bad_sinks_are_refused_before_anything_changes(
    caller: Caller, sinks: Any, detail: str
) -> None:
    model = Model(caller)
    await model.create("a")
    await model.append("a", 5)
    new = {name: rows(7, 1, CPU_GEOMETRY) for name in "kv"}
    call = decode(["a"], 1)
    call.tensors.update(new, sinks=sinks)
    with pytest.raises(Refused, match=detail) as refused:
        await caller.submit(call)
    assert refused.value.status == 422
    view = await caller.call("get_sequence", {"id": "a"})
    assert view.fields["length"] == 5
