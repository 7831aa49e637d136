"""Host memory that the device reads and writes by itself: pooled blocks, and registered ranges."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from typing import Any, Final

import cupy
from cupy.cuda import runtime

from kernels.backend import Array
from kernels.tensor import PinnedArray, Tensor, is_contiguous

LEAST_PINNED: Final = 1 << 12
REFUSED: Final = frozenset({1, 2, 304, 712, 801})
"""What the runtime answers where memory cannot be registered and nothing is broken: invalid value,
out of memory, the system's refusal, registered already, not supported."""


def pinned_memory(size: int) -> Any:
    """Pooled pinned memory of at least the given size.

    CuPy's pool gives a block again only for its very size, and never back: with powers of two it
    soon has a block for every request, and at most twice the memory in use at a time.
    """
    return cupy.cuda.alloc_pinned_memory(max(LEAST_PINNED, 1 << (size - 1).bit_length()))


def direct(tensor: Tensor) -> PinnedArray | None:
    """The tensor if it is host memory in one run of bytes that the device can reach, else None."""
    if isinstance(tensor, PinnedArray) and is_contiguous(tensor) and tensor.is_pinned:
        return tensor
    return None


def address_of(array: Array) -> int:
    """Where the array's bytes begin."""
    address: int = array.ctypes.data
    return address


def overlap(array: Array, address: int, size: int) -> bool:
    """Whether an array has bytes in a range."""
    begin = address_of(array)
    return begin < address + size and address < begin + array.nbytes


class HostRanges:
    """The address ranges that are registered with the device."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # begin, end

    def register(self, address: int, size: int) -> bool:
        """Pin a range. False where the system or the device refuses."""
        try:
            runtime.hostRegister(address, size, 0)
        except runtime.CUDARuntimeError as error:
            if error.status not in REFUSED:
                raise
            return False
        insort(self._ranges, (address, address + size))
        return True

    def size(self, address: int) -> int:
        """Bytes of the range that begins there; 0 for none."""
        return dict(self._ranges).get(address, address) - address

    def unregister(self, address: int) -> None:
        """Take a range back, which no copy touches any more."""
        self.forget(address)
        runtime.hostUnregister(address)

    def forget(self, address: int) -> None:
        """Forget a range, which the caller unregisters."""
        self._ranges = [(begin, end) for begin, end in self._ranges if begin != address]

    def clear(self) -> None:
        """Take all ranges back."""
        for begin, _ in list(self._ranges):
            self.unregister(begin)

    def cut(self, address: int, size: int) -> Iterator[tuple[int, int]]:
        """Split bytes into (offset, size) pieces for one copy each: none spans two ranges."""
        offset = 0
        while offset < size:
            at = address + offset
            index = bisect_right(self._ranges, at, key=lambda r: r[0]) - 1
            end = self._ranges[index][1] if index >= 0 else at
            piece = min(size - offset, end - at) if end > at else size - offset
            yield offset, piece
            offset += piece
