"""An arena at the end of a door: its mapping, and the slots cut from it."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Part
from attnd.wire.slots import ALIGNMENT, FreeList

from service.road.arena import PAGE

TRIM_BYTES: Final = 2**20
"""Shorter free stretches keep their memory: they are reused soon."""
TRIMMED_AT_ONCE: Final = 4 * 2**20
"""Bytes returned to the system in one call of `trim`: about a millisecond."""


class ArenaFull(Exception):
    """No free stretch of the arena has `needed` bytes; `free` are free in total."""

    def __init__(self, needed: int, free: int, size: int) -> None:
        super().__init__(
            f"a slot of {needed} bytes, {free} of {size} are free: free slots or grow the arena"
        )
        self.needed = needed
        self.free = free
        self.size = size


class Mapping:
    """The arena's memory in this process; remapped when the arena grows."""

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
        """Return whole pages of a stretch to the system; they then read as zeros."""
        begin = -(-offset // PAGE) * PAGE
        end = (offset + length) // PAGE * PAGE
        mapped = self.memory.obj
        if end > begin and isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):
                mapped.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def close(self) -> None:
        """Close the file. The memory stays mapped until its last view is deleted."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
        self.size = 0
        self.memory = memoryview(b"")


class SlotArray(np.ndarray[Any, Any]):
    """The bytes of a slot. Every view of it keeps it alive, and with it the slot."""


class Slot:
    """A stretch of the arena, free again when the last `hold` is undone by `free`, or when the last
    reference to its bytes is deleted."""

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

    def write(self, parts: Sequence[Part]) -> int:
        """Copy the parts of an image to its front; returns the image's length."""
        into, at = self.array.data, 0
        for part in parts:
            into[at : at + len(part)] = part
            at += len(part)
        return at

    def hold(self) -> None:
        """The engine may read or write the slot from now on."""
        self.holds += 1

    def free(self) -> None:
        """Undo `hold`, or release the slot. The caller must not use its views afterwards."""
        self.holds -= 1
        if self.holds == 0:
            self.finalizer()


class Slots:
    """Slots of one arena, for any thread.

    The garbage collector can free a slot at any moment, even while this object is locked, so freed
    stretches wait in `returned` until the next call.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.stretches = FreeList(mapping.size)
        self.returned: deque[tuple[int, int]] = deque()
        self.lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the arena."""
        return self.stretches.size

    def take(self, size: int) -> Slot:
        """A slot of at least `size` bytes that begins at a multiple of 64. Raises ArenaFull."""
        length = -(-size // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        with self.lock:
            if self.returned:
                self.collect()
            offset = self.stretches.take(length)
        if offset is None:
            raise ArenaFull(length, self.stretches.free, self.stretches.size)
        array = SlotArray((length,), np.uint8, self.mapping.memory, offset)
        finalizer = weakref.finalize(array, self.returned.append, (offset, length))
        finalizer.atexit = False
        return Slot(offset, length, array, finalizer)

    def free(self) -> int:
        """Bytes that no slot covers."""
        with self.lock:
            self.collect()
            return self.stretches.free

    def grow(self, size: int) -> None:
        with self.lock:
            self.stretches.grow(size)

    def trim(self, begin: int = 0) -> int | None:
        """Return memory of long free stretches to the system, from offset `begin` on; the offset
        to continue from, None at the end. Not for pinned arenas."""
        with self.lock:
            self.collect()
            stretches = zip(self.stretches.begins, self.stretches.lengths, strict=True)
            for offset, length in stretches:
                first, end = max(offset, begin), offset + length
                if length >= TRIM_BYTES and first < end:
                    last = min(end, first + TRIMMED_AT_ONCE)
                    self.mapping.forget(first, last - first)
                    return last
        return None

    def collect(self) -> None:
        while self.returned:
            self.stretches.put(*self.returned.popleft())


READ_BYTES: Final = 2**16


class OwnArena:
    """Slots for all of a door's sessions.

    The slots of a call are free once its engine has answered. The slots of an abandoned session are
    free at the end of its connection, which an engine closes when it has answered all calls or
    dies: a stopped process may still write there.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.slots = Slots(mapping)
        self.leaving: dict[socket.socket, asyncio.AbstractEventLoop] = {}
        """Connections of abandoned sessions that their engines have not closed yet."""

    def leave(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, slots: Sequence[Slot]
    ) -> None:
        """Abandon a session; its slots are freed when the engine closes the connection."""

        def on_readable() -> None:
            try:
                if sock.recv(READ_BYTES):
                    return  # answers of abandoned calls
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                pass
            self.forget(sock)
            for slot in slots:
                slot.free()

        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        self.leaving[sock] = loop
        loop.add_reader(sock, on_readable)

    def forget(self, sock: socket.socket) -> None:
        self.leaving.pop(sock).remove_reader(sock)
        sock.close()

    def close(self) -> None:
        """Close the arena: no more slots can be taken."""
        for sock in list(self.leaving):
            self.forget(sock)
        self.mapping.close()
