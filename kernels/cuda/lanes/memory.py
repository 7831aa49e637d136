"""The plan of a step in memory of its lane: arrays at places that change as little as can be.

A step's plan differs from the last one's in a few numbers. Where its arrays are at the same places,
its launches are the same to the byte, and a CUDA graph of the last one serves again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime

from kernels.backend import Int32
from kernels.cuda.device.host_memory import pinned_memory
from kernels.cuda.device.transfer import aligned

FIRST_BYTES: Final = 1 << 20
SIDES: Final = 2
"""Steps that a lane holds at once."""
ROOM: Final = 1.5
"""Of an array's size, so that it can grow a while where it is."""


class Outgrown(Exception):
    """The memory was made larger: places given before are void, lay everything out again."""


class Side:
    """Device memory for one step's plan, and pinned memory of the same size that it comes from."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._rooms: list[int] = []
        self._make(FIRST_BYTES)
        self.restart()

    def _make(self, size: int) -> None:
        with self._stream:
            self._device = cupy.cuda.alloc(size)
        self._host = pinned_memory(size)
        self._size = size

    def restart(self) -> None:
        """For the next step: what this side had before has been read."""
        self._used = self._count = 0

    def place(self, array: Int32) -> int:
        """Lay an array out; its address on the device. Raises `Outgrown`."""
        if self._count == len(self._rooms):
            self._rooms.append(0)
        if array.nbytes > self._rooms[self._count]:
            self._rooms[self._count] = aligned(int(array.nbytes * ROOM) + 1)
        offset = self._used
        self._used += max(self._rooms[self._count], aligned(1))
        self._count += 1
        if self._used > self._size:
            self._make(max(2 * self._size, 2 * self._used))
            raise Outgrown
        np.ndarray(array.shape, np.int32, self._host, offset)[...] = array
        address: int = self._device.ptr + offset
        return address

    def send(self) -> None:
        """Copy the packed arrays, in the order of the stream."""
        if self._used:
            kind = runtime.memcpyHostToDevice
            source, to = self._host.ptr, self._device.ptr
            runtime.memcpyAsync(to, source, self._used, kind, self._stream.ptr)


class LaneMemory:
    """What attention needs of `Transfers`, on one stream of its own, for plans of steps.

    Two sides take turns: the next step is laid out while the device reads the last one's.
    """

    def __init__(self, stream: Any) -> None:
        self.compute = stream
        self._sides = tuple(Side(stream) for _ in range(SIDES))
        self._turn = 0

    @property
    def side(self) -> Side:
        return self._sides[self._turn]

    def next_side(self) -> None:
        self._turn = (self._turn + 1) % SIDES
        self.side.restart()

    def upload_ints(self, arrays: Sequence[Int32]) -> tuple[Any, list[int]]:
        """As `Transfers.upload_ints`, but the copy is made by `send`, with all the step's."""
        side = self.side
        return side, [side.place(array) for array in arrays]

    def scratch(self, size: int) -> Any:
        """Device memory, free to be used again in the order of the stream."""
        with self.compute:
            return cupy.cuda.alloc(size)
