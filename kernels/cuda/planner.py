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
    """Whether the runs' rows follow each other from the first row to the last: all are final."""
    if runs.shape[1] == 0:
        return num_packed == 0
    first, stop = runs[ROW], runs[ROW] + runs[ROWS]
    if first[0] != 0 or stop[-1] != num_packed:
        return False
    return not np.count_nonzero(first[1:] != stop[:-1])


def _merge_lists(runs: Int, num_packed: int, chunk: int) -> tuple[Int | None, Merges]:
    """First partial row of each run, or FINAL, and the lists of chunks that are merged.

    None where every run is final.
    """
    if _once_each(runs, num_packed):
        return None, Merges(chunk, NOTHING, NO_LISTS, NOTHING, 0)
    first = runs[ROW] // chunk
    past = (runs[ROW] + runs[ROWS]) // chunk
    num_chunks = num_packed // chunk
    change = np.bincount(first, minlength=num_chunks + 1)
    change -= np.bincount(past, minlength=num_chunks + 1)
    seen = np.cumsum(change)[:-1]
    shared = np.concatenate([[0], np.cumsum(seen > 1)])
    partial = shared[past] > shared[first]
    lengths = np.where(partial, runs[ROWS], 0)
    ends = np.cumsum(lengths)
    where = np.where(partial, ends - lengths, FINAL)

    # one entry per partial run and chunk, gathered by chunk
    run = np.flatnonzero(partial)
    width = (past - first)[run]
    which = np.repeat(run, width)
    inside = np.arange(len(which)) - np.repeat(np.cumsum(width) - width, width)
    chunks = first[which] + inside
    members = where[which] + inside * chunk
    order = np.argsort(chunks, kind="stable")
    chunks = chunks[order]
    fresh = np.flatnonzero(np.append(True, chunks[1:] != chunks[:-1])) if len(chunks) else order
    unseen = np.flatnonzero(seen == 0)
    indptr = np.full(len(fresh) + len(unseen) + 1, len(chunks), np.int32)
    indptr[: len(fresh)] = fresh
    merges = Merges(
        chunk_rows=chunk,
        chunks=np.concatenate([chunks[fresh], unseen]).astype(np.int32),
        indptr=indptr,
        members=members[order].astype(np.int32),
        num_partial_rows=int(ends[-1]) if len(ends) else 0,
    )
    return where, merges
