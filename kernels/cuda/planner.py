"""Plans -> work items: pure numpy, one pass over a batch's segments, no loop over rows or pages.

Tiles first: each level's segments are cut into tiles of packed rows (plan rows x group), each with
the keys that at least one of its rows can see. Then runs: tiles are laid end to end per kernel and
cut where an equal share of the keys ends, so that all workers finish together. Rows that end up
with more than one run, or none, go on merge lists. See work.cuh for the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Int32, Level, Plan

Int = NDArray[np.int64]

ITEM_FIELDS: Final = (
    "layer",
    "row_begin",
    "num_rows",
    "kv_begin",
    "num_keys",
    "kv_start",
    "causal",
    "partial",
)
FINAL: Final = -1
HIDE_FUTURE: Final = 1
HIDE_WINDOW: Final = 2
NARROW_RUN: Final = 128
"""Keys under which another narrow worker is not worth its partial state."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """One kernel as the planner sees it: its tile, and how many tiles the device runs at once.

    `persistent` kernels take whole worker lists; the others take items, dearest first. Runs are
    cut at multiples of `granule` keys and of whole pages. Segments of at most `most_rows` packed
    rows go to the first shape that takes them.
    """

    name: str
    rows: int
    most_rows: int
    workers: int
    granule: int
    persistent: bool
    least_run: int


@dataclass(frozen=True, slots=True)
class Problem:
    """What the planner needs to know besides the plans."""

    group_size: int
    page_size: int
    num_kv_heads: int
    window_left: int
    shapes: tuple[TileShape, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Items of one kernel: int32 [num_items, 8] as in work.cuh; narrow: worker_begin [W + 1]."""

    shape: TileShape
    items: Int32
    worker_begin: Int32

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def num_workers(self) -> int:
        return len(self.worker_begin) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Merges:
    """Chunks of packed rows whose partial states are merged, and the lists of those states.

    `chunks[m]` is merged from partial rows `members[indptr[m]:indptr[m + 1]]` (each the first row
    of a chunk's partial state); an empty list is a chunk that sees nothing.
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
    """Everything a batch needs on the device; row arrays run over all plans, one after another."""

    launches: tuple[Launch, ...]
    merges: Merges
    order: Int32
    positions: Int32
    kv_indices: Int32
    num_rows: int


@dataclass(slots=True)
class _Tiles:
    """Columns of equal length; `shape` indexes `Problem.shapes`."""

    shape: Int
    layer: Int
    row_begin: Int
    num_rows: Int
    kv_begin: Int
    num_keys: Int
    kv_start: Int
    least: Int  # least and greatest position among the tile's rows
    greatest: Int
    causal: Int

    def select(self, index: NDArray[Any]) -> _Tiles:
        return _Tiles(*(getattr(self, name)[index] for name in self.__slots__))

    @staticmethod
    def concatenate(parts: Sequence[_Tiles]) -> _Tiles:
        return _Tiles(
            *(np.concatenate([getattr(p, name) for p in parts]) for name in _Tiles.__slots__)
        )


def chunk_rows(group_size: int, rows: int = 16) -> int:
    """Packed rows that always travel together: the largest divisor of the group within `rows`."""
    return max(d for d in range(1, min(group_size, rows) + 1) if group_size % d == 0)


def make_work(requests: Sequence[tuple[int, Plan]], problem: Problem) -> Work:
    """Work for (layer, plan) requests of one scoring, rows packed one plan after another."""
    chunk = chunk_rows(problem.group_size)
    tiles, orders, positions, indices = [], [], [], []
    row = page = 0
    for layer, plan in requests:
        count = len(plan.positions)
        for level in plan.levels:
            tiles.append(_level_tiles(layer, plan.positions, level, row, page, chunk, problem))
            indices.append(level.kv_indices)
            page += len(level.kv_indices)
        order = np.arange(count, dtype=np.int32) if plan.order is None else plan.order
        orders.append(order + np.int32(row) if row else order)
        positions.append(plan.positions)
        row += count
    runs, workers = _cut(_Tiles.concatenate(tiles), problem) if tiles else (None, [])
    launches, merges = _finish(runs, workers, row * problem.group_size, chunk, problem)
    return Work(
        launches=launches,
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


def _level_tiles(
    layer: int,
    positions: Int32,
    level: Level,
    row: int,
    page: int,
    chunk: int,
    problem: Problem,
) -> _Tiles:
    """Tiles of one level, before runs are cut; `row` and `page` are where the plan's begin."""
    group = problem.group_size
    first_row = level.qo_indptr[:-1].astype(np.int64)
    rows = np.diff(level.qo_indptr).astype(np.int64) * group
    first_page = level.kv_indptr[:-1].astype(np.int64)
    pages = np.diff(level.kv_indptr).astype(np.int64)
    keys = np.where(pages > 0, (pages - 1) * problem.page_size + level.kv_last_page_len, 0)

    # a segment's kernel, by its packed rows; its tiles hold whole chunks
    most = np.array([shape.most_rows for shape in problem.shapes])
    shape = np.minimum(np.searchsorted(most, rows), len(most) - 1)
    capacity = np.array([s.rows // chunk * chunk for s in problem.shapes], dtype=np.int64)[shape]
    count = np.where(keys > 0, -(-rows // capacity), 0)
    segment = np.repeat(np.arange(len(rows)), count)
    index = np.arange(len(segment)) - np.repeat(np.cumsum(count) - count, count)
    begin = index * capacity[segment]
    num = np.minimum(capacity[segment], rows[segment] - begin)
    begin += first_row[segment] * group

    tiles = _Tiles(
        shape=shape[segment],
        layer=np.full(len(segment), layer),
        row_begin=begin,
        num_rows=num,
        kv_begin=first_page[segment] + page,
        num_keys=keys[segment],
        kv_start=level.kv_start[segment].astype(np.int64),
        least=np.zeros(len(segment), np.int64),
        greatest=np.zeros(len(segment), np.int64),
        causal=np.full(len(segment), int(level.causal)),
    )
    if len(segment) and (level.causal or problem.window_left >= 0):
        tiles = _clip(tiles, positions, problem)
    tiles.row_begin += row * group
    return tiles


def _clip(tiles: _Tiles, positions: Int32, problem: Problem) -> _Tiles:
    """Drop the keys that no row of a tile sees: those after its last row, those left of windows."""
    group, page_size, window = problem.group_size, problem.page_size, problem.window_left
    first = tiles.row_begin // group
    stop = (tiles.row_begin + tiles.num_rows - 1) // group + 1
    bounds = np.stack([first, stop], 1).ravel()
    padded = np.append(positions, positions[-1:])  # so that `stop` may be the end
    tiles.least = np.minimum.reduceat(padded, bounds)[::2].astype(np.int64)
    tiles.greatest = np.maximum.reduceat(padded, bounds)[::2].astype(np.int64)
    if tiles.causal[0]:
        tiles.num_keys = np.minimum(tiles.num_keys, tiles.greatest - tiles.kv_start + 1)
    if window >= 0:
        hidden = np.maximum(tiles.least - window - tiles.kv_start, 0) // page_size
        tiles.kv_begin = tiles.kv_begin + hidden
        tiles.kv_start = tiles.kv_start + hidden * page_size
        tiles.num_keys = tiles.num_keys - hidden * page_size
    return tiles.select(tiles.num_keys > 0)


def _cut(tiles: _Tiles, problem: Problem) -> tuple[_Tiles, list[Int]]:
    """Cut tiles into runs of balanced cost, shape by shape; with the workers' bounds of each."""
    parts, workers = [], []
    for index, shape in enumerate(problem.shapes):
        mine = tiles if len(problem.shapes) == 1 else tiles.select(tiles.shape == index)
        runs, bounds = _cut_shape(mine, shape, problem)
        parts.append(runs)
        workers.append(bounds)
    return _Tiles.concatenate(parts), workers


def _cut_shape(tiles: _Tiles, shape: TileShape, problem: Problem) -> tuple[_Tiles, Int]:
    """Lay the tiles end to end in granules and cut where each worker's equal share ends."""
    if len(tiles.num_keys) == 0:
        return tiles, np.zeros(1, np.int64)
    page_size = problem.page_size
    granule = page_size * -(-shape.granule // page_size)
    sizes = -(-tiles.num_keys // granule)
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    workers = max(1, shape.workers // problem.num_kv_heads)
    workers = min(workers, -(-total * granule // shape.least_run), total)
    bounds = np.arange(workers + 1) * total // workers
    if shape.persistent or _worth_cutting(sizes, total, workers):
        starts = np.union1d(ends - sizes, bounds[:-1])
    else:
        starts = ends - sizes
    tile = np.searchsorted(ends, starts, side="right")
    offset = (starts - (ends - sizes)[tile]) * granule
    length = (np.append(starts[1:], total) - starts) * granule
    runs = tiles.select(tile)
    runs.kv_begin = runs.kv_begin + offset // page_size
    runs.kv_start = runs.kv_start + offset
    runs.num_keys = np.minimum(length, runs.num_keys - offset)
    if shape.persistent:
        return runs, np.searchsorted(starts, bounds)
    return runs.select(np.argsort(-runs.num_keys, kind="stable")), np.zeros(1, np.int64)


def _worth_cutting(sizes: Int, total: int, workers: int) -> bool:
    """Whether whole tiles, dearest first, would leave workers idle at the end."""
    return bool(sizes.max() * workers * 8 > total)


def _finish(
    runs: _Tiles | None,
    workers: list[Int],
    num_packed: int,
    chunk: int,
    problem: Problem,
) -> tuple[tuple[Launch, ...], Merges]:
    """Decide which runs are final, number the partial rows, make items and merge lists."""
    num_chunks = num_packed // chunk
    if runs is None:
        return (), _merges(np.zeros((0, 2), np.int64), np.arange(num_chunks), chunk, 0)
    first = runs.row_begin // chunk
    stop = (runs.row_begin + runs.num_rows) // chunk
    seen = np.cumsum(
        np.bincount(first, minlength=num_chunks + 1) - np.bincount(stop, minlength=num_chunks + 1)
    )
    shared = np.concatenate([[0], np.cumsum(seen[:-1] > 1)])
    partial = shared[stop] > shared[first]
    lengths = np.where(partial, runs.num_rows, 0)
    ends = np.cumsum(lengths)
    where = np.where(partial, ends - lengths, FINAL)

    hide = np.where(
        (runs.causal != 0) & (runs.kv_start + runs.num_keys - 1 > runs.least), HIDE_FUTURE, 0
    )
    if problem.window_left >= 0:
        hide |= np.where(runs.kv_start < runs.greatest - problem.window_left, HIDE_WINDOW, 0)
    columns = (
        runs.layer,
        runs.row_begin,
        runs.num_rows,
        runs.kv_begin,
        runs.num_keys,
        runs.kv_start,
        hide,
        where,
    )
    items = np.stack(columns, 1).astype(np.int32)
    launches, at = [], 0
    counts = np.bincount(runs.shape, minlength=len(problem.shapes))
    for shape, count, bounds in zip(problem.shapes, counts, workers, strict=True):
        launches.append(Launch(shape, items[at : at + count], bounds.astype(np.int32)))
        at += count

    # merge lists: one entry per partial run and chunk, gathered by chunk
    width = np.where(partial, stop - first, 0)
    run = np.repeat(np.arange(len(width)), width)
    inside = np.arange(len(run)) - np.repeat(np.cumsum(width) - width, width)
    entries = np.stack([first[run] + inside, where[run] + inside * chunk], 1)
    unseen = np.flatnonzero(seen[:-1] == 0)
    return tuple(launches), _merges(entries, unseen, chunk, int(ends[-1]) if len(ends) else 0)


def _merges(entries: Int, unseen: Int, chunk: int, num_partial_rows: int) -> Merges:
    """Merge lists from (chunk, partial row) entries, and empty ones for the unseen chunks."""
    entries = entries[np.argsort(entries[:, 0], kind="stable")]
    chunks, counts = np.unique(entries[:, 0], return_counts=True)
    chunks = np.concatenate([chunks, unseen])
    indptr = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(np.concatenate([counts, np.zeros(len(unseen), np.int64)]), out=indptr[1:])
    return Merges(
        chunk_rows=chunk,
        chunks=chunks.astype(np.int32),
        indptr=indptr,
        members=entries[:, 1].astype(np.int32),
        num_partial_rows=num_partial_rows,
    )
