"""The accuracy bar over a pairwise-covered grid, dead slots poisoned, pages shuffled."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from pairwise import cover, label
from pooled import Pooled, Run, as_computed, bars, check, expected, indptr, normal, refusals

from kernels.backend import Attend, PoolGeometry, RaggedAttend, Scoring
from kernels.masks import make_mask

HEADS = ((4, 4), (32, 8), (7, 1), (28, 4))
DTYPES = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
TENSORS = ("fp32", "fp16", "bf16")
POOLS = {
    "page_size": (1, 5, 16, 64),
    "head_dim": (64, 80, 128),
    "heads": HEADS,
    "layout": ("NHD", "HND"),
    "dtype": DTYPES,
    "q_dtype": TENSORS,
}
DECODE = cover(
    kv_len=(0, 1, 15, 16, 17, 54, 97, 512, 2048),
    **POOLS,
    window=(-1, 0, 100),
    cap=(0, 8.0),
    scale=(1.0, -2.0, 0.0),
)
PREFILL = cover(
    qo_len=(1, 17, 37, 130),
    kv_len=(0, 1, 16, 54, 97, 300),
    **POOLS,
    causal=(True, False),
    window=(-1, 0, 20),
    cap=(0, 8.0),
    masked=(True, False),
)
RAGGED = cover(
    qo_len=(1, 17, 37, 130),
    kv_len=(0, 1, 16, 54, 97, 300),
    heads=HEADS,
    head_dim=(64, 80, 128),
    dtype=TENSORS,
    causal=(True, False),
    window=(-1, 0, 20),
    cap=(0, 8.0),
    masked=(True, False),
)


def geometry(case, num_pages: int) -> PoolGeometry:
    return PoolGeometry(
        num_layers=2,
        num_pages=num_pages,
        page_size=case["page_size"],
        num_kv_heads=case["heads"][1],
        head_dim=case["head_dim"],
        layout=case["layout"],
        dtype=case["dtype"],
        k_scale=0.02,
        v_scale=0.03,
    )


def pages_for(lengths, page_size: int) -> int:
    return sum(-(-n // page_size) for n in lengths) + 3


def random_masks(rng, qo_lens, kv_lens):
    return [rng.random((qo, kv)) < 0.6 for qo, kv in zip(qo_lens, kv_lens, strict=True)]


@pytest.mark.parametrize("case", DECODE, ids=label)
def test_decode_is_within_the_bar(backend, rng, case) -> None:
    kv_lens = [case["kv_len"], 0, 33, case["kv_len"], 1]
    shape = geometry(case, pages_for(kv_lens, case["page_size"]))
    with refusals(backend.kind, shape):
        pooled = Pooled(backend(shape), rng, case["q_dtype"])
        runs = [pooled.add(n, layer=1) for n in kv_lens]
        ones = [1] * len(runs)
        q = normal(rng, (len(runs), case["heads"][0], case["head_dim"]), case["q_dtype"])
        scale = case["scale"] * case["head_dim"] ** -0.5
        scoring = Scoring(scale, case["cap"], case["window"])
        plan = pooled.flat(runs, ones, causal=True)
        got = pooled.backend.attend([Attend(1, q, plan, scoring)]).result()[0]
        assert got.o.dtype == q.dtype
        dtypes = case["q_dtype"], case["dtype"]
        want = expected(as_computed(backend.kind, q, *dtypes), runs, ones, True, scoring)
        check(got, want, bars(backend.kind, *dtypes), case)


@pytest.mark.parametrize("case", PREFILL, ids=label)
def test_paged_prefill_is_within_the_bar(backend, rng, case) -> None:
    qo_lens, kv_lens = [case["qo_len"], 0, 3, 2], [case["kv_len"], 9, 0, 40]
    shape = geometry(case, pages_for(kv_lens, case["page_size"]))
    with refusals(backend.kind, shape):
        pooled = Pooled(backend(shape), rng, case["q_dtype"])
        runs = [pooled.add(n) for n in kv_lens]
        masks = random_masks(rng, qo_lens, kv_lens) if case["masked"] else None
        mask = masks and make_mask(np.concatenate([m.ravel() for m in masks]), qo_lens, kv_lens)
        q = normal(rng, (sum(qo_lens), case["heads"][0], case["head_dim"]), case["q_dtype"])
        scoring = Scoring(case["head_dim"] ** -0.5, case["cap"], case["window"])
        plan = pooled.flat(runs, qo_lens, case["causal"])
        got = pooled.backend.attend([Attend(0, q, plan, scoring, mask)]).result()[0]
        dtypes = case["q_dtype"], case["dtype"]
        rounded = as_computed(backend.kind, q, *dtypes)
        want = expected(rounded, runs, qo_lens, case["causal"], scoring, masks)
        check(got, want, bars(backend.kind, *dtypes), case)


@pytest.mark.parametrize("case", RAGGED, ids=label)
def test_ragged_prefill_is_within_the_bar(backend, rng, case) -> None:
    qo_lens, kv_lens = [case["qo_len"], 0, 3, 2], [case["kv_len"], 9, 0, 40]
    (heads, kv_heads), dim, dtype = case["heads"], case["head_dim"], case["dtype"]
    maker = backend(PoolGeometry(1, 4, 16, 2, 64, "NHD", "fp16"))
    q = normal(rng, (sum(qo_lens), heads, dim), dtype)
    k, v = (normal(rng, (sum(kv_lens), kv_heads, dim), dtype) for _ in range(2))
    ends = indptr(kv_lens)
    none = np.zeros(0, np.int32)
    rounded = [as_computed(backend.kind, x, dtype, dtype) for x in (q, k, v)]
    runs = [Run(none, rounded[1][a:b], rounded[2][a:b]) for a, b in pairwise(ends)]
    masks = random_masks(rng, qo_lens, kv_lens) if case["masked"] else None
    mask = masks and make_mask(np.concatenate([m.ravel() for m in masks]), qo_lens, kv_lens)
    scoring = Scoring(dim**-0.5, case["cap"], case["window"])
    request = RaggedAttend(q, k, v, indptr(qo_lens), ends, case["causal"], scoring, mask)
    got = maker.attend_ragged(request).result()
    want = expected(rounded[0], runs, qo_lens, case["causal"], scoring, masks)
    check(got, want, bars(backend.kind, dtype, dtype), case)
