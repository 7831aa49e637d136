"""Images, the form of every tensor body: a safetensors header with JSON fields, then the arrays.

    8 bytes      length of the header, little-endian
    header       {"__metadata__": {"request": "<fields as JSON>"}, "q": {"dtype", "shape",
                 "data_offsets"}, ...}, padded with spaces
    arrays       back to back, without holes

An answer has its fields under `response`, an error under `problem`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import index
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

MEDIA_TYPE: Final = "application/vnd.safetensors"

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""What may travel, by safetensors' name; all little-endian."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT: Final = 8
"""Arrays begin at a multiple of this in an image, so that the widest dtype can be read in place."""
REMEMBERED_BYTES: Final = 4096
"""Answers' headers up to this length are remembered; longer ones rarely come twice."""

dump_json: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of an image: its bytes begin at `begin` after the header."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A header that was read: the metadata, the arrays, and how many bytes they are together."""

    metadata: dict[str, Any]
    entries: tuple[Entry, ...]
    data_bytes: int


def in_order(arrays: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """The arrays in the order to send them: wider dtypes first, so that all are aligned.

    Raises TypeError for a dtype that cannot travel.
    """
    for name, array in arrays.items():
        if array.dtype not in NAMES:
            raise TypeError(
                f"{name} has dtype {array.dtype}: it must be one of {', '.join(DTYPES)}"
            )
    ordered = list(arrays.items())
    if len(ordered) > 1:
        ordered.sort(key=itemsize, reverse=True)
    return ordered


def itemsize(named: tuple[str, Array]) -> int:
    return named[1].itemsize


def header(
    fields: Mapping[str, Any],
    arrays: Sequence[tuple[str, Array]],
    alignment: int = ALIGNMENT,
) -> bytes:
    """The image of a request up to its arrays, which follow in the order given.

    Padded with spaces so that they begin at a multiple of `alignment`.
    """
    table = describe(tuple([(name, array.dtype, array.shape) for name, array in arrays]))
    text = f'{{"__metadata__":{{"request":{dump_json(dump_json(fields))}}}{table}}}'
    size = -(-(8 + len(text)) // alignment) * alignment - 8
    return size.to_bytes(8, "little") + text.ljust(size).encode("ascii")


@lru_cache(maxsize=256)
def describe(arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> str:
    """The header's entries for arrays that lie back to back, each with a comma before it."""
    table, begin = "", 0
    for name, dtype, shape in arrays:
        end = begin + prod(shape) * dtype.itemsize
        entry = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
        table += f",{dump_json(name)}:{dump_json(entry)}"
        begin = end
    return table


def flat(array: Array) -> memoryview:
    """The bytes of an array, without a copy when it is dense."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def encode(fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[bytes | memoryview]:
    """A request's image in parts, to be sent one after the other: the arrays are not copied."""
    ordered = in_order(arrays)
    return [header(fields, ordered), *[flat(array) for _, array in ordered]]


def decode(image: Bytes, key: str = "response") -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields under `key`, and the arrays, which lie in `image` where they are aligned.

    Raises ValueError when the image is not that.
    """
    if len(image) < 8:
        raise ValueError(f"an image has at least 8 bytes, this one {len(image)}")
    raw = image.data
    size = int.from_bytes(raw[:8], "little")
    start = 8 + size
    if start > len(raw):
        raise ValueError(f"the header says {size} bytes, the image has {len(raw)} in all")
    text = bytes(raw[8:start])
    layout = remembered(text) if size <= REMEMBERED_BYTES else read_header(text)
    if start + layout.data_bytes != len(image):
        raise ValueError(
            f"arrays of {layout.data_bytes} bytes in an image with room for {len(image) - start}"
        )
    if key not in layout.metadata:
        raise ValueError(f"the safetensors metadata has no JSON object under `{key}`")
    arrays = {entry.name: array_of(image, start, entry) for entry in layout.entries}
    return layout.metadata[key], arrays


def array_of(image: Bytes, start: int, entry: Entry) -> Array:
    """One array of an image whose arrays begin at `start`."""
    dtype, begin = entry.dtype, start + entry.begin
    if begin % dtype.itemsize == 0:
        return np.ndarray(entry.shape, dtype, image, begin)
    end = begin + prod(entry.shape) * dtype.itemsize
    return image[begin:end].copy().view(dtype).reshape(entry.shape)


def read_header(text: bytes) -> Layout:
    """Read a header; raises ValueError for anything but dense arrays of known dtypes."""
    try:
        table = json.loads(text)
        metadata = {
            key: fields
            for key, value in table.pop("__metadata__", {}).items()
            if isinstance(fields := json.loads(value), dict)
        }
        entries, end = [], 0
        for name, told in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            entry = Entry(name, DTYPES[told["dtype"]], tuple(map(index, told["shape"])), end)
            size = prod(entry.shape) * entry.dtype.itemsize
            if told["data_offsets"] != [end, end + size] or min(entry.shape, default=0) < 0:
                raise ValueError(f"{name}: {told} are not {size} bytes from byte {end}")
            entries.append(entry)
            end += size
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a safetensors header: {error!r}") from error
    return Layout(metadata, tuple(entries), end)


remembered: Final = lru_cache(maxsize=256)(read_header)
