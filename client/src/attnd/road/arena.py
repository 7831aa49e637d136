"""The arena at the caller's end: memory shared with the engine, and the slots it is cut into."""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_left
from collections import deque
from typing import Any, Final

import numpy as np

from attnd.wire.images import Array

ALIGNMENT: Final = 64
"""Every slot begins at a multiple of this."""
SCRAPS: Final = 1024
"""Less than this part of the arena is a scrap, not worth giving back alone."""


class Held(np.ndarray[Any, Any]):
    """Bytes of the arena at `offset`; arrays made of it keep it, and it keeps `owner`, its slot."""

    owner: object = None
    offset: int = 0


class Slot:
    """`size` bytes of the arena at `offset`; free again when nothing refers to it any more."""

    __slots__ = ("__weakref__", "_slots", "offset", "size")

    def __init__(self, slots: Slots, offset: int, size: int) -> None:
        self._slots = slots
        self.offset = offset
        self.size = size

    def trim(self, size: int) -> None:
        """Give back what lies beyond the first `size` bytes, if it is worth it.

        A slot that stays whole is there for the next call, which most often needs as much again.
        """
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        if size + self._slots.size // SCRAPS < self.size:
            self._slots.returned.append((self.offset + size, self.size - size))
            self.size = size

    def free(self) -> None:
        """Give all of it back, whoever still refers to it (a traceback does)."""
        # The collector may call this anywhere, a lock held included: only put it aside.
        if self.size:
            self._slots.returned.append((self.offset, self.size))
            self.size = 0

    __del__ = free


class Slots:
    """First-fit allocation of `size` bytes; threads may share it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self.returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._starts = [0]
        self._sizes = [size]

    def take(self, size: int) -> Slot | None:
        """A slot of at least `size` bytes; None when there is no such stretch."""
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            if len(self.returned) == 1 and self.returned[0][1] == size:
                # Calls repeat themselves: what the last one gave back is just what is wanted.
                return Slot(self, self.returned.popleft()[0], size)
            self._merge_returned()
            for i, free in enumerate(self._sizes):
                if free >= size:
                    return Slot(self, self._cut(i, size), size)
        return None

    def extend(self, slot: Slot, size: int) -> bool:
        """Make `slot` at least `size` bytes, if what follows it is free."""
        more = -(-size // ALIGNMENT) * ALIGNMENT - slot.size
        if more <= 0:
            return True
        with self._lock:
            self._merge_returned()
            i = bisect_left(self._starts, slot.offset + slot.size)
            if i == len(self._starts) or self._starts[i] != slot.offset + slot.size:
                return False
            if self._sizes[i] < more:
                return False
            self._cut(i, more)
            slot.size += more
        return True

    def grow(self, size: int) -> None:
        """The arena has `size` bytes now."""
        with self._lock:
            if size > self.size:
                self.returned.append((self.size, size - self.size))
                self.size = size

    def _cut(self, i: int, size: int) -> int:
        """Take `size` bytes off the front of free stretch i; gives their offset."""
        offset = self._starts[i]
        if self._sizes[i] == size:
            del self._starts[i], self._sizes[i]
        else:
            self._starts[i] += size
            self._sizes[i] -= size
        self.free -= size
        return offset

    def _merge_returned(self) -> None:
        starts, sizes = self._starts, self._sizes
        while self.returned:
            offset, size = self.returned.popleft()
            self.free += size
            i = bisect_left(starts, offset)
            if i < len(starts) and starts[i] == offset + size:
                size += sizes[i]
                del starts[i], sizes[i]
            if i and starts[i - 1] + sizes[i - 1] == offset:
                sizes[i - 1] += size
            else:
                starts.insert(i, offset)
                sizes.insert(i, size)


class Arena:
    """The mapping of a file that the engine made. It grows, and never shrinks."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.slots = Slots(size)
        self.memory = mmap.mmap(fd, size)

    @property
    def is_short(self) -> bool:
        """Whether more than half is taken: results should not stay here."""
        return 2 * self.slots.free < self.slots.size

    def grow(self, size: int) -> None:
        """The file has `size` bytes now. Arrays made before show the same memory as ever."""
        if size > self.slots.size:
            self.memory = mmap.mmap(self._fd, size)
            self.slots.grow(size)

    def hold(self, offset: int, length: int, owner: object) -> Held:
        """Bytes of the arena, which keep `owner` as long as anything is made of them."""
        held: Held = np.ndarray.__new__(Held, (length,), np.uint8, self.memory, offset)
        held.owner = owner
        held.offset = offset
        return held

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> Array:
        """An array over the arena that keeps nothing taken."""
        return np.ndarray(shape, dtype, self.memory, offset)

    def close(self) -> None:
        """Forget the file; what is mapped stays as long as arrays of it do."""
        os.close(self._fd)


def held_by(array: Array) -> tuple[Held, int] | None:
    """What keeps this array in an arena, and where in the arena it begins; None elsewhere."""
    base: object = array.base
    while isinstance(base, np.ndarray) and not isinstance(base, Held):
        base = base.base
    if not isinstance(base, Held):
        return None
    if array.nbytes == base.nbytes:
        return base, base.offset
    return base, base.offset + address(array) - address(base)


def address(array: Array) -> int:
    where: int = array.__array_interface__["data"][0]
    return where
