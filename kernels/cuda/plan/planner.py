"""Plans -> work items: pure numpy, one pass over a batch's segments, no loop over rows or pages.

Tiles first (tiles.py): each level's segments are cut into tiles of packed rows, each with the keys
that at least one of its rows can see. Then runs (runs.py): tiles are assigned to the workers, whole
or cut, so that all finish together. Rows that end up with more than one run, or none, go on merge
lists. See work.cuh for the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Int32, Level, Plan
from kernels.cuda.common.extremes import greatest, least
from kernels.cuda.plan.runs import Cut, cut
from kernels.cuda.plan.tiles import (
    FIELDS,
    PARTIAL,
    PLAIN_FIELDS,
    ROW,
    ROWS,
    Int,
    PlannerConfig,
    TileShape,
    beside,
    keep_rules,
    level_tiles,
)

LONG: Final = 2048
"""Keys a sequence from which it is worth looking whether others have the same pages."""
CACHE_BYTES: Final = 48 * 2**20
"""What the L2 cache keeps by itself of pages that are read over and over: measured on a H200."""
NOTHING: Final = np.zeros(0, np.int32)
NO_LISTS: Final = np.zeros(1, np.int32)
"""The indptr of no lists."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelWork:
    """Items of one kernel, `PlannerConfig.shapes[index]`: int32 [num_items, 8] as in work.cuh.

    Persistent kernels: worker w, a team of `team` warps, owns items
    `worker_begin[w]:worker_begin[w + 1]`; `heads_first` as in `Cut`.
    """

    index: int
    shape: TileShape
    items: Int32
    worker_begin: Int32
    team: int
    heads_first: bool = False

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def num_workers(self) -> int:
        return len(self.worker_begin) - 1

    @property
    def one_each(self) -> bool:
        """Whether every worker has one item, worker w item w."""
        return self.num_workers == self.num_items  # no worker is without items


@dataclass(frozen=True, slots=True, eq=False)
class MergeLists:
    """Chunks of packed rows whose partial states are merged, and the lists of those states.

    `chunks[m]` is merged from partial rows `members[indptr[m]:indptr[m + 1]]` (each the first row
    of a chunk's partial state); an empty list, which come last, is a chunk that sees nothing.
    """

    chunk_rows: int
    chunks: Int32
    indptr: Int32
    members: Int32
    num_partial_rows: int

    @property
    def longest(self) -> int:
        return greatest(self.indptr[1:] - self.indptr[:-1]) if len(self.chunks) else 0


@dataclass(frozen=True, slots=True, eq=False)
class BatchWork:
    """Everything a batch needs on the device; row arrays run over all plans, one after another.

    `kernels` has those of `PlannerConfig.shapes` that have items.
    """

    kernels: tuple[KernelWork, ...]
    merges: MergeLists
    order: Int32
    positions: Int32
    kv_indices: Int32
    num_rows: int


def make_work(requests: Sequence[tuple[int, Plan]], config: PlannerConfig) -> BatchWork:
    """Work for (layer, plan) requests of one scoring, rows packed one plan after another."""
    plans = [plan for _, plan in requests]
    levels = [level for plan in plans for level in plan.levels]
    num_rows = sum([len(plan.positions) for plan in plans])
    num_packed = num_rows * config.group_size
    ruled = config.window_left >= 0 or any(level.causal for level in levels)
    tiles = _tiles(requests, config, FIELDS if ruled else PLAIN_FIELDS)
    cuts = cut(tiles, config, num_packed, _same_pages(levels, config))
    runs = beside([part.runs for part in cuts])
    merges = _merge_lists(runs, num_packed, config.chunk)
    if ruled:
        keep_rules(runs, config.window_left)
    return BatchWork(
        kernels=_kernels(cuts, np.ascontiguousarray(runs[:, :PLAIN_FIELDS]), config),
        merges=merges,
        order=_order(plans),
        positions=_joined([plan.positions for plan in plans]),
        kv_indices=_joined([level.kv_indices for level in levels]),
        num_rows=num_rows,
    )


