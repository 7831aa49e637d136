"""Custom masks as bits: packing, where each row's bits start, and reading them back."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kernels.backend import Array, Int32, Int64, Mask, UInt8

PIECE: Final = 2**20
"""Elements and bytes of an expanded mask that are made at once: about a millisecond."""
CALLS: Final = 2**13
"""What numpy's calls for some rows cost, as elements."""
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
        longest = int(np.maximum(self.kv_lens, self.qo_lens).max(initial=1))
        return STRIDE_WORDS * -(-longest // (32 * STRIDE_WORDS))

    def rows(self, order: Int32 | None) -> tuple[Int64, Int64, Int64]:
        """For each plan row the position of its sequence's first row (negative when there are more
        rows than keys), its sequence's rows, and the first element of the row."""
        counts = np.repeat(self.qo_lens.astype(np.int64), self.qo_lens)
        first = np.repeat((self.kv_lens - self.qo_lens).astype(np.int64), self.qo_lens)
        starts = np.repeat(np.cumsum(self.sizes) - self.sizes, self.qo_lens)
        begin = starts * (8 if self.packed else 1) + self._within * counts
        made = (first, counts, begin)
        return made if order is None else (first[order], counts[order], begin[order])

    @property
    def _within(self) -> Int64:
        """Number of each row in its sequence."""
        firsts = np.repeat(np.cumsum(self.qo_lens) - self.qo_lens, self.qo_lens)
        return np.arange(firsts.size) - firsts

    def expand(self, arena: memoryview, order: Int32 | None) -> Generator[None, None, Mask]:
        """Make the mask of all keys for plan rows, from a copy of the elements, in pieces."""
        before = -(-np.maximum(self.kv_lens - self.qo_lens, 0).astype(np.int64) // 8)
        widths = before + -(-self.qo_lens // 8)  # own rows begin at a whole byte
        ends = np.cumsum(widths * self.qo_lens)
        bits = np.empty(int(ends[-1]) if ends.size else 0, np.uint8)
        place, done = self.place, 0
        sequences = zip(self.qo_lens, self.sizes, before, widths, ends, strict=True)
        for rows, size, own, width, end in ((int(one) for one in each) for each in sequences):
            made = bits[end - rows * width : end].reshape(rows, width)
            at_once = max(1, PIECE // max(rows, 1))
            for first in range(0, rows, at_once):
                last = min(first + at_once, rows)
                seen = self._elements(arena, place, first * rows, last * rows)
                made[first:last, :own] = 0xFF
                made[first:last, own:] = np.packbits(
                    seen.reshape(-1, rows), axis=1, bitorder="little"
                )
                done += (last - first) * (rows + width) + CALLS
                if done >= PIECE:
                    done = 0
                    yield
            place += size
        starts = np.repeat(8 * (ends - widths * self.qo_lens + before), self.qo_lens)
        offsets = starts + self._within * np.repeat(8 * widths, self.qo_lens) - self.rows(None)[0]
        return Mask(bits, offsets if order is None else offsets[order])

    def _elements(self, arena: memoryview, place: int, first: int, last: int) -> Array:
        """Elements of the sequence at `place`, as bools."""
        if not self.packed:
            found: Array = np.frombuffer(arena, np.uint8, last - first, place + first) != 0
            return found
        begin, end = first // 8, -(-last // 8)
        held = np.frombuffer(arena, np.uint8, end - begin, place + begin)
        return np.unpackbits(held, bitorder="little")[first - 8 * begin : last - 8 * begin]


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
