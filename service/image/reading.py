"""Reading images strictly: a header is checked to the last byte, tensors are views in place.

An image is a little-endian u64 length, a JSON header of that length, and the tensors' bytes back to
back. The fields are a JSON object, as text, in the header's `__metadata__`: under `request`,
`response` or `problem`. Whatever is not exactly that is `MalformedBody`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from attnd.wire.bounds import MAX_HEADER_BYTES, MAX_TOUCHED_BYTES, MAX_VALUES
from attnd.wire.dtypes import BOOL, DTYPES, Array
from attnd.wire.images import Entry

from service.errors import MalformedBody
from service.image.json_text import load_json

LENGTH_BYTES: Final = 8
"""Before the header: its length."""
MAX_RANK: Final = 8
MAX_ELEMENTS: Final = 2**40
"""Bounds the product of the non-zero dimensions, so that no shape can overflow anything."""
MAX_TENSORS: Final = 64
LARGEST: Final = 2**63 - 1
INTEGERS: Final = frozenset({int})
ENTRY_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})
REQUEST: Final = "request"
SPLIT: Final = "send fewer sequences or lists in a call, and token ids and page keys as tensors"
"""Remedy for a header beyond its bounds."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The contents of a header, checked against the bytes after it: they can be kept and reused."""

    fields: dict[str, Any]
    entries: tuple[Entry, ...]


def split(body: bytes | memoryview, most: int = MAX_HEADER_BYTES) -> tuple[bytes, int]:
    """The header's text, copied once, and the offset of the first tensor byte.

    `body` may be memory that its owner still writes: later checks read the copy.
    """
    if len(body) < 8:
        raise MalformedBody(f"{len(body)} bytes: a safetensors body has at least 8")
    length = int.from_bytes(body[:8], "little")
    if length > most:
        raise MalformedBody(f"header length {length}: at most {most} bytes: {SPLIT}")
    start = 8 + length
    if start > len(body):
        raise MalformedBody(f"header length {length}: only {len(body) - 8} bytes follow")
    header = bytes(body[8:start])
    if not header.startswith(b"{"):
        raise MalformedBody("the safetensors header does not begin with '{'")
    return header, start


def read_layout(header: bytes, room: int, key: str = REQUEST) -> Layout:
    """The layout of an image with `room` bytes of data; the fields are those under `key`."""
    document = read_document(header)
    metadata = document.pop("__metadata__", {})
    if len(document) > MAX_TENSORS:
        raise MalformedBody(f"{len(document)} tensors: at most {MAX_TENSORS}")
    entries = []
    spans = []
    for name, value in document.items():
        entry, end = read_entry(name, value, room)
        spans.append((entry.begin, end, name))
        entries.append(entry)
    check_cover(spans, room)
    return Layout(read_fields(metadata, key), tuple(entries))


def read_document(header: bytes) -> dict[str, Any]:
    """The header's JSON object, of which nothing is checked."""
    if (count := header.count(b",")) > MAX_VALUES:
        what = f"the safetensors header has {count} values"
        raise MalformedBody(f"{what}: at most {MAX_VALUES}: {SPLIT}")
    document = load_json(header, "the safetensors header")
    if not isinstance(document, dict):
        raise MalformedBody("the safetensors header is not a JSON object")
    return document


def place(body: bytes | memoryview, start: int, layout: Layout) -> dict[str, Array]:
    """The tensors of an image whose data begins at `start`: views, copies only where unaligned.

    The bytes of BOOL tensors are checked here, each time: they are data, not header.
    """
    tensors, touched = {}, 0
    for entry in layout.entries:
        if 0 in entry.shape:
            tensors[entry.name] = np.empty(entry.shape, entry.dtype)
            continue
        array: Array = np.ndarray(entry.shape, entry.dtype, body, start + entry.begin)
        is_aligned = array.flags.aligned
        if entry.dtype == BOOL or not is_aligned:
            touched += array.nbytes
            refuse_touched(entry.name, touched)
            array = array if is_aligned else array.copy()
            if entry.dtype == BOOL and array.view(np.uint8).max() > 1:
                raise MalformedBody(f"tensor {entry.name!r}: a BOOL byte is neither 0 nor 1")
        tensors[entry.name] = array
    return tensors


def refuse_touched(name: str, num_bytes: int) -> None:
    if num_bytes > MAX_TOUCHED_BYTES:
        what = f"tensor {name!r}: {num_bytes} bytes are BOOL, or not aligned to their dtype"
        remedy = "send packed_mask, and wide dtypes first, behind a header of 8 n bytes"
        raise MalformedBody(f"{what}: at most {MAX_TOUCHED_BYTES}: {remedy}")


def read_fields(metadata: object, key: str) -> dict[str, Any]:
    """The JSON object under `key`; no metadata means no fields."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MalformedBody("__metadata__ is not an object of strings")
    if key not in metadata:
        return {}
    what = f"__metadata__.{key}"
    try:
        text = metadata[key].encode()
    except UnicodeEncodeError as error:
        raise MalformedBody(f"{what} is not valid Unicode") from error
    fields = load_json(text, what)
    if not isinstance(fields, dict):
        raise MalformedBody(f"{what} is not a JSON object")
    return fields


def read_entry(name: str, entry: object, room: int) -> tuple[Entry, int]:
    """One tensor and the end of its bytes, with its size checked against its range."""
    if not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
        raise MalformedBody(f"tensor {name!r}: not an object of dtype, shape and data_offsets")
    dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise MalformedBody(f"tensor {name!r}: unknown dtype {dtype_name!r:.40}")
    if not are_counts(shape) or len(shape) > MAX_RANK:
        raise MalformedBody(f"tensor {name!r}: shape is not a list of at most {MAX_RANK} counts")
    if is_huge(shape):
        raise MalformedBody(f"tensor {name!r}: the shape is too large")
    if not are_counts(offsets) or len(offsets) != 2:
        raise MalformedBody(f"tensor {name!r}: data_offsets is not a list of two counts")
    begin, end = offsets
    if not begin <= end <= room:
        raise MalformedBody(
            f"tensor {name!r}: data_offsets {begin:.6g}, {end:.6g} outside the {room} data bytes"
        )
    if (size := math.prod(shape) * dtype.itemsize) != end - begin:
        raise MalformedBody(
            f"tensor {name!r}: {shape} of {dtype_name} is {size} bytes, "
            f"its data_offsets span {end - begin}"
        )
    return Entry(name, dtype, tuple(shape), begin), end


def are_counts(values: object) -> bool:
    """A JSON list of non-negative integers that an int64 can hold (`true` is no integer)."""
    if not isinstance(values, list) or not INTEGERS.issuperset(map(type, values)):
        return False
    return not values or (min(values) >= 0 and max(values) <= LARGEST)


def is_huge(shape: list[int]) -> bool:
    """Whether the dimensions' product, zeros left out, is more than anything can hold."""
    elements = 1
    for size in shape:
        elements *= size or 1
    return elements > MAX_ELEMENTS


def check_cover(spans: list[tuple[int, int, str]], room: int) -> None:
    """The tensors tile the data: no overlap, no hole, no byte left over."""
    cursor = 0
    for begin, end, name in sorted(spans):
        if begin != cursor:
            what = "overlaps the tensor before it" if begin < cursor else "leaves a hole before it"
            raise MalformedBody(f"tensor {name!r}: begins at {begin}, {what} (ends at {cursor})")
        cursor = end
    if cursor != room:
        raise MalformedBody(f"{room - cursor} trailing bytes after the last tensor")
