"""Cutting long work: what an operation will cost, and pieces of it that each take about a slice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Attend, Level, Mask, Plan, RaggedAttend
from service.engine.loop.job import Cost

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

CORRECTION: Final = 0.3
"""Share of the latest measurement in a rate, on a logarithmic scale."""
SHORT_SHARE: Final = 0.01
SHORT_S: Final = 5e-5
"""Work first thought to take less (or a smaller share of a slice) tells what calls and launches
take, whatever the work."""
TELLING_SHARE: Final = 0.1
"""Work first thought to take so much of a slice tells the device's rates, and so does all that took
a whole one. What lies between is some of both, and tells no more than what work takes at most."""
FIRST_TRY: Final = 8
"""The first slice of a kind that was never measured is so many times shorter."""
FAR_TOO_LONG: Final = 2.0
"""A slice that took so many times too long is believed at once: others wait for each like it."""
MOST_CORRECTION: Final = 4.0
FURTHEST: Final = 1e6
"""How many times a rate may be off: work that is told to take no time leaves it a number."""


class Pace:
    """How long work takes on one device: bytes and flops at rates that measurements correct."""

    def __init__(self, bytes_per_s: float, flops_per_s: float, slice_s: float) -> None:
        self.slice_s = slice_s
        self._bytes_per_s = bytes_per_s
        self._flops_per_s = flops_per_s
        self._short_s = max(SHORT_SHARE * slice_s, SHORT_S)
        self._factors: dict[str, float] = {}
        self._overheads: dict[str, float] = {}

    def seconds(self, kind: str, cost: Cost) -> float:
        """Estimated seconds for work of one kind ("attend", "append", ...)."""
        guess = cost.num_bytes / self._bytes_per_s + cost.flops / self._flops_per_s
        return guess * self._factors.get(kind, 1.0)

    def is_long(self, kind: str, cost: Cost) -> bool:
        """Whether it is more than one slice."""
        return self.seconds(kind, cost) > self.slice_s

    def is_short(self, cost: Cost) -> bool:
        """Whether it was first thought to take so little that calls and launches decide."""
        return self._guess(cost) < self._short_s

    def knows(self, kind: str) -> bool:
        """Whether work of that kind was measured."""
        return kind in self._factors or kind in self._overheads

    def num_slices(self, kind: str, cost: Cost, fixed: Cost | None = None) -> int:
        """Into how many pieces to cut work of which every piece pays `fixed` again.

        At least half of a piece is work of its own, whatever that makes of its length.
        """
        again = 0.0 if fixed is None else self.seconds(kind, fixed)
        own = max(self.seconds(kind, cost) - again, 0.0)
        return max(1, math.ceil(own / max(self.slice_s - again, self.slice_s / 2, again)))

    def correct(self, kind: str, cost: Cost, measured_s: float) -> None:
        """Work of a known cost took `measured_s`."""
        overhead, guess = self._overheads.get(kind), self._guess(cost)
        is_short, believed = self.is_short(cost), self.seconds(kind, cost)
        if is_short:
            before = measured_s if overhead is None else overhead
            self._overheads[kind] = before + CORRECTION * (measured_s - before)
        is_long = guess >= TELLING_SHARE * self.slice_s or measured_s >= self.slice_s
        if is_long and not is_short:
            ratio = (measured_s - (overhead or 0.0)) / believed
        elif measured_s < believed:  # too much, whatever of it was the call's own
            ratio = measured_s / believed
        else:
            return
        ratio = min(max(ratio, 1 / MOST_CORRECTION), MOST_CORRECTION)
        share = 1.0 if measured_s > FAR_TOO_LONG * self.slice_s else CORRECTION
        factor = self._factors.get(kind, 1.0) * ratio**share
        self._factors[kind] = min(max(factor, 1 / FURTHEST), FURTHEST)

    def _guess(self, cost: Cost) -> float:
        """Seconds by the first guess."""
        return cost.num_bytes / self._bytes_per_s + cost.flops / self._flops_per_s


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows `first:last`, and what they cost."""

    first: int
    last: int
    cost: Cost


def even_spans(num_rows: int, cost: Cost, num_spans: int) -> list[RowSpan]:
    """Rows that all cost the same, in up to `num_spans` runs."""
    num_spans = max(1, min(num_spans, num_rows))
    bounds = np.linspace(0, num_rows, num_spans + 1).astype(np.int64).tolist()
    share = Cost(cost.num_bytes / num_spans, cost.flops / num_spans)
    return [RowSpan(a, b, share) for a, b in pairwise(bounds)]


