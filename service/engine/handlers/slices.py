"""Long work cut into slices: runs of rows of about a slice each, and the requests for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Attend, Level, Mask, Plan, RaggedAttend
from service.engine.work.pace import FAR_TOO_LONG, DevicePace
from service.engine.work.work import Cost

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
LEAST_PART: Final = 1 / 8
"""Least part of its first slice that work is cut into for taking too long: a part of the time may
be paid by every slice again."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows `first:last` and their cost."""

    first: int
    last: int
    cost: Cost


def even_spans(num_rows: int, cost: Cost, num_spans: int) -> list[RowSpan]:
    """Rows of equal cost, in up to `num_spans` runs."""
    num_spans = max(1, min(num_spans, num_rows))
    bounds = np.linspace(0, num_rows, num_spans + 1).astype(np.int64).tolist()
    share = Cost(cost.num_bytes / num_spans, cost.flops / num_spans)
    return [RowSpan(a, b, share) for a, b in pairwise(bounds)]


def paced_spans(
    pace: DevicePace, kind: str, rows: int | Int64, cost: Cost, fixed: Cost | None = None
) -> Iterator[RowSpan]:
    """Runs of rows of about a slice each; the same for the same call while the pace is steady.

    `rows` is a number of rows of equal cost, or the weights of unequal ones; every run pays `fixed`
    again. After a run that took far too long the next is half as long, until one takes less than a
    slice: estimates learn from all work of the kind, and the host can be slow just now.
    """
    total = None if isinstance(rows, int) else np.cumsum(rows)
    size = rows if isinstance(rows, int) else rows.size
    whole = size if total is None else int(total[-1]) if size else 0
    if whole == 0:
        yield from even_spans(size, cost, 1)
        return
    again = 0.0 if fixed is None else fixed.num_bytes
    own = max(cost.num_bytes - again, 0.0)
    first, done, least, most = 0, 0, 0.0, math.inf
    while first < size:
        left = (whole - done) / whole
        number = pace.num_slices(kind, Cost(own * left + again, cost.flops * left), fixed)
        target, last = done + min((whole - done) / number, most), size
        if target < whole:
            last = int(target) if total is None else int(np.searchsorted(total, target)) + 1
            last = min(max(last, first + 1), size)
        end = last if total is None else int(total[last - 1])
        share = (end - done) / whole
        pace.latest[kind] = 0.0
        yield RowSpan(first, last, Cost(own * share + again, cost.flops * share))
        if first == 0:
            least = LEAST_PART * (end - done)
        if (spent := pace.latest[kind]) > FAR_TOO_LONG * pace.slice_s:
            most = max((end - done) / 2, least)
        elif spent < pace.slice_s:
            most *= 2
        first, done = last, end


# Attention over pages.


def row_keys(plan: Plan, page_size: int, window_left: int) -> Int64:
    """Maximum number of keys that each plan row sees, int64 [n], without masks."""
    keys = np.zeros(plan.positions.size, np.int64)
    for level in plan.levels:
        rows = np.diff(level.qo_indptr)
        full = np.maximum(np.diff(level.kv_indptr).astype(np.int64) - 1, 0)
        seen = np.repeat(full * np.int64(page_size) + level.kv_last_page_len, rows)
        within = slice(int(level.qo_indptr[0]), int(level.qo_indptr[-1]))
        if level.causal:
            start = np.repeat(level.kv_start.astype(np.int64), rows)
            seen = np.minimum(np.maximum(plan.positions[within] + 1 - start, 0), seen)
        keys[within] += seen
    first = np.repeat(plan.levels[0].kv_start, np.diff(plan.levels[0].qo_indptr))
    return in_window(keys, plan.positions - first, window_left)


def shared_keys(plan: Plan, page_size: int) -> int:
    """Maximum number of keys that two rows of a plan have in common, and that each of two slices
    may have to read."""
    count = 0
    for level in plan.levels:
        pages = np.diff(level.kv_indptr).astype(np.int64)[np.diff(level.qo_indptr) > 1]
        count += int(pages.max(initial=0)) * page_size
    return count


def in_window(keys: Int64, positions: Int32, window_left: int) -> Int64:
    """Number of `keys` that rows see, without keys before the window; `positions` count from the
    first key."""
    if window_left < 0:
        return keys
    hidden = np.maximum(positions.astype(np.int64) - window_left, 0)
    seen: Int64 = np.maximum(keys - hidden, 0)
    return seen


def cut_level(level: Level, first: int, last: int) -> Level:
    """The segments of a level that contain rows `first:last`, with only these rows."""
    begin = max(int(np.searchsorted(level.qo_indptr, first, "right")) - 1, 0)
    end = max(int(np.searchsorted(level.qo_indptr, last, "left")), begin + 1)
    segments = slice(begin, end)
    qo_indptr = np.clip(level.qo_indptr[begin : end + 1], first, last) - np.int32(first)
    kv_indptr = level.kv_indptr[begin : end + 1]
    return Level(
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr - kv_indptr[0],
        kv_indices=level.kv_indices[kv_indptr[0] : kv_indptr[-1]],
        kv_last_page_len=level.kv_last_page_len[segments],
        kv_start=level.kv_start[segments],
        causal=level.causal,
    )


def cut_mask(mask: Mask | None, first: int, last: int) -> Mask | None:
    return None if mask is None else Mask(mask.bits, mask.row_offsets[first:last])


def cut_attend(attend: Attend, span: RowSpan) -> tuple[Attend, Any]:
    """Plan rows `span` of an attention, and the indices of these rows in the request.

    Results of adjacent rows go straight to the answer; others are copied there afterwards.
    """
    first, last = span.first, span.last
    levels = tuple(cut_level(level, first, last) for level in attend.plan.levels)
    plan = Plan(levels, attend.plan.positions[first:last])
    order = attend.plan.order
    rows: Any = slice(first, last) if order is None else order[first:last]
    out = attend.out
    if out is not None:
        out = None if order is not None else replace(out, o=out.o[rows], lse=out.lse[rows])
    mask = cut_mask(attend.mask, first, last)
    return replace(attend, q=attend.q[rows], plan=plan, mask=mask, out=out), rows


# Attention over the request's own keys.


def ragged_keys(request: RaggedAttend) -> Int64:
    """Maximum number of keys that each row sees, int64 [n]."""
    keys = np.repeat(np.diff(request.kv_indptr), np.diff(request.qo_indptr)).astype(np.int64)
    if request.causal:
        keys = np.minimum(np.maximum(request.row_positions + 1, 0), keys)
    return in_window(keys, request.row_positions, request.scoring.window_left)


def cut_ragged(request: RaggedAttend, positions: Int32, span: RowSpan) -> RaggedAttend:
    """Rows `span` of a ragged request, with the keys of their requests."""
    first, last = span.first, span.last
    begin = max(int(np.searchsorted(request.qo_indptr, first, "right")) - 1, 0)
    end = max(int(np.searchsorted(request.qo_indptr, last, "left")), begin + 1)
    kv_indptr = request.kv_indptr[begin : end + 1]
    keys = slice(int(kv_indptr[0]), int(kv_indptr[-1]))
    rows = slice(first, last)
    out = request.out
    return replace(
        request,
        q=request.q[rows],
        k=request.k[keys],
        v=request.v[keys],
        qo_indptr=np.clip(request.qo_indptr[begin : end + 1], first, last) - np.int32(first),
        kv_indptr=kv_indptr - kv_indptr[0],
        positions=positions[rows],
        mask=cut_mask(request.mask, first, last),
        out=None if out is None else replace(out, o=out.o[rows], lse=out.lse[rows]),
    )
