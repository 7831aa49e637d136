"""Images, the form of every tensor body: a safetensors header with JSON fields, then the arrays.

    8 bytes      length of the header, little-endian
    header       {"__metadata__": {"request": "<fields as JSON>"}, "q": {"dtype", "shape",
                 "data_offsets"}, ...}, padded with spaces
    arrays       back to back, without gaps, wider dtypes first, so that all are aligned

A request has its fields under `request`, an answer under `response`, an error under `problem`.
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

import numpy as np
from numpy.typing import NDArray

from attnd.wire.dtypes import DTYPE_NAMES, DTYPES, Array, DType, Part
from attnd.wire.frames import dump_json

Bytes = NDArray[np.uint8]

MEDIA_TYPE: Final = "application/vnd.safetensors"
REQUEST: Final = "request"
RESPONSE: Final = "response"
PROBLEM: Final = "problem"
ALIGNMENT: Final = 8
"""Headers end at a multiple of this, so that the widest dtype can be read in place."""
MAX_REMEMBERED: Final = 256
"""Headers remembered at a time: the operations of a model's layers."""
SHORT_CHARS: Final = 1024
"""Fields up to this length are remembered with their header."""
SHORT_HEADER: Final = 4096
"""Headers of answers up to this many bytes are remembered; longer ones rarely repeat."""