def paced_spans(
    pace: Pace, kind: str, rows: int | Int64, cost: Cost, fixed: Cost | None = None
) -> Iterator[RowSpan]:
    """Runs of rows of about a slice each, by what the pace has learned from those before.

    `rows` are as many that all cost the same, or the weights of unequal ones; every run pays
    `fixed` again.
    """
    total = None if isinstance(rows, int) else np.cumsum(rows)
    size = rows if isinstance(rows, int) else rows.size
    whole = size if total is None else int(total[-1]) if size else 0
    if whole == 0:
        yield from even_spans(size, cost, 1)
        return
    first, done = 0, 0
    while first < size:
        left = (whole - done) / whole
        number = pace.num_slices(kind, Cost(cost.num_bytes * left, cost.flops * left), fixed)
        if not pace.knows(kind):
            number *= FIRST_TRY
        target, last = done + (whole - done) / number, size
        if number > 1:
            last = int(target) if total is None else int(np.searchsorted(total, target)) + 1
            last = min(max(last, first + 1), size)
        end = last if total is None else int(total[last - 1])
        share = (end - done) / whole
        yield RowSpan(first, last, Cost(cost.num_bytes * share, cost.flops * share))
        first, done = last, end


# Attention over pages.


def row_keys(plan: Plan, page_size: int, window_left: int) -> Int64:
    """At most how many keys each plan row sees, int64 [n], masks left out."""
    keys = np.zeros(plan.positions.size, np.int64)
    for level in plan.levels:
        rows = np.diff(level.qo_indptr)
        seen = np.repeat(segment_keys(level, page_size), rows)
        within = slice(int(level.qo_indptr[0]), int(level.qo_indptr[-1]))
        if level.causal:
            start = np.repeat(level.kv_start.astype(np.int64), rows)
            seen = np.minimum(np.maximum(plan.positions[within] + 1 - start, 0), seen)
        keys[within] += seen
    return in_window(keys, plan.positions, window_left)


def in_window(keys: Int64, positions: Int32, window_left: int) -> Int64:
    """What is left of `keys` that rows at `positions` see, without those before the window."""
    if window_left < 0:
        return keys
    hidden = np.maximum(positions.astype(np.int64) - window_left, 0)
    seen: Int64 = np.maximum(keys - hidden, 0)
    return seen


def segment_keys(level: Level, page_size: int) -> Int64:
    """Keys of each of a level's segments, int64 [S]."""
    pages: Int64 = np.diff(level.kv_indptr).astype(np.int64)
    full: Int64 = np.maximum(pages - 1, 0)
    keys: Int64 = full * np.int64(page_size) + level.kv_last_page_len
    return keys


def cut_plan(plan: Plan, first: int, last: int) -> Plan:
    """The plan of plan rows `first:last` alone, in plan order."""
    levels = tuple(cut_level(level, first, last) for level in plan.levels)
    return Plan(levels, plan.positions[first:last])


def cut_level(level: Level, first: int, last: int) -> Level:
    """A level's segments that rows `first:last` are in, with only those rows."""
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
    """Plan rows `span` of an attention, and which of the request's rows they are.

    Rows that lie together go straight to the answer; others come back in memory of their own.
    """
    first, last = span.first, span.last
    plan = cut_plan(attend.plan, first, last)
    order = attend.plan.order
    rows: Any = slice(first, last) if order is None else order[first:last]
    out = attend.out
    if out is not None:
        out = None if order is not None else replace(out, o=out.o[rows], lse=out.lse[rows])
    mask = cut_mask(attend.mask, first, last)
    return replace(attend, q=attend.q[rows], plan=plan, mask=mask, out=out), rows


# Attention over the request's own keys.


def ragged_keys(request: RaggedAttend) -> Int64:
    """At most how many keys each row sees, int64 [n]."""
    keys = np.repeat(np.diff(request.kv_indptr), np.diff(request.qo_indptr)).astype(np.int64)
    if request.causal:
        keys = np.minimum(np.maximum(request.row_positions + 1, 0), keys)
    return in_window(keys, request.row_positions, request.scoring.window_left)


def cut_ragged(request: RaggedAttend, positions: Int32, span: RowSpan) -> RaggedAttend:
    """Rows `span` of a ragged request, with the keys of the requests they belong to."""
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
