"""The structs that kernels take by value, field by field as the sources declare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_ROWS: Final = ("items", "worker_begin", "kv_indices", "order", "positions")
_MASK: Final = ("mask_bits", "mask_row_offsets")
_PARTIALS: Final = ("partial_o", "partial_lse")
_POINTERS: Final = ("q", "o", "lse", "k", "v", *_ROWS, *_MASK, *_PARTIALS)

ATTEND_PARAMS: Final = np.dtype(
    [
        *((name, np.uint64) for name in _POINTERS),
        *((f"{name}_rows", np.uint32) for name in ("layer", "page", "token", "head")),
        *((name, np.int32) for name in ("page_size", "num_workers")),
        *((name, np.int32) for name in ("num_kv_heads", "group_size")),
        *((name, np.float32) for name in ("scale", "scale2", "soft_cap", "v_scale")),
        *((name, np.int32) for name in ("window_left", "team")),
    ],
    align=True,
)
"""`AttendParams` of params.cuh, field by field."""

MERGE_PARAMS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("o_in", "lse_in", "o", "lse")),
        *((name, np.uint64) for name in ("indptr", "list", "chunks", "order")),
        *((name, np.int32) for name in ("num_rows", "num_heads", "group_size", "chunk_rows")),
        *((name, np.int32) for name in ("head_dim", "split", "into")),
    ],
    align=True,
)
"""`MergeParams` of merge.cu."""

POOL_ROWS: Final = np.dtype(
    [
        ("k", np.uint64),
        ("v", np.uint64),
        *((f"{name}_rows", np.uint32) for name in ("layer", "page", "token", "head")),
        ("page_size", np.int32),
        ("num_kv_heads", np.int32),
        ("k_scale", np.float32),
        ("v_scale", np.float32),
    ],
    align=True,
)
"""`PoolRows` of rows.cu."""

TENSOR_ROWS: Final = np.dtype(
    [*((name, np.uint64) for name in ("k", "v", "slots")), ("num_rows", np.int32)], align=True
)
"""`TensorRows` of rows.cu."""

_LETTERS: Final = {
    np.dtype(np.uint64): "Q",
    np.dtype(np.uint32): "I",
    np.dtype(np.int32): "i",
    np.dtype(np.float32): "f",
}


def packed(dtype: np.dtype[Any], **fields: float) -> bytes:
    """One struct; unnamed fields are 0. Raises TypeError for a name that it has not."""
    pack, zeros = _packing(dtype)
    values = zeros | fields
    if len(values) > len(zeros):
        raise TypeError(f"no fields of this struct: {sorted(fields.keys() - zeros.keys())}")
    return pack(*values.values())


def params(dtype: np.dtype[Any], **fields: float) -> NDArray[Any]:
    """`packed` as a one-element array, which CuPy's calls pass to kernels by value."""
    return np.frombuffer(bytearray(packed(dtype, **fields)), dtype)


@cache
def _packing(dtype: np.dtype[Any]) -> tuple[Callable[..., bytes], dict[str, float]]:
    """What packs all fields of a struct, in order, and the fields as they are unless named."""
    known: Mapping[str, Any] = dtype.fields or {}
    letters, at = "=", 0
    for kind, offset in known.values():
        letters += "x" * (offset - at) + _LETTERS[kind]
        at = offset + kind.itemsize
    return Struct(letters + "x" * (dtype.itemsize - at)).pack, dict.fromkeys(known, 0)


def writer(dtype: np.dtype[Any], *names: str, base: int = 0) -> Callable[..., None]:
    """A function (memory, *values) that writes neighbouring fields of the struct at `base` at once.

    By far the cheapest way: numpy takes longer for one field than this for nine.
    """
    known: Mapping[str, Any] = dtype.fields or {}
    at: int = known[names[0]][1]
    start = base + at
    letters = "="
    for name in names:
        kind, offset = known[name][:2]
        if offset != at:
            raise RuntimeError(f"{name} is at {offset}, its neighbour ends at {at}: this is a bug")
        at += kind.itemsize
        letters += _LETTERS[kind]
    pack = Struct(letters).pack_into

    def write(memory: Any, *values: float) -> None:
        pack(memory, start, *values)

    return write