Shaped = tuple[str, DType, tuple[int, ...]]
"""Name, dtype and shape of one array."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of an image; `begin` is its first byte in the data after the header."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True, slots=True)
class Contents:
    """A header that was read: JSON objects by key, arrays, and the bytes of all arrays."""

    metadata: dict[str, Any]
    entries: tuple[Entry, ...]
    data_bytes: int


# Writing.


def header(key: str, text: str, tensors: tuple[Shaped, ...], alignment: int = ALIGNMENT) -> bytes:
    """An image up to its arrays: JSON `text` under `key`, then `tensors` in the order given.

    Padded with spaces so that the arrays begin at a multiple of `alignment`. Short ones are
    remembered, because steps repeat their shapes. Raises TypeError for a dtype without a name.
    """
    make = make_header if len(text) <= SHORT_CHARS else make_header.__wrapped__
    return make(key, text, tensors, alignment)


@lru_cache(maxsize=MAX_REMEMBERED)
def make_header(key: str, text: str, tensors: tuple[Shaped, ...], alignment: int) -> bytes:
    """`header`, without looking for a remembered one in `__wrapped__`."""
    metadata = f"{json.dumps(key)}:{json.dumps(text)}"
    return padded(f'{{"__metadata__":{{{metadata}}}{describe(tensors)}}}', alignment)


def padded(text: str, alignment: int) -> bytes:
    """A header's length and text, up to where arrays may begin."""
    size = -(-(8 + len(text)) // alignment) * alignment - 8
    return size.to_bytes(8, "little") + text.ljust(size).encode("ascii")


def lengthened(head: bytes, count: int) -> bytes:
    """A header with `count` more spaces at its end."""
    return (len(head) - 8 + count).to_bytes(8, "little") + head[8:].ljust(len(head) - 8 + count)


@lru_cache(maxsize=MAX_REMEMBERED)
def describe(tensors: tuple[Shaped, ...]) -> str:
    """The header's entries for arrays back to back, each with a comma before it."""
    entries, begin = "", 0
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_NAMES:
            raise TypeError(f"{name} has dtype {dtype}: it must be one of {', '.join(DTYPES)}")
        end = begin + prod(shape) * dtype.itemsize
        entries += (
            f',{json.dumps(name)}:{{"dtype":"{DTYPE_NAMES[dtype]}",'
            f'"shape":[{",".join(map(str, shape))}],"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    return entries


def in_order(arrays: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """The arrays in the order of an image: wider dtypes first."""
    ordered = list(arrays.items())
    if len(ordered) > 1:
        ordered.sort(key=lambda named: named[1].itemsize, reverse=True)
    return ordered


def flat(array: Array) -> memoryview:
    """The bytes of an array, without a copy when it is dense."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# Reading images of a trusted writer; the service reads requests with service/image/reading.py.


def contents_of(image: Bytes) -> tuple[int, Contents]:
    """Offset of the first array byte, and the header's contents; raises ValueError."""
    if len(image) < 8:
        raise ValueError(f"an image has at least 8 bytes, this one {len(image)}")
    raw = image.data
    size = int.from_bytes(raw[:8], "little")
    start = 8 + size
    if start > len(raw):
        raise ValueError(f"the header has {size} bytes, the image only {len(raw)} in total")
    text = bytes(raw[8:start])
    contents = remembered(text) if size <= SHORT_HEADER else read_header(text)
    if start + contents.data_bytes != len(image):
        raise ValueError(
            f"arrays of {contents.data_bytes} bytes in an image with room for {len(image) - start}"
        )
    return start, contents


def decode(image: Bytes, key: str = RESPONSE) -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields under `key`, and the arrays: views of `image`, copies where it is unaligned.

    Raises ValueError for anything but an image with such fields.
    """
    start, contents = contents_of(image)
    if key not in contents.metadata:
        raise ValueError(f"the safetensors metadata has no JSON object under `{key}`")
    arrays: dict[str, Array] = {}
    for entry in contents.entries:
        dtype, begin = entry.dtype, start + entry.begin
        if begin % dtype.itemsize == 0:
            arrays[entry.name] = np.ndarray(entry.shape, dtype, image, begin)
        else:
            end = begin + prod(entry.shape) * dtype.itemsize
            arrays[entry.name] = image[begin:end].copy().view(dtype).reshape(entry.shape)
    return contents.metadata[key], arrays


def read_header(text: bytes) -> Contents:
    """The contents of a header; raises ValueError for anything but dense arrays of known dtypes."""
    try:
        table = json.loads(text)
        metadata = {
            key: fields
            for key, value in table.pop("__metadata__", {}).items()
            if isinstance(fields := json.loads(value), dict)
        }
        entries, end = [], 0
        for name, value in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            entry = Entry(name, DTYPES[value["dtype"]], tuple(map(index, value["shape"])), end)
            size = prod(entry.shape) * entry.dtype.itemsize
            if value["data_offsets"] != [end, end + size] or min(entry.shape, default=0) < 0:
                raise ValueError(f"{name}: {value} does not describe {size} bytes from byte {end}")
            entries.append(entry)
            end += size
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a safetensors header: {error!r}") from error
    return Contents(metadata, tuple(entries), end)


remembered: Final = lru_cache(maxsize=MAX_REMEMBERED)(read_header)


# Headers of requests. Steps repeat their calls in all but `offsets`, so headers are remembered.

LONGEST: Final = 16 * 1024
"""Headers up to this many characters are remembered: some hundred sequences."""


REMEMBERED: Final[dict[tuple[bytes, tuple[Shaped, ...]], tuple[str, str]]] = {}
"""Headers in two parts, between which `offsets` are inserted. The key is the fields as `marshal`
writes them, which distinguishes 1 from True and takes a quarter of the time of JSON."""


def request_image(fields: dict[str, Any], arrays: Mapping[str, Array]) -> list[Part]:
    """A request's image in parts, to be sent one after another; arrays are not copied."""
    ordered = in_order(arrays)
    return [request_header(fields, ordered), *[flat(array) for _, array in ordered]]


def request_header(
    fields: dict[str, Any], arrays: Sequence[tuple[str, Array]], alignment: int = ALIGNMENT
) -> bytes:
    """The image of a request up to its arrays, which follow in the order given.

    `offsets`, beside other fields, is a list of ints. Raises TypeError for a dtype without a name.
    """
    offsets = ""
    if "offsets" in fields:
        offsets = f',\\"offsets\\":{fields["offsets"]}'
        fields = {name: value for name, value in fields.items() if name != "offsets"}
    tensors = tuple([(name, array.dtype, array.shape) for name, array in arrays])
    try:
        key = marshal.dumps(fields, 2), tensors
    except ValueError:  # a type that JSON may know and marshal not: a subclass of str
        begin, end = write(fields, tensors)
    else:
        begin, end = REMEMBERED.get(key) or remember(key, fields)
    return padded(f"{begin}{offsets}{end}", alignment)


def remember(key: tuple[bytes, tuple[Shaped, ...]], fields: dict[str, Any]) -> tuple[str, str]:
    found = write(fields, key[1])
    if len(found[0]) <= LONGEST:
        if len(REMEMBERED) >= MAX_REMEMBERED:
            REMEMBERED.clear()
        REMEMBERED[key] = found
    return found


def write(fields: dict[str, Any], tensors: tuple[Shaped, ...]) -> tuple[str, str]:
    """A header, cut before the brace that ends the fields."""
    request = dump_json(dump_json(fields))
    begin = f'{{"__metadata__":{{"{REQUEST}":{request[:-2]}'
    return begin, f'}}"}}{describe(tensors)}}}'
