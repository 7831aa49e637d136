"""Where the answer of a call goes: an image is laid there once, and backends write into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.tensor import PinnedArray
from service.errors import AnswerTooLarge
from service.image.json_text import dump_json
from service.image.writing import header

Array = NDArray[Any]
Shape = tuple[str, np.dtype[Any], tuple[int, ...]]
"""Name, dtype and shape of a tensor of an answer."""

HEADER_BYTES: Final = 256
TENSOR_BYTES: Final = 128
"""At most what the header says beside the fields, and of one tensor."""


class DoesNotFit(AnswerTooLarge):
    """The answer is larger than the place that the caller named; `needed` bytes would do."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(needed, capacity, "name a place of that size for the answer")
        self.needed = needed


class Place:
    """Memory for one answer. `memory` None: as much as it takes, of its own (no caller waits).

    `limit` bounds any answer, whatever the place. `length` is that of the image laid last.
    """

    __slots__ = ("image", "length", "limit", "memory", "pinned")

    def __init__(
        self, memory: memoryview | None = None, limit: int = 2**63, pinned: bool = False
    ) -> None:
        self.memory = memory
        self.limit = limit
        self.pinned = pinned
        self.image: memoryview | None = None
        self.length = 0

    def require(self, text_bytes: int, shapes: Sequence[Shape] = (), remedy: str = "") -> None:
        """Refuse an answer of so much JSON and these tensors before anything is changed for it.

        Raises `AnswerTooLarge`, or `DoesNotFit` with what would do.
        """
        size = HEADER_BYTES + 2 * text_bytes
        for _, dtype, shape in shapes:
            size += TENSOR_BYTES + math.prod(shape) * dtype.itemsize
        if size > self.limit:
            raise AnswerTooLarge(size, self.limit, remedy or "ask for less at once")
        if self.memory is not None and size > len(self.memory):
            raise DoesNotFit(size, len(self.memory))

    def lay(self, fields: dict[str, Any], shapes: Sequence[Shape] = ()) -> dict[str, Array]:
        """Write the header, and give the tensors' memory behind it, widest dtypes first."""
        text = dump_json(fields)
        ordered = tuple(sorted(shapes, key=_width, reverse=True))
        head = header("response", text, ordered)
        begins = []
        end = len(head)
        for _, dtype, shape in ordered:
            begins.append(end)
            end += math.prod(shape) * dtype.itemsize
        image = memoryview(bytearray(end)) if self.memory is None else self.memory
        if end > len(image):
            raise DoesNotFit(end, len(image))
        image[: len(head)] = head
        self.image, self.length = image, end
        tensors: dict[str, Array] = {}
        for (name, dtype, shape), begin in zip(ordered, begins, strict=True):
            empty = 0 in shape
            array = np.empty(shape, dtype) if empty else np.ndarray(shape, dtype, image, begin)
            tensors[name] = array.view(PinnedArray) if self.pinned else array
        return tensors


def _width(shape: Shape) -> int:
    return shape[1].itemsize
