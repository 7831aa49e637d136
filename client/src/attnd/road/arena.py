"""The arena at a session's end: memory shared with the engine, and the slots cut from it."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import Any, Final

import numpy as np

from attnd.wire.dtypes import Array
from attnd.wire.slots import FreeList, aligned

SCRAPS: Final = 1024
"""A slot keeps spare bytes that are less than this part of the arena."""


class Held(np.ndarray[Any, Any]):
    """Bytes of the arena at `offset`. Arrays over them keep this alive, and this its `owner`."""

    owner: object = None
    offset: int = 0


class Slot:
    """`size` bytes of the arena at `offset`, free again when its last reference is deleted."""

    __slots__ = ("__weakref__", "_slots", "offset", "size")

    def __init__(self, slots: Slots, offset: int, size: int) -> None:
        self._slots = slots
        self.offset = offset
        self.size = size

    def trim(self, size: int) -> None:
        """Free the bytes after the first `size`, unless they are few.

        A slot that stays whole fits the next call, which usually needs as much again.
        """
        size = aligned(size)
        if size + self._slots.size // SCRAPS < self.size:
            rest, self.size = self.size - size, size  # first: an interrupt must not free it twice
            self._slots.returned.append((self.offset + size, rest))

    def free(self) -> None:
        """Free all of it, even where a reference (a traceback's) still exists."""
        # The garbage collector may call this anywhere, even under a lock: only put it aside.
        size, self.size = self.size, 0
        if size:
            self._slots.returned.append((self.offset, size))

    __del__ = free


class Slots:
    """Slots of one arena, for any thread."""

    def __init__(self, size: int) -> None:
        self.returned: deque[tuple[int, int]] = deque()
        self.size = size
        self.stretches = FreeList(size)
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Bytes that no slot covers, apart from those in `returned`."""
        return self.stretches.free

    def take(self, size: int) -> Slot | None:
        """A slot of at least `size` bytes; None when no free stretch is long enough."""
        size = aligned(size)
        with self._lock:
            if len(self.returned) == 1 and self.returned[0][1] == size:
                # Calls repeat: the slot of the last one has just the right size.
                return Slot(self, self.returned.popleft()[0], size)
            self._collect()
            offset = self.stretches.take(size)
        return None if offset is None else Slot(self, offset, size)

    def extend(self, slot: Slot, size: int) -> bool:
        """Make `slot` at least `size` bytes long, if the bytes after it are free."""
        more = aligned(size) - slot.size
        if more <= 0:
            return True
        with self._lock:
            self._collect()
            if not self.stretches.take_at(slot.offset + slot.size, more):
                return False
            slot.size += more
        return True

    def grow(self, size: int) -> None:
        with self._lock:
            self.stretches.grow(size)
            self.size = self.stretches.size

    def _collect(self) -> None:
        while self.returned:
            self.stretches.put(*self.returned.popleft())


class Arena:
    """The mapping of a file that the engine made. It grows and never shrinks."""

    def __init__(self, fd: int, size: int) -> None:
        self._file = open(fd, "r+b", buffering=0)  # noqa: SIM115  # closed with this at the latest
        self.slots = Slots(size)
        self.memory = mmap.mmap(fd, size)

    @property
    def is_short(self) -> bool:
        """Whether more than half is taken: results are then copied out of it."""
        stretches = self.slots.stretches
        return 2 * stretches.free < stretches.size

    def grow(self, size: int) -> None:
        """The file has `size` bytes now. Arrays made before keep showing the same memory."""
        if size > self.slots.size:
            self.memory = mmap.mmap(self._file.fileno(), size)
            self.slots.grow(size)

    def hold(self, offset: int, length: int, owner: object) -> Held:
        """Bytes of the arena that keep `owner` alive as long as any array over them exists."""
        held: Held = np.ndarray.__new__(Held, (length,), np.uint8, self.memory, offset)
        held.owner = owner
        held.offset = offset
        return held

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> Array:
        """An array over the arena that keeps no slot taken."""
        return np.ndarray(shape, dtype, self.memory, offset)

    def close(self) -> None:
        """Close the file. The memory stays mapped as long as arrays over it exist."""
        self._file.close()


def held_by(array: Array) -> tuple[Held, int] | None:
    """The bytes of an arena that contain an array, and its offset; None for other arrays."""
    base: object = array.base
    while isinstance(base, np.ndarray) and not isinstance(base, Held):
        base = base.base
    if not isinstance(base, Held):
        return None
    if array.nbytes == base.nbytes:
        return base, base.offset
    return base, base.offset + address(array) - address(base)


def address(array: Array) -> int:
    """Where the array's data begins in this process."""
    begin: int = array.__array_interface__["data"][0]
    return begin
