"""Plans -> work items: pure numpy, one pass over a batch's segments, no loop over rows or pages.

Tiles first (tiles.py): each level's segments are cut into tiles of packed rows, each with the keys
that at least one of its rows can see. Then runs (runs.py): tiles are dealt to the workers, whole or
cut, so that all finish together. Rows that end up with more than one run, or none, go on merge
lists. See work.cuh for the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kernels.backend import Int32, Plan
from kernels.cuda.runs import cut
from kernels.cuda.tiles import (
    CAUSAL,
    FINAL,
    ITEM_FIELDS,
    PARTIAL,
    ROW,
    ROWS,
    Int,
    Problem,
    TileShape,
    beside,
    hidden_rules,
    level_tiles,
    spread,
)

NOTHING: Final = np.zeros(0, np.int32)
NO_LISTS: Final = np.zeros(1, np.int32)
"""The indptr of no lists."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Items of one kernel, `Problem.shapes[index]`: int32 [num_items, 8] as in work.cuh.

    Persistent kernels: worker w, a team of `team` warps, owns items
    `worker_begin[w]:worker_begin[w + 1]`.
    """

    index: int
    shape: TileShape
    items: Int32
    worker_begin: Int32
    team: int

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
class Merges:
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
        return int(np.diff(self.indptr).max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Everything a batch needs on the device; row arrays run over all plans, one after another.

    `launches` has those of `Problem.shapes` that have items.
    """

    launches: tuple[Launch, ...]
    merges: Merges
    order: Int32
    positions: Int32
    kv_indices: Int32
    num_rows: int


def make_work(requests: Sequence[tuple[int, Plan]], problem: Problem) -> Work:
    """Work for (layer, plan) requests of one scoring, rows packed one plan after another."""
    chunk = problem.chunk
    tiles, orders, positions, indices = [], [], [], []
    row = page = 0
    ruled = problem.window_left >= 0
    for layer, plan in requests:
        count = len(plan.positions)
        for level in plan.levels:
            tiles.append(level_tiles(layer, plan.positions, level, row, page, chunk, problem))
            indices.append(level.kv_indices)
            page += len(level.kv_indices)
            ruled |= level.causal
        order = np.arange(count, dtype=np.int32) if plan.order is None else plan.order
        orders.append(order + np.int32(row) if row else order)
        positions.append(plan.positions)
        row += count
    cuts = cut(beside(tiles), problem)
    runs = beside([part.runs for part in cuts])
    where, merges = _merge_lists(runs, row * problem.group_size, chunk)
    items = np.ascontiguousarray(runs[: len(ITEM_FIELDS)].T)
    if where is not None:
        items[:, PARTIAL] = where
    if ruled:
        items[:, CAUSAL] = hidden_rules(runs, problem.window_left)
    launches, at = [], 0
    for part in cuts:
        stop = at + part.runs.shape[1]
        shape, mine = problem.shapes[part.index], items[at:stop]
        launches.append(Launch(part.index, shape, mine, part.worker_begin, part.team))
        at = stop
    return Work(
        launches=tuple(launches),
        merges=merges,
        order=_joined(orders),
        positions=_joined(positions),
        kv_indices=_joined(indices),
        num_rows=row,
    )


def _joined(parts: Sequence[Int32]) -> Int32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _once_each(runs: Int, num_packed: int) -> bool:
    """Whether every packed row is in one run: all are final."""
    if int(np.add.reduce(runs[ROWS])) != num_packed:
        return False
    begins, ends = runs[ROW], runs[ROW] + runs[ROWS]
    if not np.count_nonzero(begins[1:] != ends[:-1]):
        return True
    # Each begin but 0 is also an end just where every row is in as many runs, here in one.
    begins, ends = np.sort(begins), np.sort(ends)
    return begins[0] == 0 and not np.count_nonzero(begins[1:] != ends[:-1])


def _merge_lists(runs: Int, num_packed: int, chunk: int) -> tuple[Int | None, Merges]:
    """First partial row of each run, or FINAL, and the lists of chunks that are merged.

    None where every run is final.
    """
    if _once_each(runs, num_packed):
        return None, Merges(chunk, NOTHING, NO_LISTS, NOTHING, 0)
    first, width = runs[ROW] // chunk, runs[ROWS] // chunk
    one_each = int(np.add.reduce(width)) == len(width)
    find = _seen_once_each if one_each else _seen
    seen, partial = find(first, width, num_packed // chunk)
    lengths = partial * runs[ROWS]
    ends = np.add.accumulate(lengths)
    where = np.where(partial, ends - lengths, FINAL)

    # one entry per partial run and chunk, gathered by chunk
    run = partial.nonzero()[0]
    chunks, members = first.take(run), where.take(run)
    if not one_each:
        copy, inside = spread(width.take(run))
        chunks, members = chunks.take(copy) + inside, members.take(copy) + inside * chunk
    order = chunks.argsort(kind="stable")
    chunks = chunks.take(order)
    fresh = np.ones(len(chunks), np.bool_)
    np.not_equal(chunks[1:], chunks[:-1], out=fresh[1:])
    lists = fresh.nonzero()[0]
    unseen = (seen == 0).nonzero()[0]
    indptr = np.empty(len(lists) + len(unseen) + 1, np.int32)
    indptr[: len(lists)] = lists
    indptr[len(lists) :] = len(chunks)
    merges = Merges(
        chunk_rows=chunk,
        chunks=np.concatenate([chunks.take(lists), unseen], dtype=np.int32),
        indptr=indptr,
        members=members.take(order).astype(np.int32),
        num_partial_rows=int(ends[-1]) if len(ends) else 0,
    )
    return where, merges


def _seen_once_each(first: Int, width: Int, num_chunks: int) -> tuple[Int, Int]:
    """`_seen` for runs of one chunk each."""
    seen = np.bincount(first, minlength=num_chunks)
    return seen, (seen > 1).take(first)


def _seen(first: Int, width: Int, num_chunks: int) -> tuple[Int, Int]:
    """How many runs each chunk is in, and which runs have a chunk that others have too."""
    past = first + width
    change = np.bincount(first, minlength=num_chunks + 1)
    change -= np.bincount(past, minlength=num_chunks + 1)
    seen = np.add.accumulate(change)[:-1]
    shared = np.zeros(num_chunks + 1, np.intp)
    np.add.accumulate(seen > 1, out=shared[1:])
    return seen, shared.take(past) > shared.take(first)
