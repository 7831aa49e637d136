"""Writing images: the header, where each tensor lies, and buffers or arrays for the tensors.

Wider dtypes go first and headers end on eight bytes, so that every tensor lies aligned in an image
that begins aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

import numpy as np
from attnd.wire.dtypes import DTYPE_NAMES, Array, DType, Part

from service.image.json_text import dump_json

Shaped = tuple[str, DType, tuple[int, ...]]
"""Name, dtype and shape of one tensor."""
RESPONSE: Final = "response"
PROBLEM: Final = "problem"
REMEMBERED_CHARS: Final = 1024
"""Longest fields whose header is remembered: bounds what 256 of them can hold."""


def in_order(tensors: Iterable[Shaped]) -> tuple[Shaped, ...]:
    """The tensors in the order in which they lie in an image."""
    return tuple(sorted(tensors, key=width, reverse=True))


def width(tensor: Shaped) -> int:
    return tensor[1].itemsize


def num_bytes(tensor: Shaped) -> int:
    return math.prod(tensor[2]) * tensor[1].itemsize


def header(key: str, text: str, tensors: tuple[Shaped, ...]) -> bytes:
    """Length and header of an image: the JSON `text` under `key`, and `tensors` `in_order`.

    Short ones are remembered: steps repeat their shapes.
    """
    make = make_header if len(text) <= REMEMBERED_CHARS else make_header.__wrapped__
    return make(key, text, tensors)


@lru_cache(maxsize=256)
def make_header(key: str, text: str, tensors: tuple[Shaped, ...]) -> bytes:
    entries = [f'{{"__metadata__":{{{dump_json(key)}:{dump_json(text)}}}']
    begin = 0
    for tensor in tensors:
        name, dtype, shape = tensor
        end = begin + num_bytes(tensor)
        sizes = ",".join(map(str, shape))
        entries.append(
            f'{dump_json(name)}:{{"dtype":"{DTYPE_NAMES[dtype]}","shape":[{sizes}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    document = ",".join(entries).encode() + b"}"
    document += b" " * (-len(document) % 8)
    return len(document).to_bytes(8, "little") + document


def size(head: bytes, tensors: Iterable[Shaped]) -> int:
    """Bytes of the whole image."""
    return len(head) + sum(map(num_bytes, tensors))


def lay(into: memoryview, head: bytes, tensors: Iterable[Shaped]) -> dict[str, Array]:
    """Copies the header to the front of `into`; gives the tensors' places there, to be filled."""
    into[: len(head)] = head
    arrays = {}
    begin = len(head)
    for tensor in tensors:
        name, dtype, shape = tensor
        length = num_bytes(tensor)
        arrays[name] = np.ndarray(shape, dtype, into, begin) if length else np.empty(shape, dtype)
        begin += length
    return arrays


def write(into: memoryview, head: bytes, arrays: Mapping[str, Array]) -> int:
    """Copies a whole image to the front of `into`; its size. `head` is that of these arrays."""
    tensors = in_order(shaped(arrays))
    for name, place in lay(into, head, tensors).items():
        place[...] = arrays[name]
    return size(head, tensors)


def shaped(arrays: Mapping[str, Array]) -> list[Shaped]:
    return [(name, array.dtype, array.shape) for name, array in arrays.items()]


def image(key: str, text: str, arrays: Mapping[str, Array]) -> list[Part]:
    """An image as buffers to send in order; the tensors' bytes are not copied."""
    tensors = in_order(shaped(arrays))
    parts: list[Part] = [header(key, text, tensors)]
    for name, _, _ in tensors:
        array = arrays[name]
        if array.nbytes:
            parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return parts
