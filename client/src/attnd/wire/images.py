"""Images, the form of every tensor body: a safetensors header with JSON fields, then the arrays.

    8 bytes      length of the header, little-endian
    header       {"__metadata__": {"request": "<fields as JSON>"}, "q": {"dtype", "shape",
                 "data_offsets"}, ...}, padded with spaces
    arrays       back to back, without holes

An answer has its fields under `response`, an error under `problem`.
"""

from __future__ import annotations

import json
import marshal
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
    "U32": np.dtype("<u4"),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""What may travel, by safetensors' name; all little-endian."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT: Final = 8
"""Arrays begin at a multiple of this in an image, so that the widest dtype can be read in place."""
REMEMBERED: Final = 256
"""Headers at most: the operations of a model's layers."""
REQUEST_BYTES: Final = 16 * 1024
"""Requests' headers up to this length are remembered: some hundred sequences."""
ANSWER_BYTES: Final = 4096
"""Answers' headers up to this length are remembered; longer ones rarely come twice."""

Described = tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]
"""Name, dtype and shape of arrays in their order."""

Written = tuple[str, str, bytes]
"""A request's header: cut where more fields would be added, and whole."""

HEADERS: Final[dict[tuple[bytes, Described, int], Written]] = {}

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
    """The arrays in the order to send them: wider dtypes first, so that all are aligned."""
    ordered = list(arrays.items())
    if len(ordered) > 1:
        ordered.sort(key=itemsize, reverse=True)
    return ordered


def itemsize(named: tuple[str, Array]) -> int:
    return named[1].itemsize


def header(
    fields: dict[str, Any],
    arrays: Sequence[tuple[str, Array]],
    alignment: int = ALIGNMENT,
) -> bytes:
    """The image of a request up to its arrays, which follow in the order given.

    Padded with spaces so that they begin at a multiple of `alignment`. `offsets`, beside other
    fields, is a list of ints. Raises TypeError for a dtype that cannot travel.
    """
    return with_offsets(cut(fields, arrays, alignment), fields.get("offsets"), alignment)


def cut(fields: dict[str, Any], arrays: Sequence[tuple[str, Array]], alignment: int) -> Written:
    """A request's header without its `offsets`."""
    if "offsets" in fields:
        fields = {name: value for name, value in fields.items() if name != "offsets"}
    described = tuple([(name, array.dtype, array.shape) for name, array in arrays])
    return written(fields, described, alignment)


def with_offsets(header: Written, offsets: list[int] | None, alignment: int) -> bytes:
    """A header that was `cut`, with these `offsets`."""
    begin, end, whole = header
    if offsets is None:
        return whole
    return padded(f'{begin},\\"offsets\\":{offsets}{end}', alignment)


def written(fields: dict[str, Any], arrays: Described, alignment: int) -> Written:
    """A request's header.

    Steps repeat their calls in all but `offsets`, so headers are remembered: by the fields as
    `marshal` has them, which tells 1 from True and takes a quarter of the time of JSON.
    """
    try:
        key = marshal.dumps(fields, 2), arrays, alignment
    except ValueError:  # a kind of value that JSON may know: a subclass of str
        return write(fields, arrays, alignment)
    header = HEADERS.get(key)
    if header is None:
        header = write(fields, arrays, alignment)
        if len(header[0]) <= REQUEST_BYTES:
            if len(HEADERS) >= REMEMBERED:
                HEADERS.clear()
            HEADERS[key] = header
    return header


def write(fields: dict[str, Any], arrays: Described, alignment: int) -> Written:
    """A request's header, cut before the brace that ends the fields, and whole."""
    request = dump_json(dump_json(fields))
    begin = f'{{"__metadata__":{{"request":{request[:-2]}'
    end = f'}}"}}{describe(arrays)}}}'
    return begin, end, padded(begin + end, alignment)


def padded(text: str, alignment: int) -> bytes:
    """A header's length and text, up to where arrays may begin."""
    size = -(-(8 + len(text)) // alignment) * alignment - 8
    return size.to_bytes(8, "little") + text.ljust(size).encode("ascii")


@lru_cache(maxsize=REMEMBERED)
def describe(arrays: Described) -> str:
    """The header's entries for arrays that lie back to back, each with a comma before it."""
    table, begin = "", 0
    for name, dtype, shape in arrays:
        if dtype not in NAMES:
            raise TypeError(f"{name} has dtype {dtype}: it must be one of {', '.join(DTYPES)}")
        end = begin + prod(shape) * dtype.itemsize
        entry = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
        table += f",{dump_json(name)}:{dump_json(entry)}"
        begin = end
    return table


def flat(array: Array) -> memoryview:
    """The bytes of an array, without a copy when it is dense."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def encode(fields: dict[str, Any], arrays: Mapping[str, Array]) -> list[bytes | memoryview]:
    """A request's image in parts, to be sent one after the other: the arrays are not copied."""
    ordered = in_order(arrays)
    return [header(fields, ordered), *[flat(array) for _, array in ordered]]


def layout_of(image: Bytes) -> tuple[int, Layout]:
    """Where an image's arrays begin, and how they lie; raises ValueError."""
    if len(image) < 8:
        raise ValueError(f"an image has at least 8 bytes, this one {len(image)}")
    raw = image.data
    size = int.from_bytes(raw[:8], "little")
    start = 8 + size
    if start > len(raw):
        raise ValueError(f"the header says {size} bytes, the image has {len(raw)} in all")
    text = bytes(raw[8:start])
    layout = remembered(text) if size <= ANSWER_BYTES else read_header(text)
    if start + layout.data_bytes != len(image):
        raise ValueError(
            f"arrays of {layout.data_bytes} bytes in an image with room for {len(image) - start}"
        )
    return start, layout


def decode(image: Bytes, key: str = "response") -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields under `key`, and the arrays, which lie in `image` where they are aligned.

    Raises ValueError when the image is not that.
    """
    start, layout = layout_of(image)
    if key not in layout.metadata:
        raise ValueError(f"the safetensors metadata has no JSON object under `{key}`")
    arrays: dict[str, Array] = {}
    for entry in layout.entries:
        dtype, begin = entry.dtype, start + entry.begin
        if begin % dtype.itemsize == 0:
            arrays[entry.name] = np.ndarray(entry.shape, dtype, image, begin)
        else:
            end = begin + prod(entry.shape) * dtype.itemsize
            arrays[entry.name] = image[begin:end].copy().view(dtype).reshape(entry.shape)
    return layout.metadata[key], arrays


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


remembered: Final = lru_cache(maxsize=REMEMBERED)(read_header)
