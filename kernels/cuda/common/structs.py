"""The structs that kernels take by value, as the CUDA sources declare them.

A struct has one declaration, the source's: its fields, their types and their order are read there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.compile import SOURCES

_FIELD: Final = re.compile(r"^(?:const )?(\w+)(\*?) (\w+);", re.MULTILINE)
_TYPES: Final = {"int": np.int32, "uint32": np.uint32, "uint64": np.uint64, "float": np.float32}


def declared(source: str, name: str) -> np.dtype[Any]:
    """The struct `name` of a CUDA source, as the compiler lays it out; an address is a uint64.

    Raises RuntimeError where the source has no such struct, or a line of it is no plain field.
    """
    text = re.sub(r" *//.*", "", (SOURCES / source).read_text(encoding="utf-8"))
    body = re.search(rf"^struct {name} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for line in body[1].splitlines() if line.strip()] if body else []
    fields = [found.groups() for line in lines if (found := _FIELD.fullmatch(line))]
    kinds = [(field, np.uint64 if star else _TYPES.get(kind)) for kind, star, field in fields]
    if not kinds or len(kinds) < len(lines) or any(kind is None for _, kind in kinds):
        raise RuntimeError(f"{source} declares no struct {name} of plain fields: this is a bug")
    return np.dtype(kinds, align=True)


WORK_ITEM: Final = declared("common/work.cuh", "WorkItem")
ATTEND_PARAMS: Final = declared("common/params.cuh", "AttendParams")
WIDE_PARAMS: Final = declared("wide/params.cuh", "WideParams")
STORED_KV: Final = declared("wide/params.cuh", "StoredKv")
VISIBLE_PARAMS: Final = declared("visible/visible.cu", "VisibleParams")
VISIBLE_TABLE: Final = declared("visible/visible.cuh", "VisibleTable")
EXPAND_PARAMS: Final = declared("masks/expand.cu", "ExpandParams")
MERGE_PARAMS: Final = declared("merge/merge.cu", "MergeParams")
POOL_ROWS: Final = declared("rows/rows.cu", "PoolRows")
TENSOR_ROWS: Final = declared("rows/rows.cu", "TensorRows")
PAGE_MOVES: Final = declared("pages/pages.cu", "PageMoves")

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
