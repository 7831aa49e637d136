"""Attention states and their merge operator in numpy, for states from several services.

A state `(o, lse)` describes attention over some set of keys. States over disjoint sets merge into
the state over their union (the operator of cascade inference and of ring attention):

    lse = log(sum_i exp(lse_i))        o = sum_i exp(lse_i - lse) * o_i

It is associative and commutative, and the state over no keys at all, `(0, -inf)`, is its neutral
element, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Float32 = NDArray[np.float32]
LseBase = Literal["e", "2"]

LN_2: Final = 0.6931471805599453
"""One base-2 unit of lse in natural units."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionState:
    """`o [..., num_qo_heads, head_dim]`, `lse [..., num_qo_heads]` float32 in base `lse_base`."""

    o: Array
    lse: Float32
    lse_base: LseBase = "e"

    def __post_init__(self) -> None:
        if self.o.shape[:-1] != self.lse.shape:
            raise ValueError(
                f"o {self.o.shape} with lse {self.lse.shape}: lse has the shape of o less head_dim"
            )

    def to_base(self, lse_base: LseBase) -> AttentionState:
        """The same state with its lse in base `lse_base`."""
        if lse_base == self.lse_base:
            return self
        factor = LN_2 if lse_base == "e" else 1.0 / LN_2
        lse = (self.lse.astype(np.float64) * factor).astype(np.float32)
        return AttentionState(self.o, lse, lse_base)


def empty_state(
    shape: Sequence[int], dtype: DTypeLike = np.float32, lse_base: LseBase = "e"
) -> AttentionState:
    """The state over no keys: `o [*shape]` all zero and lse all -inf."""
    lse = np.full(tuple(shape)[:-1], -np.inf, dtype=np.float32)
    return AttentionState(np.zeros(tuple(shape), dtype=dtype), lse, lse_base)


def merge_state(a: AttentionState, b: AttentionState) -> AttentionState:
    """`merge_states` of two."""
    return merge_states([a, b])


def merge_states(
    states: Sequence[AttentionState], *, lse_base: LseBase | None = None
) -> AttentionState:
    """Merge states over disjoint sets of keys; all of one shape and one dtype of o.

    Sums are float32. The result has the dtype of o, and lse in `lse_base` (None: the base
    all the states share, "e" if they differ). Empty rows are skipped exactly: whatever their o
    holds, `merge(empty, x)` is x bit for bit, and a row that is empty in every state is (0, -inf).

    Raises ValueError for no states at all, or for shapes or dtypes that differ.
    """
    base = check(states) if lse_base is None else (check(states), lse_base)[1]
    states = [state.to_base(base) for state in states]
    power = np.exp if base == "e" else np.exp2
    logarithm = np.log if base == "e" else np.log2
    lse = np.stack([state.lse for state in states]).astype(np.float32, copy=False)
    top = lse.max(axis=0)
    # Rows empty everywhere have no maximum to subtract; 0 keeps -inf - 0 = -inf, weight 0.
    top = np.where(np.isneginf(top), np.float32(0), top)
    # log 0 is -inf, and a difference beyond float32 is -inf too: both are intended.
    with np.errstate(divide="ignore", over="ignore"):
        weights = power(lse - top)
        total = weights.sum(axis=0)
        merged_lse = top + logarithm(total)
    merged_o = np.zeros(states[0].o.shape, dtype=np.float32)
    for state, weight in zip(states, weights[..., None], strict=True):
        # A weight of 0 must not meet an o that was never written (0 * nan = nan).
        merged_o += np.where(weight != 0, state.o, 0).astype(np.float32) * weight
    np.divide(merged_o, total[..., None], out=merged_o, where=total[..., None] != 0)
    return AttentionState(merged_o.astype(states[0].o.dtype, copy=False), merged_lse, base)


def check(states: Sequence[AttentionState]) -> LseBase:
    """The base that all the states share, else "e"; ValueError, TypeError where they cannot be
    merged."""
    if not states:
        raise ValueError("merge_states needs at least one state")
    for i, state in enumerate(states):
        if not isinstance(state, AttentionState):
            kind = type(state).__name__
            raise TypeError(f"states[{i}] is of type {kind}: it must be a state: `result.state`")
    first = states[0]
    for i, state in enumerate(states):
        if state.o.shape != first.o.shape or state.o.dtype != first.o.dtype:
            raise ValueError(
                f"state {i} has o {state.o.dtype} {state.o.shape}, "
                f"state 0 {first.o.dtype} {first.o.shape}: they must be equal"
            )
    bases = {state.lse_base for state in states}
    return bases.pop() if len(bases) == 1 else "e"
