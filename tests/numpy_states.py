"""Merges of attention states in numpy, float32: what those of backends are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.backend import Array, AttentionState, Float32
from kernels.tensor import host_array


def add_sinks(state: AttentionState, sinks: Float32) -> AttentionState:
    """States `o [n, H, D]` merged with the states (0, sinks[h]) of their heads."""
    o, lse = host_array(state.o), host_array(state.lse)
    both = np.stack((o, np.zeros_like(o)), 1).reshape(-1, *o.shape[1:])
    all_lse = np.stack(np.broadcast_arrays(lse, sinks), 1).reshape(-1, lse.shape[1])
    return merge_ragged_states(both, all_lse.astype(np.float32), 2 * np.arange(len(o) + 1))


def merge_ragged_states(o: Array, lse: Float32, indptr: Array) -> AttentionState:
    """Merge rows `indptr[t]:indptr[t+1]` of `o [nnz, H, D]`, `lse [nnz, H]` into row t of T.

    An empty list gives the empty state.
    """
    lengths = np.diff(indptr)
    lists, shape = np.repeat(np.arange(lengths.size), lengths), (lengths.size, o.shape[1])
    top = np.full(shape, -np.inf, np.float32)
    np.maximum.at(top, lists, lse)
    weight = _weights(lse, top[lists])
    total, sums = np.zeros(shape, np.float32), np.zeros((*shape, o.shape[2]), np.float32)
    np.add.at(total, lists, weight)
    np.add.at(sums, lists, _weighted(o, weight))
    return _normalise(sums, total, top, o.dtype)


def _weights(lse: Array, top: Array) -> Array:
    """exp(lse - top); 0 of empty states, NaN where lse is NaN or +inf."""
    with np.errstate(invalid="ignore"):
        weight: Array = np.exp(lse - np.where(np.isneginf(top), 0, top))
    return weight


def _weighted(o: Array, weight: Array) -> Array:
    """o in float32 times its weight; 0 where that is 0, whatever o holds: 0 * NaN is NaN."""
    with np.errstate(invalid="ignore"):
        product = weight[..., None] * o.astype(np.float32)
    weighted: Array = np.where((weight == 0)[..., None], 0, product)
    return weighted


def _normalise(o: Array, total: Array, top: Array, dtype: np.dtype[Any]) -> AttentionState:
    """Sums over exp(lse - top) as a state; a total of 0 is the empty state."""
    empty = total == 0
    divisor = np.where(empty, 1, total)
    with np.errstate(invalid="ignore"):
        lse = np.where(empty, -np.inf, top + np.log(divisor)).astype(np.float32)
        return AttentionState((o / divisor[..., None]).astype(dtype), lse)
