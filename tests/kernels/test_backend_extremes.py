"""Scores, windows, caps, scales and sinks at the ends of their ranges, alone and together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pooled import Pooled, Run, bars, check, expected, int32, normal, refusals, with_sinks

from kernels.backend import Attend, DType, Numerics, Plan, PoolGeometry, Scoring

NUMERICS: tuple[Numerics, ...] = ("fast", "invariant")
ULP: dict[Any, float] = {"fp16": 2.0**-11, "bf16": 2.0**-8}
LAST = 2**31 - 1
"""The highest position."""


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(
    ("num_keys", "rows", "head_dim"),
    [
        (8192, 64, 128),
        (8192, 33, 64),
        pytest.param(8192, 6, 96, marks=pytest.mark.long),
        pytest.param(8192, 512, 64, marks=pytest.mark.long),
        pytest.param(131072, 32, 128, marks=pytest.mark.long),
        pytest.param(131072, 512, 128, marks=[pytest.mark.long, pytest.mark.gpu]),
    ],
)
@pytest.mark.parametrize(
    ("pool", "dtype"), [("fp16", "fp16"), ("bf16", "bf16"), ("fp8_e4m3", "fp16")]
)
def test_many_light_keys_beside_a_heavy_one_keep_their_weight(
    backend, rng, pool: DType, dtype: DType, num_keys: int, rows: int, head_dim: int, numerics
) -> None:
    """All scores of a row may be far from 0, and one key's is higher by `above`, wherever it is.

    Its v is -1 and all others' 1, so that o is off by twice what is lost of the others' weights.
    """
    rows = min(rows, 6) if backend.kind == "cpu" else rows  # it computes all shapes in one way
    geometry = PoolGeometry(1, num_keys // 16, 16, 1, head_dim, "NHD", pool)
    with refusals(backend.kind, geometry):
        pooled = Pooled(backend(geometry, numerics=numerics), rng, dtype)
    places = np.array([0, num_keys // 2 + 3, num_keys - 1])
    k = np.zeros((num_keys, 1, head_dim))
    v = np.ones_like(k)
    k[..., 0] = 1.0
    for i, place in enumerate(places):
        k[place, 0, 1 + i], v[place, 0, i] = 1.0, -1.0
    run = Run(int32(pooled.free[: geometry.num_pages]), k, v)
    kind = normal(rng, (1,), dtype).dtype
    pooled.backend.append(0, k.astype(kind), v.astype(kind), pooled.slots(run))
    q = np.zeros((rows, 2, head_dim), kind)
    q[..., 0] = rng.choice([-90.0, -22.0, -11.0, -9.0, -8.25, -7.0, -5.5, 0.0, 40.0], (rows, 2))
    which = rng.integers(0, 3, (rows, 2))[..., None]
    above = rng.uniform(np.log(num_keys) - 3, 18.0, (rows, 2, 1))
    np.put_along_axis(q, 1 + which, above.astype(kind), 2)
    plan = pooled.flat([run], [rows], False)
    (got,) = pooled.backend.attend([Attend(0, q, plan, Scoring(1.0))]).result()
    heavy = np.exp(np.take_along_axis(q, 1 + which, 2).astype(np.float64))[..., 0]
    total = heavy + num_keys - 1
    want = np.ones((*heavy.shape, head_dim)) * ((heavy + num_keys - 3) / total)[..., None]
    want[..., 3:] = 1.0
    mine = np.arange(3) == which
    want[..., :3] = np.where(mine, ((num_keys - 1 - heavy) / total)[..., None], want[..., :3])
    off = np.abs(got.o.astype(np.float64) - want)
    assert (off <= 2.5e-3 + ULP[dtype] * np.abs(want)).all(), f"o is off by {off.max()}"
    lse = q[..., 0].astype(np.float64) + np.log(total)
    assert np.abs(got.lse - lse).max() < 1e-3


WINDOWS = (LAST, LAST - 1, LAST - 100, 2**30, 100, 0, -1)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("qo_lens", [[1, 130], [2, 20]])
def test_windows_of_any_size_hide_the_same_keys_at_any_position(
    backend, rng, qo_lens: list[int], far: bool, numerics
) -> None:
    """Rows before the first key among them; `far`: the last row is at the highest position."""
    geometry = PoolGeometry(1, 40, 16, 1, 64, "NHD", "fp16")
    pooled = Pooled(backend(geometry, numerics=numerics), rng, "fp16")
    runs = [pooled.add(100), pooled.add(97)]
    q = normal(rng, (sum(qo_lens), 2, 64), "fp16")
    for causal in (False, True):
        plan = pooled.flat(runs, qo_lens, causal)
        if far:
            (level,) = plan.levels
            moved = LAST - int(plan.positions.max())
            level = replace(level, kv_start=int32(level.kv_start + moved))
            plan = Plan((level,), int32(plan.positions + moved))
        for window in WINDOWS:
            scoring = Scoring(0.125, window_left=window)
            (got,) = pooled.backend.attend([Attend(0, q, plan, scoring)]).result()
            want = expected(q, runs, qo_lens, causal, scoring)
            check(got, want, bars(backend.kind, "fp16", "fp16"), (causal, window))


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(
    ("pool", "dtype"),
    [("fp16", "fp16"), ("bf16", "bf16"), ("fp8_e4m3", "fp16"), ("fp8_e5m2", "bf16")],
)
@pytest.mark.parametrize("draws", [2, pytest.param(24, marks=pytest.mark.long)])
def test_extremes_drawn_together(
    backend, rng, draws: int, pool: DType, dtype: DType, numerics
) -> None:
    for _ in range(draws):
        head_dim, kv_heads = int(rng.choice([64, 128, 256])), int(rng.choice([1, 2]))
        geometry = PoolGeometry(1, 300, int(rng.choice([5, 16])), kv_heads, head_dim, "HND", pool)
        with refusals(backend.kind, geometry):
            pooled = Pooled(backend(geometry, numerics=numerics), rng, dtype)
        lens = [int(n) for n in rng.integers(1, [900, 200, 30])]
        qo_lens = [int(n) for n in rng.choice([1, 3, 33, 100], 3)]
        scale = float(np.exp(rng.uniform(np.log(1e-6), np.log(30.0))))
        cap = float(rng.choice([0.0, 0.0, 1e-3, 2.0, 50.0, 1e6]))
        level = float(rng.choice([-300.0, -40.0, -9.0, -3.0, 0.0, 5.0, 200.0]))
        runs = []
        for count in lens:  # around one level, with some keys far above or below
            height = level + rng.choice([0.0, 0.0, 0.0, -30.0, 9.0, 17.0], count)
            runs.append(pooled.add(count, bias=np.clip(height / scale, -400.0, 400.0)))
        q = normal(rng, (sum(qo_lens), 4, head_dim), dtype).copy()
        q[..., 1:] *= min(1.0, 1.0 / scale)
        q[..., 0] = 1.0
        window = int(rng.choice([-1, 0, 7, 300, 2**30, LAST - 5, LAST]))
        scoring, causal = Scoring(scale, cap, window), bool(rng.integers(2))
        sinks = (rng.choice([-np.inf, -1e30, -50.0, 0.0, 12.0, 300.0], 4)).astype(np.float32)
        plan = pooled.flat(runs, qo_lens, causal)
        (got,) = pooled.backend.attend([Attend(0, q, plan, scoring, sinks=sinks)]).result()
        want = with_sinks(expected(q, runs, qo_lens, causal, scoring), sinks)
        bar = bars(backend.kind, dtype, pool)
        case = (geometry, lens, qo_lens, scoring, causal, level, sinks)
        check(got, want, replace(bar, lse=bar.lse * (1 + abs(level) / 100)), case)
