"""Attention sinks: every row's state merges once with (0, sink of its head)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy_states import add_sinks
from pooled import Pooled, as_computed, bars, check, expected, indptr, normal, refusals, with_sinks
from test_backend_cascade import cascade_plan, grow

from kernels.backend import Attend, AttentionState, PoolGeometry, RaggedAttend, Scoring
from kernels.masks import make_mask

HEADS, KV_HEADS, DIM = 8, 2, 64
POOL = PoolGeometry(2, 96, 4, KV_HEADS, DIM, "NHD", "fp16", 0.02, 0.03)
SCORING = Scoring(DIM**-0.5)


def some_sinks(rng) -> np.ndarray:
    sinks = rng.normal(1.0, 3.0, HEADS).astype(np.float32)
    sinks[2] = -np.inf
    return sinks


@pytest.mark.parametrize(
    ("q_dtype", "dtype"),
    [("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("fp32", "fp16"), ("fp16", "fp8_e4m3")],
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_sinks_enter_a_batch_of_any_lengths_once(
    backend, rng, q_dtype, dtype, layout, page_size
) -> None:
    geometry = PoolGeometry(1, 1200, page_size, KV_HEADS, DIM, layout, dtype, 0.02, 0.03)
    with refusals(backend.kind, geometry):
        pooled = Pooled(backend(geometry), rng, q_dtype)
        qo_lens, sinks = [1, 3, 1, 40, 2], some_sinks(rng)
        runs = [pooled.add(keys) for keys in (900, 17, 0, 70, 1)]
        q = normal(rng, (sum(qo_lens), HEADS, DIM), q_dtype)
        for causal, scoring in (
            (True, SCORING),
            (False, Scoring(0.2, 5.0)),
            (True, Scoring(0.2, window_left=6)),
        ):
            plan = pooled.flat(runs, qo_lens, causal)
            (got,) = pooled.backend.attend([Attend(0, q, plan, scoring, sinks=sinks)]).result()
            rows = as_computed(backend.kind, q, q_dtype, dtype)
            want = with_sinks(expected(rows, runs, qo_lens, causal, scoring), sinks)
            check(got, want, bars(backend.kind, q_dtype, dtype), (scoring, causal))


def test_sinks_enter_a_cascade_once(backend, rng) -> None:
    pooled = Pooled(backend(POOL), rng, "fp16")
    qo_lens, sinks = [1, 4, 2, 1, 3, 1], some_sinks(rng)
    tree = grow(pooled, rng, 6, 3)
    q = normal(rng, (sum(qo_lens), HEADS, DIM), "fp16")
    plan = cascade_plan(pooled, tree, qo_lens)
    (got,) = pooled.backend.attend([Attend(0, q, plan, SCORING, sinks=sinks)]).result()
    rows = as_computed(backend.kind, q, "fp16", "fp16")
    want = with_sinks(expected(rows, tree.whole, qo_lens, True, SCORING), sinks)
    check(got, want, bars(backend.kind, "fp16", "fp16"))


def test_requests_of_one_launch_have_their_own_sinks_or_none(backend, rng) -> None:
    pooled = Pooled(backend(POOL), rng, "fp16")
    run, qo_len = pooled.add(37), 3
    plan = pooled.flat([run], [qo_len], True)
    q = normal(rng, (qo_len, HEADS, DIM), "fp16")
    seen = rng.random((qo_len, 37)) < 0.5
    mask = make_mask(seen.ravel(), [qo_len], [37])
    given = [some_sinks(rng), None, some_sinks(rng) + 1]
    for masks in ([None] * 3, [mask] * 3, [None, mask, mask]):
        requests = [
            Attend(0, q, plan, SCORING, one, sinks=sinks)
            for sinks, one in zip(given, masks, strict=True)
        ]
        states = pooled.backend.attend(requests).result()
        for got, sinks, one in zip(states, given, masks, strict=True):
            rows = as_computed(backend.kind, q, "fp16", "fp16")
            bits = None if one is None else [seen]
            want = expected(rows, [run], [qo_len], True, SCORING, bits)
            if sinks is not None:
                want = with_sinks(want, sinks)
            check(got, want, bars(backend.kind, "fp16", "fp16"))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_sinks_enter_ragged_attention_once(backend, rng, dtype) -> None:
    lens, kv_lens, sinks = [2, 30, 1], [9, 40, 0], some_sinks(rng)
    q = normal(rng, (33, HEADS, DIM), dtype)
    k, v = (normal(rng, (49, KV_HEADS, DIM), dtype) for _ in range(2))
    request = RaggedAttend(q, k, v, indptr(lens), indptr(kv_lens), True, SCORING, sinks=sinks)
    got = backend(POOL).attend_ragged(request).result()
    plain = backend(POOL).attend_ragged(replace(request, sinks=None)).result()
    want = with_sinks((plain.o.astype(np.float64), plain.lse.astype(np.float64)), sinks)
    check(got, want, bars(backend.kind, dtype, dtype))


@pytest.mark.parametrize("dim", [64, 80, 3])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_sinks_enter_each_merged_list_once(backend, rng, dim, dtype) -> None:
    ends, sinks = indptr([3, 0, 1, 12]), some_sinks(rng)
    o = normal(rng, (16, HEADS, dim), dtype)
    lse = rng.normal(0, 4, (16, HEADS)).astype(np.float32)
    lse[:4] = -np.inf
    pool = backend(POOL)
    got = pool.merge(o, lse, ends, sinks=sinks).result()
    plain = pool.merge(o, lse, ends).result()
    want = with_sinks((plain.o.astype(np.float64), plain.lse.astype(np.float64)), sinks)
    check(got, want, bars(backend.kind, dtype, dtype))
    numpy_own = add_sinks(AttentionState(plain.o, plain.lse), sinks)
    check(numpy_own, want, bars("cpu", dtype, dtype))
    into = AttentionState(np.array(plain.o), np.array(plain.lse))
    nothing = o[:0], lse[:0], indptr([0] * 4)
    check(
        pool.merge(*nothing, into=into, sinks=sinks).result(),
        want,
        bars(backend.kind, dtype, dtype),
    )


def test_a_row_without_keys_has_the_sink_as_its_lse(backend, rng) -> None:
    pooled = Pooled(backend(POOL), rng, "fp16")
    q, sinks = normal(rng, (1, HEADS, DIM), "fp16"), some_sinks(rng)
    plan = pooled.flat([pooled.add(0)], [1], True)
    (got,) = pooled.backend.attend([Attend(0, q, plan, SCORING, sinks=sinks)]).result()
    assert not got.o.any()
    np.testing.assert_allclose(got.lse[0], sinks, rtol=1e-6)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("rows", "keys"), [(1, 37), (1, 5000), (6, 100), (75, 203), (75, 5000)])
def test_sinks_of_any_size_are_the_lse_of_what_they_outweigh(backend, rng, rows, keys, dim) -> None:
    """Of rows that see no key, masked or before the first, it is the sink, however low."""
    geometry = replace(POOL, num_pages=1300, head_dim=dim)
    pooled, scoring = Pooled(backend(geometry), rng, "fp16"), Scoring(dim**-0.5)
    run = pooled.add(keys)
    most = np.finfo(np.float32).max
    sinks = np.array([most, 3e38, 2.4e38, 2e38, -1e3, -2e38, -3e38, -most], np.float32)
    seen = np.repeat([False, True], rows)[:, None] & np.ones(keys, bool)
    mask = make_mask(seen.ravel(), [2 * rows], [keys])
    for blind, given, causal in ((0, None, False), (rows, mask, False), (rows, None, True)):
        count = keys + blind if causal else rows + blind
        if count > 300:
            continue
        plan = pooled.flat([run], [count], causal)
        q = normal(rng, (count, HEADS, dim), "fp16")
        plain, got = (
            pooled.backend.attend([Attend(0, q, plan, scoring, given, sinks=s)]).result()[0]
            for s in (None, sinks)
        )
        assert not got.o[:, :4].any()
        assert not got.o[:blind].any()
        for lse in (got.lse[:, :4], got.lse[:blind]):
            np.testing.assert_allclose(lse, np.broadcast_to(sinks[: lse.shape[1]], lse.shape), 1e-6)
        assert np.array_equal(got.o[blind:, 4:], plain.o[blind:, 4:])
        assert np.array_equal(got.lse[blind:, 4:], plain.lse[blind:, 4:])


def test_sinks_leave_a_nan_in_the_state(backend, rng) -> None:
    pool = backend(POOL)
    o, lse = np.ones((2, HEADS, DIM), np.float16), np.zeros((2, HEADS), np.float32)
    lse[0, 0], lse[0, 1] = np.nan, np.inf
    got = pool.merge(o, lse, indptr([1, 1]), sinks=np.zeros(HEADS, np.float32)).result()
    wrong = np.zeros((2, HEADS), bool)
    wrong[0, :2] = True
    assert np.array_equal(np.isnan(got.lse), wrong)
    assert np.array_equal(np.isnan(got.o.astype(np.float32)).all(axis=2), wrong)


@pytest.mark.parametrize("sinks", [np.zeros(HEADS + 1, np.float32), np.zeros(HEADS)])
def test_other_shapes_and_dtypes_are_refused(backend, rng, sinks) -> None:
    pooled = Pooled(backend(POOL), rng, "fp16")
    q = normal(rng, (1, HEADS, DIM), "fp16")
    plan = pooled.flat([pooled.add(3)], [1], True)
    with pytest.raises(ValueError, match=r"sinks is .* must be float32 \(8,\)"):
        pooled.backend.attend([Attend(0, q, plan, SCORING, sinks=sinks)])
