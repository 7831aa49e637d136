"""A session's arena at the caller's end: the mapping, and the slots cut from it."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from service.road.arena import ALIGNMENT, PAGE

TRIM_BYTES: Final = 2**20
"""Free stretches shorter than this keep their memory: they will be used again soon."""


class ArenaFull(Exception):
    """No free stretch of the arena is long enough; `needed` bytes, of which `free` are there."""

    def __init__(self, needed: int, free: int, size: int) -> None:
        super().__init__(
            f"a slot of {needed} bytes, {free} of {size} are free: free slots or grow the arena"
        )
        self.needed = needed
        self.free = free
        self.size = size


class Mapping:
    """The arena's memory in the caller's process; mapped anew when the arena has grown."""

    __slots__ = ("fd", "memory", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = 0
        self.memory = memoryview(b"")
        self.grow(size)

    def grow(self, size: int) -> None:
        """Map `size` bytes. Views of the mapping before stay valid and show the same memory."""
        if size > self.size:
            self.memory = memoryview(mmap.mmap(self.fd, size))
            self.size = size

    def forget(self, offset: int, length: int) -> None:
        """Give whole pages of a stretch back to the system; they read as zeros afterwards."""
        begin = -(-offset // PAGE) * PAGE
        end = (offset + length) // PAGE * PAGE
        mapped = self.memory.obj
        if end > begin and isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                mapped.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def close(self) -> None:
        """Forget the mapping; the memory goes with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
        self.size = 0
        self.memory = memoryview(b"")


class SlotArray(np.ndarray[Any, Any]):
    """The bytes of a slot. Every view of it keeps it alive, and with it the slot."""


class Slot:
    """A stretch of the arena. It is free again when `free` was called and no call holds it, or
    when nothing refers to its bytes any more."""

    __slots__ = ("array", "finalizer", "holds", "offset", "size")

    def __init__(
        self, offset: int, size: int, array: SlotArray, finalizer: weakref.finalize[Any, SlotArray]
    ) -> None:
        self.offset = offset
        self.size = size
        self.array = array
        self.finalizer = finalizer
        self.holds = 1

    def view(self, length: int | None = None) -> memoryview:
        """Its first `length` bytes, writable."""
        memory = self.array.data
        return memory if length is None else memory[:length]

    def tensor(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """An array over part of the slot."""
        return np.ndarray(shape, dtype, self.array, offset)

    def hold(self) -> None:
        """The engine may read or write the slot from now on."""
        self.holds += 1

    def free(self) -> None:
        """Undo `hold`, or give up one's own claim. The caller must be done with its views."""
        self.holds -= 1
        if self.holds == 0:
            self.finalizer()


class Slots:
    """First-fit allocation of slots of one arena; safe to use from several threads.

    A slot can be given back by the garbage collector at any moment, also while this object is
    locked, so what comes back waits in `returned` until the next call.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.size = mapping.size
        self.begins = [0]
        """First bytes of the free stretches, ascending; no two touch."""
        self.lengths = [mapping.size]
        self.returned: deque[tuple[int, int]] = deque()
        self.lock = threading.Lock()

    def take(self, size: int) -> Slot:
        """A slot of at least `size` bytes, its first at a multiple of 64. Raises ArenaFull."""
        length = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        with self.lock:
            offset = self.cut(length)
        array = SlotArray((length,), np.uint8, self.mapping.memory, offset)
        finalizer = weakref.finalize(array, self.returned.append, (offset, length))
        finalizer.atexit = False
        return Slot(offset, length, array, finalizer)

    def free(self) -> int:
        """Bytes that no slot covers."""
        with self.lock:
            self.collect()
            return sum(self.lengths)

    def grow(self, size: int) -> None:
        """The mapping has grown to `size` bytes."""
        with self.lock:
            if size > self.size:
                self.put(self.size, size - self.size)
                self.size = size

    def trim(self) -> None:
        """Give the memory of long free stretches back to the system. Not for pinned arenas."""
        with self.lock:
            self.collect()
            for offset, length in zip(self.begins, self.lengths, strict=True):
                if length >= TRIM_BYTES:
                    self.mapping.forget(offset, length)

    def cut(self, length: int) -> int:
        """The offset of the first free stretch of `length` bytes, taken out of it."""
        if self.returned:
            self.collect()
        for i, room in enumerate(self.lengths):
            if room < length:
                continue
            offset = self.begins[i]
            if room == length:
                del self.begins[i], self.lengths[i]
            else:
                self.begins[i] = offset + length
                self.lengths[i] = room - length
            return offset
        raise ArenaFull(length, sum(self.lengths), self.size)

    def collect(self) -> None:
        """Take back the slots that were freed since the last call."""
        while self.returned:
            self.put(*self.returned.popleft())

    def put(self, offset: int, length: int) -> None:
        """Free a stretch, joined with those that touch it."""
        begins, lengths = self.begins, self.lengths
        i = bisect_left(begins, offset)
        if i < len(begins) and begins[i] == offset + length:
            length += lengths[i]
            del begins[i], lengths[i]
        if i and begins[i - 1] + lengths[i - 1] == offset:
            lengths[i - 1] += length
        else:
            begins.insert(i, offset)
            lengths.insert(i, length)
