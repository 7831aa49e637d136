"""The engine on the CPU backend against the dense oracle, and one way of asking against another.

Everything runs twice: as one launch, and with every operation cut into slices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest

from tests.engine.harness import Caller, NewCall, queries, rows, until
from tests.engine.pool_model import (
    CPU_GEOMETRY,
    SCALE,
    Model,
    close,
    cpu_engine,
    decode,
    indptr,
    prefill,
)

LAYERS = range(CPU_GEOMETRY.num_layers)


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
@cpu_engine()
async def test_fork_then_decode_equals_the_oracle_however_it_runs(
    caller: Caller, mode: str, slice_ms: float
) -> None:
    model = Model(caller)
    names = await model.family()
    for step in range(3):
        for layer in LAYERS:
            new = model.grow(names, [1] * len(names), layer)
            call = decode(names, step, layer=layer, cascade=mode, **new)
            reply = await caller.submit(call)
            one_each = indptr(*[1] * len(names))
            wanted = model.expected(names, layer, call.tensors["q"], one_each)
            close(reply, wanted, f"step {step}, layer {layer}")
        assert reply.fields["cascade"] == (reply.fields["levels"] > 1)
        if mode != "auto":
            assert reply.fields["cascade"] == (mode == "always")


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"causal": True, "window_left": 6}])
@cpu_engine()
async def test_prefill_over_forks_equals_the_oracle(
    caller: Caller, mode: str, how: dict[str, Any], slice_ms: float
) -> None:
    model = Model(caller)
    names = await model.family()
    lens = [3, 1, 0, 9, 2, 5, 2, 1, 4, 6]
    new = model.grow(names, lens, 1)
    given: dict[str, Any] = {"causal": False, "cascade": mode, "layer": 1} | how | new
    call = prefill(names, lens, 5, **given)
    reply = await caller.submit(call)
    close(reply, model.expected(names, 1, call.tensors["q"], indptr(*lens), **how))


@pytest.mark.parametrize(
    ("packed", "mode", "causal"),
    [(False, "always", True), (True, "never", False), (True, "always", True)],
)
@cpu_engine()
async def test_masks_of_both_forms_reach_the_right_rows(
    caller: Caller, packed: bool, mode: str, causal: bool, slice_ms: float
) -> None:
    model = Model(caller)
    names = await model.family()
    lens = [3, 1, 0, 5, 2, 1, 2, 1, 4, 6]
    rng = np.random.default_rng(3)
    masks = [
        rng.random((n, model.held[name, 0][0].shape[0])) < 0.5
        for n, name in zip(lens, names, strict=True)
    ]
    if packed:
        flat = np.concatenate([np.packbits(mask, bitorder="little") for mask in masks])
    else:
        flat = np.concatenate([mask.reshape(-1) for mask in masks])
    kind = "packed_mask" if packed else "mask"
    given: dict[str, Any] = {"causal": causal, "cascade": mode, kind: flat}
    call = prefill(names, lens, 5, **given)
    reply = await caller.submit(call)
    begin = indptr(*lens)
    for b, name in enumerate(names):
        mine = slice(begin[b], begin[b + 1])
        k, v = model.held[name, 0]
        seen = oracle.visible(lens[b], len(k), causal=causal, mask=masks[b])
        wanted = oracle.attend(call.tensors["q"][mine], k, v, seen, sm_scale=SCALE)
        close((reply.o[mine], reply.lse[mine]), wanted, name)
    refused = await caller.refused(call.but(**{kind: flat[:-1]}), "invalid_request", field=kind)
    assert str(flat.size) in refused.problem["rule"]


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"causal": True, "window_left": 2}])
@cpu_engine()
async def test_ragged_prefill_equals_the_oracle_and_touches_no_page(
    caller: Caller, how: dict[str, Any], slice_ms: float
) -> None:
    before = await caller.pool()
    lens, kv_lens = [3, 0, 2, 4], [5, 4, 0, 2]
    q, k, v = queries(1, 9, CPU_GEOMETRY), rows(1, 11, CPU_GEOMETRY), rows(2, 11, CPU_GEOMETRY)
    mask = np.random.default_rng(0).random(15 + 8) < 0.7
    fields = {"qo_indptr": indptr(*lens), "kv_indptr": indptr(*kv_lens)} | how
    call = NewCall("ragged_prefill", fields, {"q": q, "k": k, "v": v, "mask": mask})
    reply = await caller.submit(call)
    for mine, keys, bits in (
        (slice(0, 3), slice(0, 5), mask[:15]),
        (slice(5, 9), slice(9, 11), mask[15:]),
    ):
        seen = oracle.visible(mine.stop - mine.start, keys.stop - keys.start, mask=bits, **how)
        wanted = oracle.attend(q[mine], k[keys], v[keys], seen, sm_scale=SCALE)
        close((reply.o[mine], reply.lse[mine]), wanted)
    bits = np.concatenate([np.packbits(one, bitorder="little") for one in (mask[:15], mask[15:])])
    packed = await caller.submit(call.but(mask=None, packed_mask=bits))
    np.testing.assert_array_equal(packed.o, reply.o)
    assert (reply.o[3:5] == 0).all()
    assert (reply.lse[3:5] == -np.inf).all()
    assert await caller.pool() == before
    for wrong, name in (
        (call.but(cascade="always"), "cascade"),
        (call.but(mask=mask[1:]), "mask.shape"),
    ):
        await caller.refused(wrong, status=422, field=name)


@cpu_engine()
async def test_bytes_read_and_bytes_saved_by_sharing_are_counted(
    caller: Caller, slice_ms: float
) -> None:
    model = Model(caller)
    await model.create("a")
    await model.append("a", 40)
    await model.create("b", "a")
    await model.append("b", 2)
    for mode in ("never", "always"):
        await caller.submit(decode(("a", "b"), 0, cascade=mode))
    token = CPU_GEOMETRY.token_bytes
    await until(lambda: caller.metric("attnd_kv_bytes_read_total") == (82 + 42) * token)
    assert caller.metric("attnd_kv_bytes_saved_total") == 40 * token
    assert caller.metric('attnd_cascade_batches_total{mode="cascade"}') == 1
    assert caller.metric('attnd_cascade_batches_total{mode="flat"}') == 1
    assert caller.metric("attnd_tokens_appended_total") == 84
