"""Custom masks as bits: packing, where each row's bits start, and reading them back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kernels.backend import Array, Int32, Int64, Mask, UInt8

STRIDE_WORDS: Final = 64
"""Rows of expanded masks have a multiple of this many words: few lengths, so launches repeat."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnMask:
    """A custom mask over the rows that each sequence has in a step, at `place` of the arena.

    Element `[i, j]` of a sequence's `[qo_len, qo_len]` says whether its row i sees its row j; every
    row sees all keys before these rows, as far as other rules allow. An element is a byte, hidden
    if 0; or, `packed`, a bit (little order), each sequence padded to a byte. `qo_lens` and
    `kv_lens` int32 [B] are the rows and the keys of each sequence, these rows included.
    """

    place: int
    packed: bool
    qo_lens: Int32
    kv_lens: Int32

    @property
    def sizes(self) -> Int64:
        """Bytes of each sequence's elements, int64 [B]."""
        return own_sizes(self.qo_lens, self.packed)

    @property
    def stride(self) -> int:
        """32-bit words for the bits of a row of the expanded mask."""
        longest = int(self.kv_lens.max(initial=1))
        return STRIDE_WORDS * -(-longest // (32 * STRIDE_WORDS))

    def rows(self, order: Int32 | None) -> tuple[Int64, Int64, Int64]:
        """For each plan row the position of its sequence's first row (negative when there are more
        rows than keys), its sequence's rows, and the first element of the row."""
        counts = np.repeat(self.qo_lens.astype(np.int64), self.qo_lens)
        first = np.repeat((self.kv_lens - self.qo_lens).astype(np.int64), self.qo_lens)
        starts = np.repeat(np.cumsum(self.sizes) - self.sizes, self.qo_lens)
        within = np.arange(counts.size) - np.repeat(
            np.cumsum(self.qo_lens) - self.qo_lens, self.qo_lens
        )
        begin = starts * (8 if self.packed else 1) + within * counts
        made = (first, counts, begin)
        return made if order is None else (first[order], counts[order], begin[order])

    def expand(self, arena: memoryview, order: Int32 | None) -> Mask:
        """The mask of all keys for plan rows, from a copy of the elements."""
        parts: list[UInt8] = []
        offsets: list[Int64] = []
        place, done = self.place, 0
        for rows, keys, size in zip(self.qo_lens, self.kv_lens, self.sizes, strict=True):
            elements = np.frombuffer(arena, np.uint8, int(size), place)
            place += int(size)
            if self.packed:
                elements = np.unpackbits(elements, count=int(rows) ** 2, bitorder="little")
            own = np.packbits((elements != 0).reshape(rows, rows), axis=1, bitorder="little")
            before = -(-max(int(keys) - int(rows), 0) // 8)  # whole bytes, so that own ones fit
            bits = np.full((rows, before + own.shape[1]), 0xFF, np.uint8)
            bits[:, before:] = own
            begin = done + np.arange(rows, dtype=np.int64) * bits.shape[1] + before
            offsets.append(8 * begin - (np.int64(keys) - np.int64(rows)))
            parts.append(bits.reshape(-1))
            done += bits.size
        joined = np.concatenate([np.empty(0, np.int64), *offsets])
        bits = np.concatenate([np.empty(0, np.uint8), *parts])
        return Mask(bits, joined if order is None else joined[order])


def own_sizes(qo_lens: Int32, packed: bool) -> Int64:
    """Bytes of the elements that an `OwnMask` has for each sequence, int64 [B]."""
    elements: Int64 = qo_lens.astype(np.int64) ** 2
    return -(-elements // 8) if packed else elements


def packbits(mask: Array) -> UInt8:
    """A boolean array, flattened, as `ceil(size / 8)` bytes in little bit order.

    Bit `i % 8` of byte `i // 8` is element i: numpy's `packbits(mask, bitorder="little")`.
    """
    return np.packbits(_booleans(mask), bitorder="little")


def mask_row_offsets(qo_lens: Array, kv_lens: Array, *, padded: bool) -> Int64:
    """The bit where each query row's keys begin, `[sum(qo_lens)]`, for 2-D ragged masks.

    Each request has `qo_len x kv_len` bits, row-major. Requests are contiguous, or with `padded`
    each starts at a whole byte.
    """
    qo, kv = np.asarray(qo_lens, np.int64), np.asarray(kv_lens, np.int64)
    bits = qo * kv
    if padded:
        bits = -(-bits // 8) * 8
    starts = np.cumsum(bits) - bits
    first_rows = np.cumsum(qo) - qo
    within = np.arange(int(qo.sum())) - np.repeat(first_rows, qo)
    offsets: Int64 = np.repeat(starts, qo) + within * np.repeat(kv, qo)
    return offsets


def make_mask(mask: Array, qo_lens: Array, kv_lens: Array) -> Mask:
    """A `Mask` from booleans: per request `qo_len x kv_len`, row-major, back to back.

    Raises `ValueError` when the mask has another number of elements than the lengths claim.
    """
    flat = _booleans(mask)
    claimed = int((np.asarray(qo_lens, np.int64) * np.asarray(kv_lens, np.int64)).sum())
    if flat.size != claimed:
        raise ValueError(f"the mask has {flat.size} elements: the lengths claim {claimed}")
    return Mask(packbits(flat), mask_row_offsets(qo_lens, kv_lens, padded=False))


def read_bits(bits: UInt8, index: Int64) -> Array:
    """Booleans, shaped as `index`: bit `index` of little-order `bits`."""
    found: Array = (bits[index >> 3] >> (index & 7).astype(np.uint8)) & 1
    return found.astype(bool)


def _booleans(mask: Array) -> Array:
    flat = np.asarray(mask)
    if flat.dtype != np.bool_:
        raise ValueError(f"mask is {flat.dtype}: must be boolean")
    return flat.reshape(-1)
