"""Cascade levels: in each, runs of neighbouring sequences attend one range of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from service.core.errors import InvalidRequest
from service.core.page_table import PageTable
from service.core.plans.ragged import (
    Int32,
    gather_pages,
    indptr,
    last_page_lens,
    lens_of,
    page_counts,
)
from service.core.values import Indices

MAX_INDICES: Final = 2**22
"""Maximum entries of one level's page table: 16 MiB, built in some tens of milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class CascadeLevel:
    """Segment s: rows `qo_indptr[s]:qo_indptr[s+1]` attend one run of pages.

    All int32. `qo_indptr` [S+1] covers all plan rows, `kv_indptr` [S+1] counts pages,
    `kv_last_page_len` [S] is in 1..page_size, or 0 for a segment without pages, `kv_start` [S] is
    the position of the segment's first key in each row's own sequence. `causal`: some key of the
    level comes after a row's position and must be hidden. `tokens_read` counts the keys of segments
    that have rows.
    """

    qo_indptr: Int32
    kv_indptr: Int32
    kv_indices: Int32
    kv_last_page_len: Int32
    kv_start: Int32
    causal: bool
    tokens_read: int


@dataclass(frozen=True, slots=True, eq=False)
class PlanBatch:
    """Sequences in plan order: page tables, kv_len [B], and rows as `qo_indptr` [B+1]; int32.

    Rows are the last of their sequence.
    """

    page_size: int
    tables: Sequence[PageTable]
    kv_lens: Int32
    qo_indptr: Int32

    @property
    def size(self) -> int:
        return self.kv_lens.size


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Sequences `first[i]:last[i]` see their tokens `begin[i] * page_size : end[i]`.

    All int32. Runs are disjoint, in any order, and need not cover the batch; `begin` counts pages,
    `end` tokens.
    """

    first: Int32
    last: Int32
    begin: Int32
    end: Int32


def cut_level(batch: PlanBatch, runs: Runs, causal: bool) -> CascadeLevel:
    """The level of `runs`; other sequences get a segment without pages."""
    mark = np.zeros(batch.size + 1, dtype=bool)
    mark[0] = mark[-1] = mark[runs.first] = mark[runs.last] = True
    bounds = np.flatnonzero(mark)
    segment = (np.cumsum(mark) - 1)[runs.first]
    begin = np.zeros(bounds.size - 1, dtype=np.int32)
    end = np.zeros_like(begin)
    begin[segment], end[segment] = runs.begin, runs.end
    start = begin * np.int32(batch.page_size)
    tokens = end - start
    pages = page_counts(tokens, batch.page_size)
    if (count := int(pages.sum(dtype=np.int64))) > MAX_INDICES:
        rule = f"their page table has {count} entries, at most {MAX_INDICES} can be planned at once"
        raise InvalidRequest("sequences", batch.size, f"{rule}: send fewer sequences")
    # All sequences of a run have the run's pages in their tables: use the first one's.
    tables = [batch.tables[place] for place in bounds[:-1].tolist()]
    qo_indptr = batch.qo_indptr[bounds]
    return CascadeLevel(
        qo_indptr=qo_indptr,
        kv_indptr=indptr(pages),
        kv_indices=gather_pages(tables, begin, pages),
        kv_last_page_len=last_page_lens(tokens, pages, batch.page_size),
        kv_start=start,
        causal=causal and _hides(batch, bounds, end, tokens),
        tokens_read=int(tokens[lens_of(qo_indptr) > 0].sum()),
    )


def _hides(batch: PlanBatch, bounds: Indices, end: Int32, tokens: Int32) -> bool:
    """Whether some row's position is before the last of its segment's `tokens`, which end at
    `end`."""
    qo_lens = lens_of(batch.qo_indptr)
    if qo_lens.size == 0:
        return False
    first = batch.kv_lens - qo_lens
    first[qo_lens == 0] = np.iinfo(np.int32).max
    least = np.minimum.reduceat(first, bounds[:-1])
    return bool((least < end - 1)[tokens > 0].any())
