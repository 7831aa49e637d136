"""Ragged arrays: CSR page tables and their token slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core.page_table import PageTable

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class CsrTable:
    """CSR page tables: sequence b holds `kv_indices[kv_indptr[b]:kv_indptr[b+1]]`.

    All int32. `kv_last_page_len` [B] is in 1..page_size, or 0 for an empty sequence.
    """

    kv_indptr: Int32
    kv_indices: Int32
    kv_last_page_len: Int32


def indptr(counts: Int32) -> Int32:
    """Prefix sums, int32 [n+1], of `counts` [n]."""
    sums = np.zeros(counts.size + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums


def page_counts(tokens: Int32, page_size: int) -> Int32:
    pages: Int32 = (tokens + (page_size - 1)) // page_size
    return pages


def last_page_lens(tokens: Int32, pages: Int32, page_size: int) -> Int32:
    """Tokens in the last of `pages` pages; 0 where there are none."""
    lens: Int32 = tokens - np.maximum(pages - 1, 0) * page_size
    return lens


def gather_pages(tables: Sequence[PageTable], first: Int32, count: Int32) -> Int32:
    """Pages `first[i] : first[i] + count[i]` of each table, concatenated."""
    if not tables:
        return np.empty(0, dtype=np.int32)
    last = (first + count).tolist()
    pieces = [
        t.read(a, b) if t.base else t.own[a:b]  # without a call for most
        for t, a, b in zip(tables, first.tolist(), last, strict=True)
    ]
    return np.concatenate(pieces)


def csr_table(tables: Sequence[PageTable], tokens: Int32, page_size: int) -> CsrTable:
    """The CSR form of the first `tokens[b]` tokens of each page table."""
    pages = page_counts(tokens, page_size)
    return CsrTable(
        indptr(pages),
        gather_pages(tables, np.zeros_like(pages), pages),
        last_page_lens(tokens, pages, page_size),
    )


def ramps(starts: Int32, counts: Int32) -> Int32:
    """`starts[b], starts[b] + 1, ...` (`counts[b]` numbers) for each b, concatenated; int32."""
    ends = np.cumsum(counts, dtype=np.int32)
    total = int(ends[-1]) if ends.size else 0
    ramp: Int32 = np.arange(total, dtype=np.int32)
    ramp += np.repeat(starts - (ends - counts), counts)
    return ramp


def lens_of(indptr: Int32) -> Int32:
    """The counts of which `indptr` [n+1] has the prefix sums: int32 [n]."""
    return indptr[1:] - indptr[:-1]


def token_slots(tables: Sequence[PageTable], start: Int32, count: Int32, page_size: int) -> Int32:
    """Slots (`page * page_size + offset`) of tokens `start[b] : start[b] + count[b]` of each table.

    int32 [sum(count)], in order.
    """
    first = start // page_size
    pages = page_counts(start + count, page_size) - first
    pages[count == 0] = 0
    held = gather_pages(tables, first, pages)
    inside = np.arange(page_size, dtype=np.int32)
    slots: Int32 = (held[:, np.newaxis] * np.int32(page_size) + inside).ravel()
    if slots.size == count.sum():
        return slots
    base = np.cumsum(pages, dtype=np.int64) - pages
    begin = ((base - first) * page_size + start).tolist()
    return np.concatenate([slots[a : a + n] for a, n in zip(begin, count.tolist(), strict=True)])
