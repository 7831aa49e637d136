"""Levels of layer groups beside the leading one: the same tokens, on the group's own pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.core.errors import InvalidRequest, WindowReturned
from service.core.plans.levels import MAX_INDICES, CascadeLevel, PlanBatch, Runs
from service.core.plans.ragged import CsrTable, indptr, lens_of
from service.core.pool.satellites import Satellites, Window


def visible_runs(batch: PlanBatch, window: Window, split_keys: int) -> Runs:
    """One run per sequence, from the page of the first key that its rows see, or from the split
    that has it."""
    rows = lens_of(batch.qo_indptr)
    begin = np.maximum(batch.kv_lens - rows - window.tokens + 1, 0) // batch.page_size
    begin -= begin % max(split_keys // batch.page_size, 1)
    places = np.arange(batch.size, dtype=np.int32)
    return Runs(places, places + 1, begin.astype(np.int32), batch.kv_lens)


def group_level(satellites: Satellites, group: int, level: CascadeLevel) -> CascadeLevel:
    """A level of leading pages on the pages of another group."""
    table = group_table(
        satellites, group, CsrTable(level.kv_indptr, level.kv_indices, level.kv_last_page_len)
    )
    return replace(
        level,
        kv_indptr=table.kv_indptr,
        kv_indices=table.kv_indices,
        kv_last_page_len=table.kv_last_page_len,
    )


def group_table(satellites: Satellites, group: int, table: CsrTable) -> CsrTable:
    """Tables of leading pages as those of another group; -1 for pages that were returned.

    Raises `InvalidRequest` for tables with too many entries.
    """
    if group == satellites.leading:
        return table
    columns, size = satellites.columns[group], np.int32(satellites.shapes[group].page_size)
    width = columns.stop - columns.start
    if (count := table.kv_indices.size * width) > MAX_INDICES:
        rule = f"their page table has {count} entries, at most {MAX_INDICES} can be planned at once"
        raise InvalidRequest("sequences", table.kv_indptr.size - 1, f"{rule}: send fewer sequences")
    held = satellites.of[table.kv_indices, columns]
    if width == 1:
        return CsrTable(table.kv_indptr, held.ravel(), table.kv_last_page_len)
    lasts = (table.kv_last_page_len + (size - 1)) // size  # pages of each last bundle
    has_tokens = np.ones(held.shape, bool)
    ends = table.kv_indptr[1:][lasts > 0] - 1
    has_tokens[ends] = np.arange(width) < lasts[lasts > 0, np.newaxis]
    pages = lens_of(table.kv_indptr)
    counts = (np.maximum(pages - 1, 0) * np.int32(width) + lasts).astype(np.int32)
    last_lens = table.kv_last_page_len - np.maximum(lasts - 1, 0) * size
    return CsrTable(indptr(counts), held[has_tokens], last_lens.astype(np.int32))


def windowed_level(
    satellites: Satellites, window: Window, level: CascadeLevel, ids: list[str], batch: PlanBatch
) -> CascadeLevel:
    """The flat level of a group with a window.

    Pages before the first visible one, which a split can begin with, may have been returned: the
    window hides all of their rows, so the next page stands in for them. Raises `WindowReturned` for
    a page that rows see.
    """
    found = group_level(satellites, window.group, level)
    missing = np.flatnonzero(found.kv_indices < 0)
    if not missing.size:
        return found
    pages, size = found.kv_indices.copy(), satellites.shapes[window.group].page_size
    for place in set((np.searchsorted(found.kv_indptr, missing, "right") - 1).tolist()):
        begin, stop = found.kv_indptr[place : place + 2].tolist()
        last = int(np.flatnonzero(pages[begin:stop] < 0)[-1])
        rows = int(batch.qo_indptr[place + 1] - batch.qo_indptr[place])
        first = max(0, int(batch.kv_lens[place]) - rows - window.tokens + 1)  # that a row sees
        kept = int(level.kv_start[place]) + (last + 1) * size
        if kept > first:
            raise WindowReturned(ids[place], window.group, window.tokens, first, kept)
        gaps = pages[begin:stop]
        gaps[gaps < 0] = gaps[last + 1]
    return replace(found, kv_indices=pages)
