"""Large host memory for copies: it is pinned piece by piece, when a copy first touches it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Int64, UInt8
from kernels.cuda.device.host_memory import HostRanges, address_of

LOG: Final = logging.getLogger("attnd.kernels")
PIECE: Final = 1 << 24
"""Bytes that are pinned at once. Launches wait for the driver meanwhile: some milliseconds."""
SYSTEM_PAGE: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """An allocation: `rows` blocks are pinned at once; `done` are the pieces that are."""

    whole: UInt8
    rows: int
    done: NDArray[np.bool_]


class LazyPinned:
    """Allocations that are pinned as they are used; any thread may use them.

    Where the system refuses to pin more, the rest stays pageable: copies of it are slower.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._ranges = HostRanges()
        self._blocks: dict[int, Blocks] = {}
        self.is_pinned = True
        """Whether all pieces in use are pinned."""

    def allocate(self, count: int, size: int) -> UInt8:
        """Blocks `[count, size]` of zeros, which the system provides as they are written to."""
        step = -(-size // SYSTEM_PAGE) * SYSTEM_PAGE
        whole = np.zeros(count * step + SYSTEM_PAGE, np.uint8)
        skipped = -address_of(whole) % SYSTEM_PAGE
        made = whole[skipped : skipped + count * step].reshape(count, step)
        rows = max(1, PIECE // step)
        self._blocks[address_of(made)] = Blocks(made, rows, np.zeros(-(-count // rows), np.bool_))
        return made[:, :size]

    def is_prepared(self, blocks: UInt8, rows: Int64) -> bool:
        """Whether blocks of an allocation are pinned, as far as they can be."""
        own = self._blocks[address_of(blocks)]
        return bool(own.done[rows // own.rows].all())

    def pin(self, blocks: UInt8, rows: Int64) -> Int64:
        """Pin some blocks of an allocation; their addresses.

        Raises ValueError for memory that is not allocated here.
        """
        base = address_of(blocks)
        own = self._blocks.get(base)
        if own is None:
            raise ValueError("the array is not memory for page copies: this is a bug")
        pieces = rows // own.rows
        if not own.done[pieces].all():
            with self._lock:
                for piece in np.unique(pieces).tolist():
                    self._pin(own, piece)
        return base + rows * own.whole.strides[0]

    def _pin(self, own: Blocks, piece: int) -> None:
        if own.done[piece]:
            return
        part = own.whole[piece * own.rows : (piece + 1) * own.rows]
        if self.is_pinned and not self._ranges.register(address_of(part), part.nbytes):
            self.is_pinned = False
            LOG.warning("the system pins no more memory: copies of the rest are slower")
        own.done[piece] = True

    def clear(self) -> None:
        """Unpin everything, after all copies."""
        self._ranges.clear()
