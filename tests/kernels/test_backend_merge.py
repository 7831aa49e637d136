"""`Backend.merge`: two, many, in place, variable-length; empty states and empty lists."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import oracle
import pytest
from numpy_states import merge_ragged_states
from pooled import Bars, check, indptr, int32, normal

from kernels.backend import AttentionState, PoolGeometry

GEOMETRY = PoolGeometry(1, 2, 4, 2, 64, "NHD", "fp16")
BARS = {
    "fp32": Bars(1e-5, 1e-5, 0),
    "fp16": Bars(1e-3, 1e-5, 2.0**-11),
    "bf16": Bars(1e-2, 1e-5, 2.0**-8),
}


def random_states(rng, rows: int, heads: int, dim: int, dtype, empty: float = 0.2):
    """States of which some are empty."""
    o = np.array(normal(rng, (rows, heads, dim), dtype))
    lse = (8 * rng.standard_normal((rows, heads))).astype(np.float32)
    is_empty = rng.random((rows, heads)) < empty
    lse[is_empty] = -np.inf
    o[is_empty] = 0
    return o, lse


def wanted(o, lse, ends) -> oracle.State:
    outs, lses = [], []
    for begin, end in pairwise(ends):
        empty = (np.zeros(o.shape[1:]), np.full(lse.shape[1:], -np.inf))
        out = oracle.merge([empty, *zip(o[begin:end], lse[begin:end], strict=True)])
        outs.append(out[0])
        lses.append(out[1])
    return np.stack(outs), np.stack(lses)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 64), (7, 80), (32, 128), (48, 256), (3, 7), (1030, 1), (2, 300)]
)
def test_lists_of_any_length_merge(backend, rng, heads, dim, dtype) -> None:
    lengths = [2, 0, 1, 9, 2, 0, 33, 1]
    o, lse = random_states(rng, sum(lengths), heads, dim, dtype)
    got = backend(GEOMETRY).merge(o, lse, indptr(lengths)).result()
    assert got.o.dtype == o.dtype
    check(got, wanted(o, lse, indptr(lengths)), BARS[dtype], (heads, dim, dtype))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_merging_in_place_overwrites_the_state_given_and_returns_it(backend, rng, dtype) -> None:
    lengths = [0, 1, 5, 2]
    o, lse = random_states(rng, sum(lengths), 8, 64, dtype)
    into = AttentionState(*random_states(rng, 4, 8, 64, dtype, empty=0.5))
    rows = [
        [(into.o[t], into.lse[t]), *zip(o[a:b], lse[a:b], strict=True)]
        for t, (a, b) in enumerate(zip([0, 0, 1, 6], [0, 1, 6, 8], strict=True))
    ]
    merged = [oracle.merge(row) for row in rows]
    got = backend(GEOMETRY).merge(o, lse, indptr(lengths), into).result()
    assert got.o is into.o
    assert got.lse is into.lse
    want = np.stack([o for o, _ in merged]), np.stack([lse for _, lse in merged])
    check(into, want, BARS[dtype])


def test_empty_states_merge_to_the_empty_state_exactly(backend) -> None:
    o, lse = np.zeros((3, 4, 64), np.float16), np.full((3, 4), -np.inf, np.float32)
    got = backend(GEOMETRY).merge(o, lse, int32([0, 2, 2, 3])).result()
    assert not got.o.any()
    assert np.isneginf(got.lse).all()


def test_the_device_and_numpy_merge_alike(backend, rng) -> None:
    o, lse = random_states(rng, 12, 4, 64, "fp32")
    ends = int32([0, 5, 5, 12])
    got, want = backend(GEOMETRY).merge(o, lse, ends).result(), merge_ragged_states(o, lse, ends)
    check(got, (want.o.astype(np.float64), want.lse.astype(np.float64)), BARS["fp32"])
