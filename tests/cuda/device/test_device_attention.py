"""Attention on the device against the float64 oracle: decode and cascade grids, every option."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy")

from flat_plans import shared_pages  # noqa: E402

from kernels.backend import (  # noqa: E402
    NUMPY_DTYPES,
    Attend,
    DType,
    Mask,
    Plan,
    PoolGeometry,
    Scoring,
)

DTYPES: tuple[DType, ...] = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
HEADS = ((4, 4), (32, 8), (7, 1), (28, 4), (16, 1), (32, 1), (64, 1))


@lru_cache(maxsize=2)
def made(geometry: PoolGeometry) -> Any:
    from kernels.cuda.backend import CudaBackend

    return CudaBackend(geometry)


def backend_of(geometry: PoolGeometry) -> Any:
    """A backend with every slot live and random: plans poison dead slots."""
    from device_cases import fill

    backend = made(geometry)
    fill(backend, 1)
    return backend


def geometry(
    pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: DType,
    layout: Any,
    layers: int = 1,
) -> PoolGeometry:
    return PoolGeometry(layers, pages, page_size, kv_heads, head_dim, layout, dtype, 0.5, 2.0)


def q_dtype_of(dtype: DType, index: int) -> DType:
    if not dtype.startswith("fp8"):
        return dtype
    return ("fp16", "bf16")[index % 2]


def check(
    backend: Any, q: Any, plan: Plan, scoring: Scoring, mask: Mask | None = None, layer: int = 0
) -> None:
    from device_cases import assert_close, oracle

    (state,) = backend.attend([Attend(layer, q, plan, scoring, mask)]).result()
    assert state.o.dtype == q.dtype
    dtype = "bf16" if q.dtype == NUMPY_DTYPES["bf16"] else "fp16"
    assert_close(state, oracle(backend, layer, q, plan, scoring, mask), dtype)


def decode_plan(backend: Any, kv_lens: list[int], seed: int, pool: Any = None) -> Plan:
    from device_cases import PagePool, Segment, make_level

    pool = pool or PagePool(backend, np.random.default_rng(seed))
    segments = [Segment(i, i + 1, n, 0) for i, n in enumerate(kv_lens)]
    positions = np.array([n - 1 for n in kv_lens], np.int32)
    return Plan((make_level(segments, pool, len(kv_lens)),), positions)


def decode_cases() -> list[Any]:
    """Every (batch, kv_len, page_size), the other axes taking turns."""
    cases, i = [], 0
    for batch in (12, 17, 128):
        for kv_len in (54, 97, 512, 2048, 16384):
            for page_size in (1, 8, 16):
                heads = HEADS[i % len(HEADS)]
                dim, dtype = (64, 128, 256)[(i // 2) % 3], DTYPES[(i // 3) % 4]
                layout = ("NHD", "HND")[(i // 5) % 2]
                if batch * kv_len * heads[1] * dim > 2**30:
                    heads = (8, 1)
                cases.append((batch, kv_len, page_size, *heads, dim, dtype, layout))
                i += 1
    return cases


@pytest.mark.parametrize("case", decode_cases(), ids=lambda c: "-".join(map(str, c)))
def test_decode_matches_the_oracle(case: Any) -> None:
    from device_cases import random_q

    batch, kv_len, page_size, qo_heads, kv_heads, dim, dtype, layout = case
    rng = np.random.default_rng(batch + kv_len)
    kv_lens = [kv_len] * batch
    kv_lens[1] = max(1, kv_len - 3)
    pages = sum(-(-n // page_size) for n in kv_lens) + 3
    backend = backend_of(geometry(pages, page_size, kv_heads, dim, dtype, layout))
    q = random_q((batch, qo_heads, dim), q_dtype_of(dtype, batch), rng)
    check(backend, q, decode_plan(backend, kv_lens, 5), Scoring(dim**-0.5))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(("heads", "dim"), [((32, 32), 128), ((128, 32), 64), ((256, 32), 128)])
def test_sequences_with_the_same_pages_and_no_level_for_them(
    heads: Any, dim: int, dtype: DType, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from device_cases import random_q

    from kernels.cuda.plan import planner

    monkeypatch.setattr(planner, "H200", replace(planner.H200, cache_bytes=0))
    rng = np.random.default_rng(heads[0])
    shared, batch, page_size = 2048, 40, 16
    kv_lens = [shared + 1 + int(n) for n in rng.integers(0, 60, batch)]
    pages = sum(-(-n // page_size) for n in kv_lens)
    backend = backend_of(geometry(pages, page_size, heads[1], dim, dtype, layout))
    plan = shared_pages(decode_plan(backend, kv_lens, 5), shared // page_size)
    q = random_q((batch, heads[0], dim), q_dtype_of(dtype, batch), rng)
    check(backend, q, plan, Scoring(dim**-0.5))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (28, 4), (32, 1), (64, 1), (24, 1)])
def test_ragged_lengths_of_every_head_dim_and_dtype(dim: int, dtype: DType, heads: Any) -> None:
    from device_cases import random_q

    kv_lens = [1, 15, 16, 17, 0, 54, 97, 512, 700, 33, 5]
    backend = backend_of(geometry(400, 5, heads[1], dim, dtype, "NHD"))
    q = random_q((len(kv_lens), heads[0], dim), q_dtype_of(dtype, dim), np.random.default_rng(dim))
    check(backend, q, decode_plan(backend, kv_lens, 2), Scoring(dim**-0.5))


def prefill_plan(backend: Any, qo_lens: list[int], kv_lens: list[int], causal: bool) -> Plan:
    from device_cases import PagePool, Segment, make_level

    pool = PagePool(backend, np.random.default_rng(4))
    bounds = np.cumsum([0, *qo_lens])
    segments = [Segment(int(bounds[i]), int(bounds[i + 1]), n, 0) for i, n in enumerate(kv_lens)]
    positions = np.concatenate(
        [np.arange(k - q, k) for q, k in zip(qo_lens, kv_lens, strict=True)]
    ).astype(np.int32)
    return Plan((make_level(segments, pool, int(bounds[-1]), causal),), positions)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qo_len", [1, 4, 17, 37, 127, 577])
@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "page_size"),
    [
        ((32, 8), 128, "fp16", 16),
        ((4, 4), 64, "bf16", 1),
        ((28, 4), 128, "bf16", 5),
        ((8, 2), 256, "fp16", 16),
        ((8, 1), 80, "fp8_e4m3", 16),
        ((8, 8), 128, "fp8_e5m2", 64),
        ((16, 1), 192, "fp16", 8),
    ],
)
def test_prefill_matches_the_oracle(
    causal: bool, qo_len: int, heads: Any, dim: int, dtype: DType, page_size: int
) -> None:
    from device_cases import random_q

    qo_lens = [qo_len, 3, qo_len, qo_len]
    kv_lens = [54, 97, 512, 2048]  # with more queries than keys where qo_len is large
    pages = 3000 // page_size + 16
    backend = backend_of(geometry(pages, page_size, heads[1], dim, dtype, "NHD"))
    q = random_q((sum(qo_lens), heads[0], dim), q_dtype_of(dtype, qo_len), np.random.default_rng(9))
    plan = prefill_plan(backend, qo_lens, kv_lens, causal)
    check(backend, q, plan, Scoring(dim**-0.5))
    check(backend, q, plan, Scoring(dim**-0.5, 0.0, 40))


@pytest.mark.parametrize("heads", [(4, 4), (32, 8), (7, 1), (8, 1)])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["fp16", "fp8_e5m2"])
def test_cascades_with_rows_missing_levels_and_an_order(
    depth: int, heads: Any, dtype: DType
) -> None:
    from device_cases import PagePool, Segment, make_level, random_q

    rng = np.random.default_rng(depth)
    rows = 70
    backend = backend_of(geometry(700, 16, heads[1], 128, dtype, "NHD", layers=2))
    pool = PagePool(backend, rng)
    levels, start = [], 0
    for index in range(depth):
        count = 1 + 4**index
        cuts = np.unique(np.concatenate([[0, rows], rng.integers(0, rows, count)]))
        segments = [
            Segment(int(a), int(b), int(rng.integers(0, 230)), start)
            for a, b in pairwise(cuts)
            if rng.random() > 0.2
        ]
        levels.append(make_level(segments, pool, rows))
        start += 230
    order = rng.permutation(rows).astype(np.int32)
    plan = Plan(tuple(levels), np.full(rows, start, np.int32), order)
    q = random_q((rows, heads[0], 128), q_dtype_of(dtype, 0), rng)
    check(backend, q, plan, Scoring(128**-0.5), layer=1)
    check(backend, q, plan, Scoring(128**-0.5, 8.0, 300), layer=1)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(
    ("heads", "dim", "kv_lens"),
    [
        ((32, 8), 128, [200] * 16),  # a tile or two a warp
        ((6, 3), 128, [1, 16, 17, 31, 32, 33, 300, 2]),
        ((4, 4), 128, [9, 40] * 700),  # several sequences a team
        ((24, 2), 128, [50, 1, 70]),
        ((4, 2), 192, [3000, 17]),  # a sequence of several teams
        ((5, 1), 256, [2000, 16, 1]),
    ],
)
def test_a_decode_stores_the_new_tokens_that_it_reads(
    heads: Any, dim: int, kv_lens: list[int], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    from kernels.cuda.attention import device_plan as planning
    from kernels.cuda.attention.config import AttentionConfig
    from kernels.cuda.lanes.lane import ends_with

    if heads[0] > 8 * heads[1]:  # also where one wide kernel would be faster
        monkeypatch.setattr(planning, "batch_kind", lambda *_: "usual")
    rng, rows, layer = np.random.default_rng(7), len(kv_lens), 1
    pages = sum(-(-n // page_size) for n in kv_lens) + 3
    backend = backend_of(geometry(pages, page_size, heads[1], dim, "fp16", "NHD", layers=2))
    plan = decode_plan(backend, kv_lens, 5)
    (level,) = plan.levels
    last = level.kv_indices[level.kv_indptr[1:] - 1] * page_size + level.kv_last_page_len - 1
    order = rng.permutation(rows).astype(np.int32)
    slots = np.empty(rows, np.int32)
    slots[order] = last
    plan = replace(plan, order=order)
    assert ends_with(plan, slots, page_size)
    config = AttentionConfig(backend.kv, heads[0], "fp16", Scoring(dim**-0.5), False)
    device_plan = backend.attention.make([(layer, plan)], config)
    assert device_plan.appends
    q, k, v = (
        cupy.asarray(rng.standard_normal((rows, n, dim)).astype(np.float16))
        for n in (heads[0], heads[1], heads[1])
    )
    dead = cupy.full((rows, heads[1], dim), np.nan, np.float16).get()
    backend.append(layer, dead, dead, slots).result()
    backend.transfers.finish()
    states = []
    for new in ((k.data.ptr, v.data.ptr), (0, 0)):  # the second time they are there
        o, lse = cupy.empty_like(q), cupy.empty(q.shape[:2], np.float32)
        where = (q.data.ptr, o.data.ptr, lse.data.ptr)
        with backend.transfers.compute:
            backend.attention.enqueue(device_plan, config, layer, where, new=new)
        backend.transfers.finish()
        states.append((o.get(), lse.get()))
        found = backend.gather(layer, slots, "fp16").result()
        for got, given in zip(found, (k, v), strict=True):
            np.testing.assert_array_equal(got.view(np.uint16), given.get().view(np.uint16))
    for got, wanted in zip(*states, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert np.isfinite(states[0][0]).all()
    check(backend, q.get(), plan, Scoring(dim**-0.5), layer=layer)
