"""Rules about tensors, prefix sums and ids that a request can be held to by itself.

Each function raises `InvalidRequest` naming the field, the value and the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

import numpy as np

from service.engine.operations import Array, Ids, Int32, ServiceInfo
from service.errors import InvalidRequest
from service.wire import DTYPE_NAMES, DTYPES, Tensors

TENSOR_DTYPES: Final = ("F32", "F16", "BF16")
"""What q, k, v may be on the way in, and o on the way out."""

ALLOWED: Final = frozenset(DTYPES[name] for name in TENSOR_DTYPES)
MAX_QO_HEADS: Final = 65535
MAX_EMPTY_ELEMENTS: Final = 2**24
"""Largest answer of a merge whose lists are empty: it takes memory that no body paid for."""


def refuse(field: str, value: object, rule: str) -> NoReturn:
    raise InvalidRequest(field, value, rule)


def check_names(
    tensors: Tensors, required: frozenset[str], optional: frozenset[str] = frozenset()
) -> None:
    """All the required tensors are there, and none that the route does not read."""
    names = tensors.keys()
    if missing := required - names:
        refuse(f"tensors.{min(missing)}", None, "must be given")
    if extra := names - required - optional:
        refuse(f"tensors.{min(extra)}", "given", "this route reads no such tensor")


def check_dtype(field: str, array: Array) -> None:
    if array.dtype not in ALLOWED:
        name = DTYPE_NAMES[array.dtype]
        refuse(f"{field}.dtype", name, f"must be one of {', '.join(TENSOR_DTYPES)}")


def check_same_dtype(field: str, array: Array, other: str, like: Array) -> None:
    if array.dtype != like.dtype:
        name = DTYPE_NAMES[array.dtype]
        refuse(f"{field}.dtype", name, f"must be that of {other}, {DTYPE_NAMES[like.dtype]}")


def check_query(q: Array, info: ServiceInfo, rows: int | None = None) -> None:
    """`q [rows, num_qo_heads, head_dim]`, whole groups of heads per KV head of the pool."""
    check_dtype("q", q)
    if q.ndim != 3 or q.shape[2] != info.head_dim or (rows is not None and q.shape[0] != rows):
        first = "n" if rows is None else rows
        refuse("q.shape", list(q.shape), f"must be [{first}, num_qo_heads, {info.head_dim}]")
    check_heads(q.shape[1], info.num_kv_heads)


def check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    if num_qo_heads < 1 or num_qo_heads > MAX_QO_HEADS or num_qo_heads % num_kv_heads:
        rule = f"num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}"
        refuse("q.shape", num_qo_heads, rule)


def check_pair(k: Array, v: Array, shape: Sequence[int]) -> None:
    """k and v of one dtype and of exactly `shape`."""
    for name, array in (("k", k), ("v", v)):
        check_dtype(name, array)
        if array.shape != tuple(shape):
            refuse(f"{name}.shape", list(array.shape), f"must be {list(shape)}")
    check_same_dtype("v", v, "k", k)


def check_layer(layer: int, info: ServiceInfo) -> None:
    if layer >= info.num_layers:
        refuse("layer", layer, f"must be below num_layers = {info.num_layers}")


def check_ids(field: str, ids: Sequence[str]) -> Ids:
    """The ids as the tuple that operations carry, each of them once."""
    if len(set(ids)) != len(ids):
        seen: set[str] = set()
        for name in ids:
            if name in seen:
                refuse(field, name, "an id may be given once")
            seen.add(name)
    return tuple(ids)


def prefix_sums(
    field: str, values: Sequence[int], batch: int | None, rows: int, *, partial: bool = False
) -> Int32:
    """int32 [batch + 1] that starts at 0, never decreases, and ends at `rows`.

    `partial`: it may leave out rows at either end.
    """
    if batch is not None and len(values) != batch + 1:
        refuse(field, f"{len(values)} numbers", f"must be {batch + 1}, one more than sequences")
    sums = np.array(values, np.int32)
    if sums[0] != 0 and not partial:
        refuse(field, values[0], "must start at 0")
    if np.any(sums[1:] < sums[:-1]):
        at = int(np.argmax(sums[1:] < sums[:-1])) + 1
        refuse(field, f"{values[at]} at {at}", "must not decrease")
    if sums[-1] > rows:
        refuse(field, values[-1], f"must not pass {rows}, the rows it counts")
    if sums[-1] != rows and not partial:
        refuse(field, values[-1], f"must end at {rows}, the rows it counts")
    return sums


def read_offsets(values: Sequence[int] | None, batch: int) -> Int32 | None:
    """int32 [batch], or None when not given."""
    if values is None:
        return None
    if len(values) != batch:
        refuse("offsets", f"{len(values)} numbers", f"must be {batch}, one per sequence")
    return np.array(values, np.int32)


def read_mask(tensors: Tensors) -> tuple[Array | None, bool]:
    """The mask and whether it is packed; at most one of `mask` and `packed_mask` is given."""
    mask, packed = tensors.get("mask"), tensors.get("packed_mask")
    if mask is not None and packed is not None:
        refuse("tensors.packed_mask", "given", "give mask or packed_mask, not both")
    if mask is not None:
        check_flat("mask", mask, "BOOL")
        return mask, False
    if packed is not None:
        check_flat("packed_mask", packed, "U8")
    return packed, packed is not None


def check_flat(field: str, array: Array, dtype: str) -> None:
    if array.dtype != DTYPES[dtype]:
        refuse(f"{field}.dtype", DTYPE_NAMES[array.dtype], f"must be {dtype}")
    if array.ndim != 1:
        refuse(f"{field}.shape", list(array.shape), "must be flat: one dimension")


def check_mask_length(mask: Array, packed: bool, qo_indptr: Int32, kv_indptr: Int32) -> None:
    """A ragged mask covers each request's qo_len x kv_len; packed segments end on a byte."""
    sizes = np.diff(qo_indptr).astype(np.int64) * np.diff(kv_indptr)
    needed = int(((sizes + 7) // 8).sum() if packed else sizes.sum())
    if mask.shape[0] != needed:
        field, unit = ("packed_mask", "bytes") if packed else ("mask", "elements")
        refuse(f"{field}.shape", list(mask.shape), f"the prefix sums claim {needed} {unit}")
