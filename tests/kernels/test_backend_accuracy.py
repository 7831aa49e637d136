"""Error never above twice that of the same computation done by torch in the same dtype."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from pooled import ULP, Pooled, bars, check, expected, normal, refusals

from kernels.backend import Attend, DType, PoolGeometry, Scoring

TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def torch_attention(q, k, v, dtype) -> np.ndarray:
    """softmax(q k^T) v step by step in one dtype, heads first."""
    q, k, v = (torch.from_numpy(np.asarray(x, np.float64)).to(TORCH[dtype]) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    s = (q.transpose(0, 1) @ k.transpose(1, 2)) * q.shape[2] ** -0.5
    return (s.softmax(-1) @ v).transpose(0, 1).double().numpy()


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("kv_len", [1, 17, 512, pytest.param(2048, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_error_is_at_most_twice_torchs_in_the_same_dtype(
    backend, rng, dtype, kv_len, heads
) -> None:
    """By root mean square, and for 16-bit formats by the greatest error too: float32's greatest is
    one unlucky element's, ours or torch's, and is held to the absolute bar by the grid.
    """
    geometry = PoolGeometry(1, 200, 16, heads[1], 128, "NHD", dtype)
    rows = 64
    with refusals(backend.kind, geometry):
        pooled = Pooled(backend(geometry), rng, dtype)
        run = pooled.add(kv_len)
        q = normal(rng, (rows, heads[0], 128), dtype)
        plan = pooled.flat([run], [rows], causal=False)
        got = pooled.backend.attend([Attend(0, q, plan, Scoring(128**-0.5))]).result()[0]
        seen = np.ones((rows, kv_len), bool)
        want, _ = oracle.attend(q, run.k, run.v, seen, sm_scale=128**-0.5)
        ours = got.o.astype(np.float64) - want
        theirs = torch_attention(q, run.k, run.v, dtype) - want
        for error in (rms,) if dtype == "fp32" else (rms, greatest):
            floor = ULP[dtype] * (rms(want) / 4 if error is rms else max(1.0, greatest(want)))
            reply = f"{dtype} x {kv_len}: {error(ours)} against torch's {error(theirs)}"
            assert error(ours) <= 2 * error(theirs) + floor, reply


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def greatest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_a_long_prefill_is_tiled_and_stays_within_the_bar(backend, rng, numerics) -> None:
    """Rows x keys would be 2.4 GB of float32 scores here, and the rows are checked by sample."""
    geometry = PoolGeometry(1, 300, 16, 1, 64, "NHD", "fp16")
    with refusals(backend.kind, geometry):
        pooled = Pooled(backend(geometry, numerics=numerics), rng, "fp16")
    run = pooled.add(4096)
    q = normal(rng, (4096, 2, 64), "fp16")
    plan = pooled.flat([run], [4096], causal=True)
    got = pooled.backend.attend([Attend(0, q, plan, Scoring(0.125))]).result()[0]
    for i in (0, 1, 511, 512, 513, 2000, 4095):
        seen = (np.arange(4096) <= i)[None]
        o, lse = oracle.attend(q[i : i + 1], run.k, run.v, seen, sm_scale=0.125)
        assert np.abs(got.o[i].astype(np.float64) - o[0]).max() < 2e-3, f"row {i}"
        assert np.abs(got.lse[i] - lse[0]).max() < 1e-3, f"row {i}"


def test_large_scores_neither_overflow_nor_lose_the_sum(backend, rng) -> None:
    pooled = Pooled(backend(PoolGeometry(1, 8, 16, 1, 64, "NHD", "fp16")), rng, "fp16")
    run = pooled.add(40)
    q = normal(rng, (1, 4, 64), "fp16")
    plan = pooled.flat([run], [1], causal=True)
    got = pooled.backend.attend([Attend(0, q, plan, Scoring(50.0))]).result()[0]
    o, lse = oracle.attend(q, run.k, run.v, np.ones((1, 40), bool), sm_scale=50.0)
    assert np.abs(got.o.astype(np.float64) - o).max() < 5e-3
    assert np.abs(got.lse / lse - 1).max() < 1e-5


@pytest.mark.parametrize(
    ("rows", "head_dim", "num_keys", "causal"),
    [
        (1, 128, 1500, True),
        pytest.param(300, 64, 1500, False, marks=pytest.mark.long),
        pytest.param(300, 64, 4096, True, marks=pytest.mark.long),
        (300, 128, 400, True),
        pytest.param(300, 128, 1500, False, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "step",
    [0.3, 2.0, 7.9, 8.1, 40.0, -0.3, -7.9, -40.0, "saw", "spikes", "-9", "-14", "-60", "-120"],
)
@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.long)])
def test_maxima_that_rise_and_fall_along_the_keys(
    backend,
    rng,
    dtype: DType,
    step: float | str,
    rows: int,
    head_dim: int,
    num_keys: int,
    causal: bool,
) -> None:
    """By `step` in base 2 every 64 keys: below and above the greatest lag of a running maximum.

    Or all scores are about that far below 0: a maximum may also be far above them.
    """
    if backend.kind == "cpu" and dtype == "bf16" and num_keys >= 1500:
        pytest.skip("the CPU computes all shapes in one way")
    place, scale = np.arange(num_keys) // 64, head_dim**-0.5
    if step == "saw":
        height = 5.0 * (place % 4) - 2.0 * place
    elif step == "spikes":
        height = rng.choice([0.0, 0.0, 0.0, 7.0, 12.0, 60.0], num_keys)
    elif isinstance(step, str):
        height = np.full(num_keys, float(step))
    else:
        height = np.clip(step * place, -400.0, 400.0)
    pooled = Pooled(backend(PoolGeometry(1, 300, 16, 1, head_dim, "NHD", dtype)), rng, dtype)
    run = pooled.add(num_keys, bias=height * np.log(2) / scale)
    q = normal(rng, (rows, 4, head_dim), dtype).copy()
    q[:, :, 0] = 1.0
    plan = pooled.flat([run], [rows], causal)
    scoring = Scoring(scale)
    got = pooled.backend.attend([Attend(0, q, plan, scoring)]).result()[0]
    want = expected(q, [run], [rows], causal, scoring)
    check(got, want, bars(backend.kind, dtype, dtype))