def _same_pages(levels: Sequence[Level], config: PlannerConfig) -> bool:
    """Whether a long batch without levels reads pages over and over, and more than caches hold.

    Sequences that share a page share all before it: so as many pages as there are half-way through
    a sequence stand for all.
    """
    if len(levels) != 1:
        return False
    (level,) = levels
    count, pages = len(level.kv_start), len(level.kv_indices)
    if count < 2 or pages * config.page_size < LONG * count:
        return False
    middle = np.minimum(level.kv_indptr[:-1] + pages // (2 * count), level.kv_indptr[1:] - 1)
    others = len(np.unique(level.kv_indices.take(middle)))
    return 2 * others <= count and others * pages // count * config.page_bytes > CACHE_BYTES


def _tiles(
    requests: Sequence[tuple[int, Plan]], config: PlannerConfig, fields: int
) -> list[tuple[int, Int]]:
    """Tiles of every kernel that has some, by its index in `config.shapes`."""
    tiles: list[list[Int]] = [[] for _ in config.shapes]
    chunk = config.chunk
    row = page = 0
    for layer, plan in requests:
        for level in plan.levels:
            places = (row, page, chunk, config, fields)
            for index, made in level_tiles(layer, plan.positions, level, *places):
                tiles[index].append(made)
            page += len(level.kv_indices)
        row += len(plan.positions)
    return [(index, beside(made)) for index, made in enumerate(tiles) if made]


def _kernels(cuts: Sequence[Cut], items: Int32, config: PlannerConfig) -> tuple[KernelWork, ...]:
    """The kernels' work; `items` are the runs of all `cuts`, one after another."""
    kernels, at = [], 0
    for part in cuts:
        stop = at + len(part.runs)
        shape, mine = config.shapes[part.index], items[at:stop]
        how = (part.worker_begin, part.team, part.heads_first)
        kernels.append(KernelWork(part.index, shape, mine, *how))
        at = stop
    return tuple(kernels)


def _order(plans: Sequence[Plan]) -> Int32:
    """Every plan row's row of q and o, rows of a plan counted from the last of the plan before."""
    orders, row = [], 0
    for plan in plans:
        count = len(plan.positions)
        order = np.arange(count, dtype=np.int32) if plan.order is None else plan.order
        orders.append(order + np.int32(row) if row else order)
        row += count
    return _joined(orders)


def _joined(parts: Sequence[Int32]) -> Int32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _once_each(runs: Int, num_packed: int) -> bool:
    """Whether every packed row is in one run: all are final."""
    begins, ends = runs[:, ROW], runs[:, ROW] + runs[:, ROWS]
    if _follow(begins, ends, num_packed):
        return True
    # in another order? As many runs have a row as begin by then less those that end, whichever
    return _follow(np.sort(begins), np.sort(ends), num_packed)


def _follow(begins: Int, ends: Int, num_packed: int) -> bool:
    """Whether each begins where the one before ends, from the first row to the last."""
    if len(begins) == 0:
        return num_packed == 0
    if begins[0] != 0 or ends[-1] != num_packed:
        return False
    return not np.count_nonzero(begins[1:] != ends[:-1])


def _merge_lists(runs: Int, num_packed: int, chunk: int) -> MergeLists:
    """The lists of chunks that are merged; gives runs that are not final their partial rows."""
    num_runs, num_chunks = len(runs), num_packed // chunk
    if num_runs <= num_chunks and _once_each(runs, num_packed):
        return MergeLists(chunk, NOTHING, NO_LISTS, NOTHING, 0)
    first = runs[:, ROW] // chunk
    width = runs[:, ROWS] // chunk if np.count_nonzero(runs[:, ROWS] != chunk) else None
    if (
        width is None
        and num_runs > 1
        and (lists := _lists_in_order(runs, first, num_chunks, chunk)) is not None
    ):
        return lists
    seen, partial = _seen(first, width, num_chunks)
    chunks = _members(runs, partial.nonzero()[0], first, width, chunk)

    # members gathered by chunk, those of one chunk in the order of their runs
    order = chunks.argsort(kind="stable")
    chunks = chunks.take(order)
    fresh = np.empty(len(chunks), np.bool_)
    fresh[:1] = True
    np.not_equal(chunks[1:], chunks[:-1], out=fresh[1:])
    lists = fresh.nonzero()[0]
    merged = chunks.take(lists)
    if np.count_nonzero(seen) < num_chunks:
        merged = np.concatenate([merged, (seen == 0).nonzero()[0]])
    indptr = np.empty(len(merged) + 1, np.int32)
    indptr[: len(lists)] = lists
    indptr[len(lists) :] = len(chunks)
    return MergeLists(
        chunk_rows=chunk,
        chunks=merged.astype(np.int32, copy=False),
        indptr=indptr,
        members=(order * chunk).astype(np.int32),
        num_partial_rows=len(chunks) * chunk,
    )


def _lists_in_order(runs: Int, first: Int, num_chunks: int, chunk: int) -> MergeLists | None:
    """`_merge_lists` of runs of a chunk each that come in the order of their chunks, which all
    have some; None for others."""
    steps = first[1:] - first[:-1]
    if least(steps) < 0:
        return None
    fresh = np.empty(len(first) + 1, np.bool_)  # whether a run is its chunk's first
    fresh[0] = fresh[-1] = True
    np.not_equal(steps, 0, out=fresh[1:-1])
    if np.count_nonzero(fresh) <= num_chunks:
        return None
    partial = np.logical_not(fresh[:-1] & fresh[1:]).nonzero()[0]
    members = np.arange(0, len(partial) * chunk, chunk, dtype=np.int32)
    runs[:, PARTIAL][partial] = members
    lists = fresh.take(partial).nonzero()[0]
    indptr = np.empty(len(lists) + 1, np.int32)
    indptr[:-1] = lists
    indptr[-1] = len(partial)
    chunks = first.take(partial.take(lists)).astype(np.int32, copy=False)
    return MergeLists(chunk, chunks, indptr, members, len(partial) * chunk)


def _members(runs: Int, partial: Int, first: Int, width: Int | None, chunk: int) -> Int:
    """The chunk of every member: those of the first of the `partial` runs, of the second, ...

    Member i is the state of partial rows `i * chunk` and on. Writes each run's first into `runs`.
    """
    chunks = first.take(partial)
    if width is None:
        runs[:, PARTIAL][partial] = np.arange(0, len(partial) * chunk, chunk, dtype=np.int32)
        return chunks
    width = width.take(partial)
    begins = np.add.accumulate(width) - width
    runs[:, PARTIAL][partial] = (begins * chunk).astype(np.int32)
    chunks = (chunks - begins).repeat(width)
    chunks += np.arange(len(chunks))
    return chunks


def _seen(first: Int, width: Int | None, num_chunks: int) -> tuple[Int, NDArray[np.bool_]]:
    """How many runs each chunk is in, and which runs have a chunk that others have too.

    `width` is None where each run is one chunk.
    """
    if width is None:
        seen = np.bincount(first, minlength=num_chunks)
        return seen, (seen > 1).take(first)
    past = first + width
    change = np.bincount(first, minlength=num_chunks + 1)
    change -= np.bincount(past, minlength=num_chunks + 1)
    seen = np.add.accumulate(change)[:-1]
    shared = np.zeros(num_chunks + 1, np.intp)
    np.add.accumulate(seen > 1, out=shared[1:])
    return seen, shared.take(past) > shared.take(first)
