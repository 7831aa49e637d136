"""Writing images: the places of tensors, as arrays to fill or as buffers to send."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from attnd.wire.dtypes import Array, Part
from attnd.wire.images import Shaped, flat, header


def in_order(tensors: Iterable[Shaped]) -> tuple[Shaped, ...]:
    """The tensors in the order of an image: wider dtypes first, so that all are aligned."""
    return tuple(sorted(tensors, key=lambda one: one[1].itemsize, reverse=True))


def num_bytes(tensor: Shaped) -> int:
    return math.prod(tensor[2]) * tensor[1].itemsize


def size(head: bytes, tensors: Iterable[Shaped]) -> int:
    return len(head) + sum(map(num_bytes, tensors))


def lay(into: memoryview, head: bytes, tensors: Iterable[Shaped]) -> dict[str, Array]:
    """Copy the header to the front of `into`; returns arrays over the tensors' places there."""
    into[: len(head)] = head
    arrays = {}
    begin = len(head)
    for tensor in tensors:
        name, dtype, shape = tensor
        length = num_bytes(tensor)
        arrays[name] = np.ndarray(shape, dtype, into, begin) if length else np.empty(shape, dtype)
        begin += length
    return arrays


def shaped(arrays: Mapping[str, Array]) -> list[Shaped]:
    return [(name, array.dtype, array.shape) for name, array in arrays.items()]


def image(key: str, text: str, arrays: Mapping[str, Array]) -> list[Part]:
    """An image as buffers to send in order; the tensors' bytes are not copied."""
    tensors = in_order(shaped(arrays))
    parts: list[Part] = [header(key, text, tensors)]
    parts += [flat(arrays[name]) for name, _, _ in tensors if arrays[name].nbytes]
    return parts
