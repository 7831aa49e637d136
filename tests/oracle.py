"""Dense attention in float64, one row and one head at a time: what every backend must equal.

Written from the definition and from nothing else: no pages, no tiles, no online softmax. Keys are
the row's own keys in order, with a flag for each that says whether the row may see it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
State = tuple[Array, Array]


def visible(
    qo_len: int,
    kv_len: int,
    *,
    causal: bool = False,
    window_left: int = -1,
    mask: Array | None = None,
) -> Array:
    """Which keys each query of one sequence sees, `[qo_len, kv_len]`, aligned bottom-right."""
    seen = np.ones((qo_len, kv_len), bool)
    for i in range(qo_len):
        for j in range(kv_len):
            if causal and not j + qo_len <= kv_len + i:
                seen[i, j] = False
            if window_left >= 0 and not j + qo_len + window_left >= kv_len + i:
                seen[i, j] = False
    return seen if mask is None else seen & mask.reshape(qo_len, kv_len)


def attend(
    q: Array,
    k: Array,
    v: Array,
    seen: Array,
    *,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
) -> State:
    """`q [n, Hq, D]`, `k [m, Hkv, D]`, `v [m, Hkv, E]`, `seen [n, m]` -> `o [n, Hq, E]`, `lse [n,
    Hq]`."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    n, heads, _ = q.shape
    group = heads // k.shape[1]
    o, lse = np.zeros((n, heads, v.shape[2])), np.full((n, heads), -np.inf)
    for i in range(n):
        keys = np.flatnonzero(seen[i])
        for head in range(heads):
            o[i, head], lse[i, head] = row(
                q[i, head],
                k[keys, head // group],
                v[keys, head // group],
                sm_scale,
                logits_soft_cap,
            )
    return o, lse


def row(q: Array, k: Array, v: Array, sm_scale: float, logits_soft_cap: float) -> State:
    """One query of one head over the keys it sees."""
    if len(k) == 0:
        return np.zeros(v.shape[1]), np.array(-np.inf)
    s = sm_scale * (k @ q)
    if logits_soft_cap > 0:
        s = logits_soft_cap * np.tanh(s / logits_soft_cap)
    top = s.max()
    if np.isneginf(top):
        return np.zeros(v.shape[1]), np.array(-np.inf)
    weight = np.exp(s - top)  # NaN where a score is NaN, or at each score of +inf
    return weight @ v / weight.sum(), top + np.log(weight.sum())


def merge(states: list[State]) -> State:
    """States of the same rows over disjoint keys, any number of them."""
    if not states:
        raise ValueError("no states: their shape is unknown")
    o = np.stack([np.asarray(o).astype(np.float64) for o, _ in states])
    lse = np.stack([np.asarray(lse).astype(np.float64) for _, lse in states])
    out, out_lse = np.zeros(o.shape[1:]), np.full(lse.shape[1:], -np.inf)
    for at in np.ndindex(lse.shape[1:]):
        filled = [t for t in range(len(states)) if lse[(t, *at)] > -np.inf]
        if not filled:
            continue
        total = np.logaddexp.reduce([lse[(t, *at)] for t in filled])
        out[at] = sum(np.exp(lse[(t, *at)] - total) * o[(t, *at)] for t in filled)
        out_lse[at] = total
    return out, out_lse
