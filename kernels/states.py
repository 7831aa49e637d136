"""The algebra of attention states in numpy, for processes without a device.

A state is attention over a set of keys: `o` (normalised) and `lse = log sum_j exp(s_j)`, natural
log. States of the same queries over disjoint sets merge (cascade inference: Ye et al.,
https://flashinfer.ai/2024/02/02/cascade-inference.html; FlashInfer, arXiv 2501.01005, section 2.2;
the recurrence is online softmax, Milakov & Gimelshein, arXiv 1805.02867):

    lse = log(exp(lse_a) + exp(lse_b))
    o   = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

Merging is commutative and associative, and the empty state `(0, -inf)` is its identity: nothing
else about the order or the grouping of keys survives in the result. A member whose lse is NaN or
+inf makes o and lse NaN; one whose weight is 0 adds nothing, whatever its o holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.backend import Array, AttentionState, Float32
from kernels.tensor import host_array


def merge_state(a: AttentionState, b: AttentionState) -> AttentionState:
    """Merge two states `o [n, H, D]`, `lse [n, H]` of the same rows; o in a's dtype.

    Raises `ValueError` when the shapes differ.
    """
    if a.o.shape != b.o.shape:
        raise ValueError(f"o has shapes {a.o.shape} and {b.o.shape}: must be equal")
    o = host_array(a.o), host_array(b.o).astype(a.o.dtype)
    return merge_states(np.stack(o, 1), np.stack((host_array(a.lse), host_array(b.lse)), 1))


def merge_states(o: Array, lse: Float32) -> AttentionState:
    """Merge the T states of each row: `o [n, T, H, D]`, `lse [n, T, H]`; o in its own dtype.

    T may be 0, which gives the empty state. Raises `ValueError` when lse is not o's shape without
    its last axis.
    """
    _check(o, lse, 4)
    top = lse.max(axis=1, initial=-np.inf, keepdims=True)
    weight = _weights(lse, top)
    return _normalise(_weighted(o, weight).sum(axis=1), weight.sum(axis=1), top[:, 0], o.dtype)


def add_sinks(state: AttentionState, sinks: Float32) -> AttentionState:
    """States `o [n, H, D]` merged with the states (0, sinks[h]) of their heads."""
    lse = np.stack(np.broadcast_arrays(host_array(state.lse), sinks), 1)
    o = host_array(state.o)
    return merge_states(np.stack((o, np.zeros_like(o)), 1), lse.astype(np.float32))


def merge_state_in_place(state: AttentionState, other: AttentionState) -> None:
    """Merge `other` into `state`, whose arrays are overwritten."""
    merged = merge_state(state, other)
    host_array(state.o)[...] = merged.o
    host_array(state.lse)[...] = merged.lse


def merge_ragged_states(o: Array, lse: Float32, indptr: Array) -> AttentionState:
    """Merge rows `indptr[t]:indptr[t+1]` of `o [nnz, H, D]`, `lse [nnz, H]` into row t of T.

    An empty list gives the empty state. Raises `ValueError` for shapes that disagree, or an indptr
    that does not start at 0, decreases, or ends elsewhere than nnz.
    """
    _check(o, lse, 3)
    lengths = np.diff(indptr)
    if indptr[0] != 0 or indptr[-1] != len(o) or bool((lengths < 0).any()):
        raise ValueError(f"indptr must rise from 0 to {len(o)}, the number of states")
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


def _check(o: Array, lse: Array, axes: int) -> None:
    if o.ndim != axes or lse.shape != o.shape[:-1]:
        raise ValueError(f"o {o.shape}, lse {lse.shape}: lse is o's {axes} axes without the last")
