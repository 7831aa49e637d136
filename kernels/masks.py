"""Custom masks as bits: packing, where each row's bits start, and reading them back."""

from __future__ import annotations

import numpy as np

from kernels.backend import Array, Int64, Mask, UInt8


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
