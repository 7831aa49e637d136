"""A session's arena at the engine's end: shared memory that no caller can shrink."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from attnd.wire.slots import ALIGNMENT

from service.errors import InvalidRequest

PAGE: Final = mmap.PAGESIZE
UNMAPPED_AT_ONCE: Final = 8 * 2**20
"""Bytes that are unmapped where they are closed."""


def stay_pageable(_memory: memoryview) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Pinning:
    """Lets a device reach memory by DMA.

    `pin` says whether it did so; `unpin` is called with the same bytes, before they move or go.
    """

    pin: Callable[[memoryview], bool] = stay_pageable
    unpin: Callable[[memoryview], object] = stay_pageable


PAGEABLE: Final = Pinning()
"""For engines without a device."""


class Arena:
    """Shared memory of `size` bytes that can grow to `limit`.

    The file is sealed against shrinking, so no caller can remove pages that the engine uses. It is
    made for one session and mapped whole at once; or it is a door's (`is_shared`), which shares it
    with several engines and grows it itself. Views keep the mapping alive: `close` closes the file,
    and the memory is unmapped with its last view.
    """

    def __init__(self, fd: int, size: int, limit: int, mapped: mmap.mmap, pinning: Pinning) -> None:
        self.is_shared = False
        self.fd = fd
        self.size = size
        self.limit = limit
        self.memory = memoryview(mapped)
        self.pinning = pinning
        self.pinned = memoryview(b"")
        self.pin()

    @classmethod
    def make(cls, size: int, limit: int, pinning: Pinning) -> Arena:
        """An arena of at least one page; sizes are rounded up to pages. May raise OSError."""
        limit = max(pages(limit), PAGE)
        size = min(max(pages(size), PAGE), limit)
        fd, sealable = anonymous_file()
        try:
            os.ftruncate(fd, limit)
            mapped = mmap.mmap(fd, limit)
            os.ftruncate(fd, size)
            if sealable:
                seal(fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size, limit, mapped, pinning)

    @classmethod
    def of_door(cls, fd: int, limit: int, pinning: Pinning) -> Arena:
        """The arena in a door's file `fd`, which `close` closes. Raises OSError, and ValueError for
        a file that can shrink."""
        size = min(os.fstat(fd).st_size // PAGE * PAGE, max(pages(limit), PAGE))
        if not is_sealed(fd):
            raise ValueError("it could shrink: seal it")
        arena = cls(fd, size, limit, mmap.mmap(fd, size), pinning)
        arena.is_shared = True
        return arena

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes of a slot. Raises InvalidRequest when it is not inside the arena."""
        check_place("slot", offset, length, self.size)
        return self.memory[offset : offset + length]

    def grow(self, size: int) -> None:
        """Make the arena at least `size` bytes, up to its limit and to the length of a door's file.

        May raise OSError. While it is pinned, no work of the engine may use it.
        """
        size = min(pages(size), self.limit)
        if self.is_shared:
            size = min(size, os.fstat(self.fd).st_size // PAGE * PAGE)
        if size <= self.size:
            return
        if self.is_shared:
            memory = memoryview(mmap.mmap(self.fd, size))
        else:
            memory = self.memory
            self.lengthen(size)
        self.unpin()
        self.memory, self.size = memory, size
        self.pin()

    def lengthen(self, size: int) -> None:
        """Make the file `size` bytes long, unless a caller did so. May raise OSError."""
        if os.fstat(self.fd).st_size < size:
            try:
                os.ftruncate(self.fd, size)
            except PermissionError:  # a caller did so just now; the seal prevents shrinking
                if os.fstat(self.fd).st_size < size:
                    raise

    def pin(self) -> None:
        memory = self.memory[: self.size]
        if self.pinning.pin(memory):
            self.pinned = memory

    def unpin(self) -> None:
        if len(self.pinned):
            self.pinning.unpin(self.pinned)
        self.pinned = memoryview(b"")

    def close(self) -> None:
        """Close the file; slots are refused from now on, views stay valid.

        A large mapping goes in a thread, without the interpreter's lock: to free its pages takes a
        quarter of a millisecond a MiB.
        """
        self.unpin()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
        large, self.memory = [self.memory], memoryview(b"")
        if self.size > UNMAPPED_AT_ONCE:
            with contextlib.suppress(RuntimeError):  # the interpreter ends: `large` goes with this
                threading.Thread(target=large.clear, name="unmap", daemon=True).start()
        self.size = 0


def check_place(name: str, offset: int, length: int, size: int) -> None:
    """Raises InvalidRequest unless a slot is inside an arena of `size` bytes, at a multiple of
    64."""
    if offset % ALIGNMENT:
        raise InvalidRequest(f"{name}_offset", offset, f"a multiple of {ALIGNMENT}")
    if offset < 0 or length < 0 or offset + length > size:
        rule = f"{name} of {length} bytes at {offset}: inside the arena of {size} bytes"
        raise InvalidRequest(f"{name}_offset", offset, rule)


def anonymous_file() -> tuple[int, bool]:
    """A file without a name, and whether it can be sealed: a memfd, else an unlinked temporary."""
    if hasattr(os, "memfd_create"):
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        with contextlib.suppress(OSError):
            return os.memfd_create("attnd-arena", flags), True
    fd, path = tempfile.mkstemp(prefix="attnd-arena-")
    os.unlink(path)
    return fd, False


def seal(fd: int) -> None:
    """Seal the file against shrinking; no process can undo this."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)


def is_sealed(fd: int) -> bool:
    """Whether the file cannot shrink, or is of a kind that cannot be sealed."""
    if not hasattr(os, "memfd_create"):
        return True
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return True


def pages(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE
