"""Many rows over fp8 pools: the states of a 16-bit pool with the same values, and the oracle's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from kernels.backend import Attend, DType, Layout, Mask, Plan, PoolGeometry, Scoring  # noqa: E402
from kernels.masks import make_mask  # noqa: E402

HEADS, KV_HEADS, SHARED = 8, 2, 520
ROWS, KEYS = (37, 1, 130, 64), (300, 17, 130, 193)
"""Query rows and keys of each sequence behind the shared ones: 4 packed rows to a row."""


def backend_of(head_dim: int, dtype: DType, page_size: int, layout: Layout) -> Any:
    from kernels.cuda.backend import CudaBackend

    pages = 2 * (SHARED + sum(KEYS)) // page_size + 16
    return CudaBackend(
        PoolGeometry(1, pages, page_size, KV_HEADS, head_dim, layout, dtype, 0.5, 2.0)
    )


def cascade(backend: Any, rng: np.random.Generator) -> Plan:
    """A shared run of which all rows see everything, and causal runs of their own."""
    from device_cases import PagePool, Segment, int32, make_level

    pool, rows = PagePool(backend, rng), sum(ROWS)
    shared = make_level([Segment(0, rows, SHARED, 0)], pool, rows)
    ends = np.cumsum([0, *ROWS]).tolist()
    own = [Segment(a, b, n, SHARED) for (a, b), n in zip(pairwise(ends), KEYS, strict=True)]
    positions = [np.arange(n - r, n) + SHARED for r, n in zip(ROWS, KEYS, strict=True)]
    levels = (shared, make_level(own, pool, rows, causal=True))
    return Plan(levels, int32(np.concatenate(positions)), int32(rng.permutation(rows)))


def random_mask(rng: np.random.Generator) -> Mask:
    whole = [SHARED + n for n in KEYS]
    bits = [rng.random(r * n) < 0.6 for r, n in zip(ROWS, whole, strict=True)]
    sizes = (np.asarray(ROWS, np.int32), np.asarray(whole, np.int32))
    return make_mask(np.concatenate(bits), *sizes)


def dequantised(backend: Any, compute: DType) -> Any:
    """A pool of `compute` with the values that an fp8 pool stores, without their scales."""
    from device_cases import TORCH, pool_tensor

    g = backend.geometry
    other = backend_of(g.head_dim, compute, g.page_size, g.layout)
    pool_tensor(other).copy_(pool_tensor(backend).to(TORCH[compute]))
    cupy.cuda.Device().synchronize()
    return other


SCORINGS = {"plain": (0.0, -1), "capped": (20.0, -1), "window": (0.0, 77)}


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("scored", SCORINGS)
@pytest.mark.parametrize(
    ("head_dim", "storage", "compute", "page_size", "layout"),
    [
        (128, "fp8_e4m3", "fp16", 16, "NHD"),
        (128, "fp8_e5m2", "bf16", 16, "HND"),
        (128, "fp8_e4m3", "bf16", 1, "NHD"),
        (128, "fp8_e4m3", "fp16", 5, "HND"),
        (64, "fp8_e5m2", "fp16", 32, "NHD"),
        (64, "fp8_e4m3", "bf16", 16, "HND"),
        (192, "fp8_e4m3", "fp16", 16, "NHD"),
        (256, "fp8_e4m3", "fp16", 16, "NHD"),
    ],
)
def test_fp8_pools_give_what_their_values_in_16_bits_give(
    head_dim: int,
    storage: DType,
    compute: DType,
    page_size: int,
    layout: Layout,
    scored: str,
    masked: bool,
) -> None:
    from device_cases import BAR, assert_close, fill, oracle, random_q

    rng = np.random.default_rng(head_dim + page_size)
    backend = backend_of(head_dim, storage, page_size, layout)
    fill(backend, 5)
    plan = cascade(backend, rng)
    q = random_q((sum(ROWS), HEADS, head_dim), compute, rng)
    mask = random_mask(rng) if masked else None
    cap, window = SCORINGS[scored]
    scoring = Scoring(head_dim**-0.5, cap, window)
    (state,) = backend.attend([Attend(0, q, plan, scoring, mask)]).result()
    assert_close(state, oracle(backend, 0, q, plan, scoring, mask), compute)

    k_scale, v_scale = backend.geometry.scales
    scaled = Scoring(scoring.sm_scale * k_scale, cap, window)
    request = Attend(0, q, plan, scaled, mask)
    (same,) = dequantised(backend, compute).attend([request]).result()
    o, want = state.o.astype(np.float64) / v_scale, same.o.astype(np.float64)
    assert np.abs(o - want).max() <= 2 * BAR[compute]
    assert np.array_equal(np.isinf(state.lse), np.isinf(same.lse))
    seen = np.isfinite(same.lse)
    assert np.abs(state.lse[seen] - same.lse[seen]).max() <= 1e-4
