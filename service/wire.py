"""The binary wire: a strict reader and a copy-free writer of safetensors bodies, and strict JSON.

A body is a little-endian u64 length, a JSON header of that length, and the tensors' bytes back to
back. The fields of a request are a JSON object in the header's `__metadata__["request"]`, those of
an answer in `__metadata__["response"]`. Whatever is not exactly that is `MalformedBody`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from service.errors import MalformedBody

Array = NDArray[Any]
Tensors = dict[str, Array]
Body = bytes | memoryview
Part = bytes | memoryview

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype(np.bool_),
}
"""Every dtype that the format names; which of them a tensor may have is its route's rule."""

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES: Final = 4 * 2**20
"""Room for the ids and prefix sums of thousands of sequences; bounds the memory JSON can take."""
MAX_RANK: Final = 8
MAX_ELEMENTS: Final = 2**40
"""Bounds the product of the non-zero dimensions, so that no shape can overflow anything."""
MAX_TENSORS: Final = 64
REMEMBERED_BYTES: Final = 1024
"""Longest fields whose header is remembered when writing."""
LARGEST: Final = 2**63 - 1
INTEGERS: Final = frozenset({int})
ENTRY_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})
REQUEST_KEY: Final = "request"
RESPONSE_KEY: Final = "response"


@dataclass(frozen=True, slots=True)
class Layout:
    """What a header says, checked against the `room` bytes after it: it may be kept and reused."""

    fields: dict[str, Any]
    entries: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int], ...]
    """Name, dtype, shape, and first byte in the data."""


def split(body: Body) -> tuple[bytes, int]:
    """The header's text, and the offset of the first tensor byte."""
    if len(body) < 8:
        raise MalformedBody(f"{len(body)} bytes: a safetensors body has at least 8")
    length = int.from_bytes(body[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise MalformedBody(f"header length {length}: at most {MAX_HEADER_BYTES} bytes")
    start = 8 + length
    if start > len(body):
        raise MalformedBody(f"header length {length}: only {len(body) - 8} bytes follow")
    if length == 0 or body[8] != 0x7B:
        raise MalformedBody("the safetensors header does not begin with '{'")
    return bytes(body[8:start]), start


def read_layout(text: bytes, room: int) -> Layout:
    """A header of a body with `room` bytes of data."""
    header = load_json(text, "the safetensors header")
    if not isinstance(header, dict):
        raise MalformedBody("the safetensors header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if len(header) > MAX_TENSORS:
        raise MalformedBody(f"{len(header)} tensors: at most {MAX_TENSORS}")
    entries = []
    spans = []
    for name, entry in header.items():
        dtype, shape, begin, end = read_entry(name, entry, room)
        spans.append((begin, end, name))
        entries.append((name, dtype, shape, begin))
    check_cover(spans, room)
    return Layout(read_fields(metadata), tuple(entries))


def place(body: Body, start: int, layout: Layout) -> Tensors:
    """The tensors of a body whose data begins at `start`, as read-only views where aligned."""
    return {
        name: view(body, dtype, shape, start + begin, name)
        for name, dtype, shape, begin in layout.entries
    }


def read_fields(metadata: object) -> dict[str, Any]:
    """The JSON object under `request`; no metadata means no fields."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MalformedBody("__metadata__ is not an object of strings")
    if REQUEST_KEY not in metadata:
        return {}
    try:
        text = metadata[REQUEST_KEY].encode()
    except UnicodeEncodeError as error:
        raise MalformedBody("__metadata__.request is not valid Unicode") from error
    fields = load_json(text, "__metadata__.request")
    if not isinstance(fields, dict):
        raise MalformedBody("__metadata__.request is not a JSON object")
    return fields


def read_entry(
    name: str, entry: object, room: int
) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """dtype, shape and byte range of one tensor, with its size checked against its range."""
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
    return dtype, tuple(shape), begin, end


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


def view(body: Body, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, name: str) -> Array:
    """The tensor at `offset`: a view, or a copy where the bytes lie unaligned for their dtype."""
    if 0 in shape:
        return np.empty(shape, dtype)
    array: Array = np.ndarray(shape, dtype, body, offset)
    if not array.flags.aligned:
        array = array.copy()
    if dtype == np.bool_ and array.view(np.uint8).max() > 1:
        raise MalformedBody(f"tensor {name!r}: a BOOL byte is neither 0 nor 1")
    return array


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


def write_safetensors(fields: str, tensors: Tensors) -> list[Part]:
    """Header and tensors as buffers to send in order; the tensors' bytes are not copied.

    `fields` is the JSON text for `__metadata__["response"]`. Wider dtypes go first, so that every
    tensor lies aligned for whoever maps the body.
    """
    shapes = []
    parts: list[Part] = []
    for name, array in sorted(tensors.items(), key=width, reverse=True):
        shapes.append((name, array.dtype, array.shape))
        if array.nbytes:
            flat = np.ascontiguousarray(array).reshape(-1)
            parts.append(flat.view(np.uint8).data)
    write = write_header if len(fields) <= REMEMBERED_BYTES else write_header.__wrapped__
    return [write(fields, tuple(shapes)), *parts]


@lru_cache(maxsize=256)
def write_header(
    fields: str, tensors: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]
) -> bytes:
    """Length and header of a body of `tensors` (name, dtype, shape); steps repeat their shapes."""
    entries = [f'{{"__metadata__":{{"{RESPONSE_KEY}":{quoted(fields)}}}']
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        sizes = ",".join(map(str, shape))
        entries.append(
            f'"{name}":{{"dtype":"{DTYPE_NAMES[dtype]}","shape":[{sizes}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    text = ",".join(entries).encode() + b"}"
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def width(item: tuple[str, Array]) -> int:
    return item[1].itemsize


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise MalformedBody(f"duplicate key {key!r:.80}")
            seen.add(key)
    return values


def refuse_constant(name: str) -> NoReturn:
    raise MalformedBody(f"{name} is not JSON")


ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def dump_json(document: Any) -> str:
    """Compact ASCII JSON; escapes keep whatever a client sent printable."""
    return ENCODER.encode(document)


def quoted(text: str) -> str:
    """Text as a JSON string."""
    return ENCODER.encode(text)


DECODER: Final = json.JSONDecoder(object_pairs_hook=unique, parse_constant=refuse_constant)


def load_json(text: bytes, what: str) -> Any:
    """JSON as RFC 8259 has it: UTF-8, no duplicate keys, no NaN; `MalformedBody` otherwise."""
    try:
        return DECODER.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MalformedBody(f"{what} is not UTF-8") from error
    except RecursionError as error:
        raise MalformedBody(f"{what} is nested too deep") from error
    except ValueError as error:
        raise MalformedBody(f"{what} is not JSON: {error}") from error
