"""Large host memory for copies: it is pinned piece by piece, when a copy first touches it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import Lock
from typing import Final

import numpy as np

from kernels.backend import UInt8
from kernels.cuda.device.host_memory import HostRanges, address_of

LOG: Final = logging.getLogger("attnd.kernels")
PIECE: Final = 1 << 24
"""Bytes that are pinned at once. Launches wait for the driver meanwhile: some milliseconds."""


class LazyPinned:
    """Allocations that are pinned as they are used; any thread may use them.

    Where the system refuses to pin more, the rest stays pageable: copies of it are slower.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._ranges = HostRanges()
        self._ends: dict[int, int] = {}
        """The end of each allocation, by its beginning."""
        self._owners: list[UInt8] = []
        self._done: set[int] = set()
        """Pieces that are pinned, or never will be."""
        self.is_pinned = True
        """Whether all pieces in use are pinned."""

    def allocate(self, size: int) -> UInt8:
        """Bytes of zeros, which the system provides as they are written to."""
        whole = np.zeros((-(-size // PIECE) + 1) * PIECE, np.uint8)
        skipped = -address_of(whole) % PIECE
        made = whole[skipped : skipped + size]
        self._owners.append(whole)
        self._ends[address_of(made)] = address_of(made) + size
        return made

    def pin(self, begin: int, size: int) -> Iterator[tuple[int, int]]:
        """Pin the pieces of a range; (offset, size) of each part for one copy.

        Raises ValueError for memory that is not allocated here.
        """
        end = begin + size
        if not any(first <= begin and end <= last for first, last in self._ends.items()):
            raise ValueError("the array is not in memory for page copies: this is a bug")
        at = begin
        while at < end:
            piece = at // PIECE
            if piece not in self._done:
                self._pin(piece)
            stop = min(end, (piece + 1) * PIECE)
            yield at - begin, stop - at
            at = stop

    def _pin(self, piece: int) -> None:
        with self._lock:
            if piece in self._done:
                return
            if self.is_pinned and not self._ranges.register(piece * PIECE, PIECE):
                self.is_pinned = False
                pinned = len(self._done) * PIECE
                LOG.warning("only %d bytes can be pinned: copies of the rest are slower", pinned)
            self._done.add(piece)

    def clear(self) -> None:
        """Unpin everything, after all copies."""
        self._ranges.clear()
        self._done.clear()
