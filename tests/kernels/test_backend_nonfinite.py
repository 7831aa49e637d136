"""NaN and infinities in keys, values, queries and states: the rows that they reach.

A score of NaN or +inf that a row sees makes its o and lse NaN. Keys that a row does not see, and
slots that hold no key, leave its lse alone; a row that sees nothing is (0, -inf) exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
from numpy_states import merge_ragged_states
from pooled import LSE_BAR, O_BAR, Pooled, expected, int32, normal

from kernels.backend import (
    Attend,
    AttentionState,
    Mask,
    Plan,
    PoolGeometry,
    RaggedAttend,
    Scoring,
)
from kernels.masks import packbits

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
NAN, INF = np.nan, np.inf
HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class Shape:
    """Rows at the end of `keys` keys of one sequence."""

    rows: int
    keys: int
    causal: bool = True
    window_left: int = -1


SHAPES = {
    "decode": Shape(1, 37),
    "decode in parts": Shape(1, 5000),
    "a few rows": Shape(5, 100),
    "prefill": Shape(75, 203),
    "prefill behind a window": Shape(75, 203, window_left=20),
    "more rows than keys": Shape(70, 33),
    "not causal": Shape(75, 300, causal=False),
}


def geometry(dtype: Any, head_dim: int) -> PoolGeometry:
    return PoolGeometry(1, 400, 16, KV_HEADS, head_dim, "NHD", dtype)


def assert_state(got: AttentionState, want: oracle.State, dtype: str, tainted: Any = ()) -> None:
    """Not finite where the oracle is not; o of `tainted` rows may be NaN for hidden values."""
    o, lse = np.asarray(got.o, np.float64), got.lse
    assert np.array_equal(np.isnan(lse), np.isnan(want[1])), "lse is NaN elsewhere"
    assert np.array_equal(np.isneginf(lse), np.isneginf(want[1])), "empty rows differ"
    assert not np.isposinf(lse).any()
    assert not o[np.isneginf(lse)].any(), "an empty row has o other than 0"
    fine = np.isfinite(want[1])
    assert np.abs(lse[fine] - want[1][fine]).max(initial=0) <= LSE_BAR
    assert np.isnan(o[np.isnan(want[1])]).all(), "o of a row with lse NaN is not NaN"
    sure = np.ones(len(o), bool)
    sure[list(tainted)] = False
    shape = np.isfinite(want[0])
    assert np.array_equal(np.isfinite(o[sure]), shape[sure]), "o is finite elsewhere"
    both = shape & np.isfinite(o)
    bar = O_BAR[dtype] + np.abs(want[0][both]) * 2.0**-7
    assert (np.abs(o[both] - want[0][both]) <= bar).all()


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        ("fp16", 64),
        ("bf16", 128),
        pytest.param("fp16", 128, marks=pytest.mark.long),
        pytest.param("bf16", 64, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("part", "value"),
    [("k", NAN), ("k", INF), ("k", -INF), ("q", NAN), ("q", INF), ("v", NAN), ("v", INF)],
    ids=lambda x: str(x),
)
def test_nonfinite_values_reach_exactly_the_rows_that_see_them(
    backend, rng, part: str, value: float, shape: Shape, head_dim: int, dtype: Any
) -> None:
    pool = Pooled(backend(geometry(dtype, head_dim)), rng, dtype)
    run = pool.add(shape.keys)
    q = normal(rng, (shape.rows, HEADS, head_dim), dtype).copy()
    token = shape.keys - 1 - shape.rows // 2 if shape.rows < shape.keys else shape.keys // 2
    if part == "q":
        q[shape.rows // 2] = value
    else:
        getattr(run, part)[token] = value
        rows = [x[token : token + 1].astype(q.dtype) for x in (run.k, run.v)]
        pool.backend.append(0, *rows, pool.slots(run)[token : token + 1])
    scoring = Scoring(head_dim**-0.5, 0.0, shape.window_left)
    plan = pool.flat([run], [shape.rows], shape.causal)
    (got,) = pool.backend.attend([Attend(0, q, plan, scoring)]).result()
    want = expected(q, [run], [shape.rows], shape.causal, scoring)
    assert_state(got, want, dtype, range(shape.rows) if part == "v" else ())


@pytest.mark.parametrize("storage", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_nan_in_an_fp8_pool_reaches_the_rows_that_see_it(backend, rng, shape, storage) -> None:
    pool = Pooled(backend(geometry(storage, 128)), rng, "fp16")
    run = pool.add(shape.keys)
    token = shape.keys // 2
    run.k[token] = NAN
    rows = [x[token : token + 1].astype(np.float16) for x in (run.k, run.v)]
    pool.backend.append(0, *rows, pool.slots(run)[token : token + 1])
    q = normal(rng, (shape.rows, HEADS, 128), "fp16")
    scoring = Scoring(128**-0.5, 0.0, shape.window_left)
    plan = pool.flat([run], [shape.rows], shape.causal)
    (got,) = pool.backend.attend([Attend(0, q, plan, scoring)]).result()
    assert_state(got, expected(q, [run], [shape.rows], shape.causal, scoring), "bf16")


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("rows", [1, 6, 75])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_keys_that_a_mask_hides_are_not_seen(backend, rng, value, head_dim, rows, cap) -> None:
    """Every row's mask hides the key; half of the rows see nothing, and are (0, -inf)."""
    pool = Pooled(backend(geometry("fp16", head_dim)), rng, "fp16")
    run, token = pool.add(203), 77
    seen = rng.random((rows, 203)) < 0.5
    seen[:, token] = False
    seen[::2] = False
    seen[1::2, 3] = True
    run.k[token] = run.v[token] = value
    bad = np.full((1, KV_HEADS, head_dim), value, np.float16)
    pool.backend.append(0, bad, bad, pool.slots(run)[token : token + 1])
    q = normal(rng, (rows, HEADS, head_dim), "fp16")
    scoring = Scoring(head_dim**-0.5, cap)
    mask = Mask(packbits(seen.reshape(-1)), np.arange(rows, dtype=np.int64) * 203)
    plan = pool.flat([run], [rows], False)
    (got,) = pool.backend.attend([Attend(0, q, plan, scoring, mask)]).result()
    want = expected(q, [run], [rows], False, scoring, [seen])
    assert_state(got, want, "fp16", range(1, rows, 2))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 75])
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_ragged_keys_that_are_not_finite(backend, rng, value, rows, dtype) -> None:
    q = normal(rng, (2 * rows, HEADS, 64), dtype)
    k, v = (normal(rng, (300, KV_HEADS, 64), dtype).copy() for _ in "kv")
    k[40] = value
    ends = int32([0, rows, 2 * rows]), int32([0, 100, 300])
    made = backend(geometry("fp16", 64))
    got = made.attend_ragged(RaggedAttend(q, k, v, *ends, True, Scoring(0.125))).result()
    states = []
    for (a, b), (c, d) in (((0, rows), (0, 100)), ((rows, 2 * rows), (100, 300))):
        seen = oracle.visible(b - a, d - c, causal=True)
        states.append(oracle.attend(q[a:b], k[c:d], v[c:d], seen, sm_scale=0.125))
    want = np.concatenate([o for o, _ in states]), np.concatenate([lse for _, lse in states])
    assert_state(got, want, "bf16" if dtype == "bf16" else "fp16")


@pytest.mark.parametrize("rows", [1, 75])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_a_key_of_one_level_is_not_lost_in_the_merge(backend, rng, value, rows) -> None:
    """A shared run and own runs: nonfinite values in either make its rows NaN, and no others."""
    pool = Pooled(backend(geometry("fp16", 128)), rng, "fp16")
    shared, own = pool.add(640), [pool.add(30) for _ in range(rows)]
    for run, token in ((own[rows // 2], 3),):
        run.k[token] = value
        bad = np.full((1, KV_HEADS, 128), value, np.float16)
        pool.backend.append(0, bad, bad, pool.slots(run)[token : token + 1])
    q = normal(rng, (rows, HEADS, 128), "fp16")
    levels = (
        pool.level([shared], [rows], [0], False),
        pool.level(own, [1] * rows, [640] * rows, False),
    )
    plan = Plan(levels, int32([669] * rows))
    scoring = Scoring(128**-0.5)
    (got,) = pool.backend.attend([Attend(0, q, plan, scoring)]).result()
    states = [
        oracle.attend(
            q[i : i + 1],
            np.concatenate([shared.k, run.k]),
            np.concatenate([shared.v, run.v]),
            np.ones((1, 670), bool),
            sm_scale=scoring.sm_scale,
        )
        for i, run in enumerate(own)
    ]
    want = np.concatenate([o for o, _ in states]), np.concatenate([lse for _, lse in states])
    assert_state(got, want, "fp16")


STATES = {
    "nan": ([0.5, NAN], True),
    "nan first": ([NAN, 0.5], True),
    "+inf": ([0.5, INF], True),
    "+inf twice": ([INF, INF], True),
    "nan alone": ([NAN], True),
    "+inf alone": ([INF], True),
    "-inf beside a number": ([-INF, 0.5], False),
    "-inf alone": ([-INF, -INF], False),
    "nan and -inf": ([-INF, NAN], True),
    "far apart": ([-300.0, 0.5], False),
    "many far below one": ([-300.0] * 19 + [0.5] + [-300.0] * 19, False),
    "many in small steps": ([-360.0 + 60 * (i // 4) for i in range(28)], False),
    "many": ([0.5] * 20 + [NAN] + [0.5] * 20, True),
}


@pytest.mark.parametrize("how", ["lists", "into", "numpy"])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("lse", "is_nan"), STATES.values(), ids=STATES)
def test_states_that_are_not_finite_merge_alike(
    backend, rng, lse: list[float], is_nan: bool, dtype: Any, dim: int, how: str
) -> None:
    """What weighs nothing may hold NaN; a list of sound states beside it is left alone."""
    count = len(lse)
    o = rng.standard_normal((count + 2, HEADS, dim)).astype(dtype)
    all_lse = np.repeat(np.array([*lse, 1.0, 2.0], np.float32)[:, None], HEADS, 1)
    o[all_lse[:, 0] <= -300] = NAN
    ends = int32([0, count, count + 2])
    if how == "numpy":
        got = merge_ragged_states(o, all_lse, ends)
    elif how == "lists":
        got = backend(geometry("fp16", 64)).merge(o, all_lse, ends).result()
    else:
        into = AttentionState(o[[0, count]].copy(), all_lse[[0, count]].copy())
        rest = [*range(1, count), count + 1]
        ends = int32([0, count - 1, count])
        made = backend(geometry("fp16", 64))
        got = made.merge(o[rest].copy(), all_lse[rest].copy(), ends, into=into).result()
    assert np.isnan(got.o[0]).all() == np.isnan(got.lse[0]).all() == is_nan
    assert np.isnan(got.o[0]).any() == np.isnan(got.lse[0]).any() == is_nan
    if all(x == -INF for x in lse):
        assert not got.o[0].any()
        assert np.isneginf(got.lse[0]).all()
    want = oracle.merge([(o[i : i + 1], all_lse[i : i + 1]) for i in (count, count + 1)])
    assert np.abs(np.asarray(got.o[1], np.float64) - want[0][0]).max() < 2e-3
    assert np.abs(got.lse[1] - want[1][0]).max() < 1e-5


@pytest.mark.parametrize("rows", [1, 6, 75])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("exponent", [4, 20, 24, 27, 30, 34])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_pick_the_highest_keys(
    backend, rng, sign: int, exponent: int, head_dim: int, rows: int
) -> None:
    """Three keys tie for the highest score, all others are far below: o is the mean of their v.

    More than one row on a device may answer NaN beyond 2^27, and nothing else that is wrong.
    """
    if backend.kind == "cpu" and head_dim == 128:
        pytest.skip("the CPU computes all head dims in one way")
    pool = Pooled(backend(geometry("fp16", head_dim)), rng, "fp16")
    run, best = pool.add(203), [5, 77, 200]
    of_q, of_k = min(exponent // 2, 14), min(exponent - exponent // 2, 14)
    run.k[...] = 0
    run.k[..., 0] = 2.0 ** (of_k if sign < 0 else of_k - 1)
    run.k[best, :, 0] *= 0.5 if sign < 0 else 2.0
    slots = pool.slots(run)
    pool.backend.append(0, run.k.astype(np.float16), run.v.astype(np.float16), slots)
    q = np.zeros((rows, HEADS, head_dim), np.float16)
    q[..., 0] = sign * 2.0**of_q
    scoring = Scoring(2.0 ** (exponent - of_q - of_k) if exponent > 4 else 64.0)
    plan = pool.flat([run], [rows], False)
    (got,) = pool.backend.attend([Attend(0, q, plan, scoring)]).result()
    if exponent > 27 and rows > 1 and np.isnan(got.lse).all():
        assert pool.backend.name == "cuda"
        assert np.isnan(got.o).all()
        return
    want = expected(q, [run], [rows], False, scoring)
    assert np.abs(np.asarray(got.o, np.float64) - want[0]).max() < 2e-3
    assert (np.abs(got.lse - want[1]) <= LSE_BAR + np.abs(want[1]) * 2.0**-22).all()


@pytest.mark.parametrize("rows", [1, 6, 75])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("cap", [0.5, 30.0, 1e3, 1e5, 1e8])
def test_a_soft_cap_of_any_size_keeps_its_accuracy(backend, rng, cap, head_dim, rows) -> None:
    pool = Pooled(backend(geometry("fp16", head_dim)), rng, "fp16")
    run = pool.add(203)
    q = normal(rng, (rows, HEADS, head_dim), "fp16")
    scoring = Scoring(head_dim**-0.5, cap)
    plan = pool.flat([run], [rows], True)
    (got,) = pool.backend.attend([Attend(0, q, plan, scoring)]).result()
    want = expected(q, [run], [rows], True, scoring)
    assert np.abs(got.lse - want[1]).max() <= 1e-4
    assert np.abs(np.asarray(got.o, np.float64) - want[0]).max() <= O_BAR["fp16"]
