"""Checks of the places given for results, for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.backend import Attend, AttentionState, Float32, Int32, RaggedAttend, Tensor
from kernels.tensor import DeviceTensor

_FLOAT32 = np.dtype(np.float32)
Shape = tuple[int, ...]


def check_place(field: str, place: Tensor, shape: Shape, dtype: np.dtype[Any]) -> None:
    """Raise `ValueError` unless an answer of `shape` and `dtype` can be written there."""
    if place.shape != shape or place.dtype != dtype:
        raise ValueError(f"{field} is {place.dtype} {place.shape}: must be {dtype} {shape}")
    if not isinstance(place, DeviceTensor) and not place.flags.writeable:
        raise ValueError(f"{field} is a read-only array: it must be one that can be written to")


def check_state(field: str, place: AttentionState, shape: Shape, dtype: np.dtype[Any]) -> None:
    """Raise `ValueError` unless states `o` of `shape` and `dtype` can be written there."""
    check_place(f"{field}.o", place.o, shape, dtype)
    check_place(f"{field}.lse", place.lse, shape[:-1], _FLOAT32)


def check_outs(requests: Sequence[Attend | RaggedAttend], v_head_dim: int) -> None:
    """The places of attention's answers: of q's rows, heads and dtype. Sinks: one for each head."""
    for request in requests:
        check_sinks(request.sinks, request.q)
        if request.out is not None:
            shape = (*request.q.shape[:2], v_head_dim)
            check_state("out", request.out, shape, request.q.dtype)


def check_sinks(sinks: Float32 | None, o: Tensor) -> None:
    """Raise `ValueError` unless there is a float32 sink for each head of `o [n, heads, dim]`."""
    if sinks is not None and (sinks.shape != o.shape[1:2] or sinks.dtype != _FLOAT32):
        raise ValueError(f"sinks is {sinks.dtype} {sinks.shape}: must be float32 {o.shape[1:2]}")


def merge_place(
    o: Tensor, indptr: Int32, into: AttentionState | None, out: AttentionState | None
) -> AttentionState | None:
    """Where a merge's answer goes: `into` or `out`, or fresh memory for None."""
    if into is not None and out is not None:
        raise ValueError("into and out are both given: a merge into states is written there")
    shape = (len(indptr) - 1, *o.shape[1:])
    for field, place in (("into", into), ("out", out)):
        if place is not None:
            check_state(field, place, shape, o.dtype)
    return into or out


def check_gathered(
    out: tuple[Tensor, Tensor] | None, shapes: tuple[Shape, Shape], dtype: np.dtype[Any]
) -> tuple[Tensor | None, Tensor | None]:
    """The places of gathered K and V; None for fresh memory."""
    if out is None:
        return None, None
    for field, place, shape in zip(("out.k", "out.v"), out, shapes, strict=True):
        check_place(field, place, shape, dtype)
    return out
