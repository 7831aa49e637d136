"""From a call's image to a request that the engine can run; headers that repeat are read once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from kernels.tensor import PinnedArray
from service.engine.place import Array, Place
from service.image.reading import place, split
from service.operations.info import InfoAnswer
from service.operations.spec import Operation, Prepared, prepare

REMEMBERED_BYTES: Final = 16 * 2**10
"""Longest header that is remembered: bounds what 512 of them can hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A checked operation, its tensors in place, and where its answer goes."""

    operation: Operation
    fields: Any
    tensors: dict[str, Array]
    place: Place


class RequestReader:
    """Reads images for one engine, whose `info` the checks rest on."""

    def __init__(self, info: InfoAnswer) -> None:
        def read(operation: Operation, header: bytes, room: int) -> Prepared:
            return prepare(operation, header, room, info)

        self._read = read
        self._remember = lru_cache(maxsize=512)(read)

    def read(self, operation: Operation, image: memoryview, pinned: bool, answer: Place) -> Request:
        """Raises `MalformedBody`, `InvalidRequest`.

        The header is copied before it is read: its writer may still be at it. Tensors are read
        where they lie.
        """
        header, start = split(image)
        read = self._remember if len(header) <= REMEMBERED_BYTES else self._read
        prepared = read(operation, header, len(image) - start)
        tensors = place(image, start, prepared.layout)
        if pinned:
            tensors = {name: array.view(PinnedArray) for name, array in tensors.items()}
        return Request(operation, prepared.fields, tensors, answer)
