"""Plans -> work items: pure numpy, one pass over a batch's segments, no loop over rows or pages.

Tiles first: each level's segments are cut into tiles of packed rows (plan rows x group), each with
the keys that at least one of its rows can see. Then runs: tiles are laid end to end per kernel and
cut where an equal share of the keys ends, so that all workers finish together. Rows that end up
with more than one run, or none, go on merge lists. See work.cuh for the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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
KV_BEGIN: Final = ITEM_FIELDS.index("kv_begin")
FINAL: Final = -1
HIDE_FUTURE: Final = 1
HIDE_WINDOW: Final = 2
NARROW_RUN: Final = 128
"""Keys under which another narrow worker is not worth its partial state."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """One kernel as the planner sees it: its tile, and how many tiles the device runs at once.

    `persistent` kernels take a worker's list of items; the others take items, dearest first, and
    where these must be cut they make `waves` turns of all workers. Runs are cut at multiples of
    `granule` keys and of whole pages. Segments of at most `most_rows` packed rows go to the first
    shape that takes them. `key_cost` is what one key of one tile costs of the whole device's time.
    """

    name: str
    rows: int
    most_rows: int
    workers: int
    granule: int
    persistent: bool
    least_run: int
    waves: int = 2
    key_cost: float = 1.0


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
    """Items of one kernel: int32 [num_items, 8] as in work.cuh.

    Persistent kernels: worker w owns items `worker_begin[w]:worker_begin[w + 1]`.
    """

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


# Tiles, and the runs they are cut into, are int64 matrices of one column each and these rows.
_SHAPE: Final = 0  # index into Problem.shapes
_LAYER: Final = 1
_ROW: Final = 2
_ROWS: Final = 3
_PAGE: Final = 4
_KEYS: Final = 5
_START: Final = 6
_CAUSAL: Final = 7
_LEAST: Final = 8  # least and greatest position among the tile's rows
_GREATEST: Final = 9
_FIELDS: Final = 10


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
    cuts = _cut(_beside(tiles), problem)
    launches, merges = _finish(cuts, row * problem.group_size, chunk, problem)
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


def _beside(parts: Sequence[Int]) -> Int:
    """Matrices of tiles one after another."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, axis=1) if parts else np.zeros((_FIELDS, 0), np.int64)


def _level_tiles(
    layer: int,
    positions: Int32,
    level: Level,
    row: int,
    page: int,
    chunk: int,
    problem: Problem,
) -> Int:
    """Tiles of one level, before runs are cut; `row` and `page` are where the plan's begin."""
    group, shapes = problem.group_size, problem.shapes
    bounds = level.qo_indptr.astype(np.int64) * group
    rows = bounds[1:] - bounds[:-1]
    pages = level.kv_indptr[1:] - level.kv_indptr[:-1]
    keys = (pages - 1) * problem.page_size + level.kv_last_page_len
    keys = np.where(pages > 0, keys, 0)

    # a segment's kernel, by its packed rows; its tiles hold whole chunks
    shape = np.zeros(len(rows), np.int64)
    for smaller in shapes[:-1]:
        shape += rows > smaller.most_rows
    capacity = np.array([s.rows // chunk * chunk for s in shapes], dtype=np.int64)[shape]
    count = np.where(keys > 0, -(-rows // capacity), 0)
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    segment = np.repeat(np.arange(len(rows)), count)
    within = (np.arange(total) - (ends - count)[segment]) * capacity[segment]

    tiles = np.empty((_FIELDS, total), np.int64)
    tiles[_SHAPE] = shape[segment]
    tiles[_LAYER] = layer
    tiles[_ROW] = bounds[:-1][segment] + within
    tiles[_ROWS] = np.minimum(capacity[segment], rows[segment] - within)
    tiles[_PAGE] = level.kv_indptr[:-1][segment] + page
    tiles[_KEYS] = keys[segment]
    tiles[_START] = level.kv_start[segment]
    tiles[_CAUSAL] = int(level.causal)
    tiles[_LEAST:] = 0
    if total and (level.causal or problem.window_left >= 0):
        tiles = _clip(tiles, positions, problem)
    tiles[_ROW] += row * group
    return tiles


def _clip(tiles: Int, positions: Int32, problem: Problem) -> Int:
    """Drop the keys that no row of a tile sees: those after its last row, those left of windows."""
    group, page_size, window = problem.group_size, problem.page_size, problem.window_left
    first = tiles[_ROW] // group
    stop = (tiles[_ROW] + tiles[_ROWS] - 1) // group + 1
    bounds = np.stack([first, stop], 1).ravel()
    padded = np.append(positions, positions[-1:])  # so that `stop` may be the end
    tiles[_LEAST] = np.minimum.reduceat(padded, bounds)[::2]
    tiles[_GREATEST] = np.maximum.reduceat(padded, bounds)[::2]
    if tiles[_CAUSAL, 0]:
        tiles[_KEYS] = np.minimum(tiles[_KEYS], tiles[_GREATEST] - tiles[_START] + 1)
    if window >= 0:
        hidden = np.maximum(tiles[_LEAST] - window - tiles[_START], 0) // page_size
        tiles[_PAGE] += hidden
        tiles[_START] += hidden * page_size
        tiles[_KEYS] -= hidden * page_size
    seen = tiles[_KEYS] > 0
    return tiles if seen.all() else tiles[:, seen]


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Runs of one shape; `worker_begin` is for persistent kernels."""

    runs: Int
    worker_begin: Int


def _cut(tiles: Int, problem: Problem) -> list[_Cut]:
    """Cut tiles into runs of balanced cost, shape by shape.

    A persistent kernel runs beside the others and gets its share of the device by its cost.
    """
    shapes = problem.shapes
    counts = np.bincount(tiles[_SHAPE], minlength=len(shapes)).tolist()
    mine = [
        tiles if count == tiles.shape[1] else tiles[:, tiles[_SHAPE] == index if count else []]
        for index, count in enumerate(counts)
    ]
    cost = [int(t[_KEYS].sum()) * s.key_cost for t, s in zip(mine, shapes, strict=True)]
    kept = sum(c for c, s in zip(cost, shapes, strict=True) if s.persistent)
    share = kept / max(sum(cost), 1e-9)
    cuts = []
    for part, shape in zip(mine, shapes, strict=True):
        workers = max(1, shape.workers // problem.num_kv_heads)
        if shape.persistent:
            workers = max(1, round(workers * share))
        cuts.append(_cut_shape(part, shape, workers, problem.page_size))
    return cuts


def _cut_shape(tiles: Int, shape: TileShape, workers: int, page_size: int) -> _Cut:
    """Lay the tiles end to end in granules and cut where each worker's equal share ends."""
    if tiles.shape[1] == 0:
        return _Cut(tiles, np.zeros(1, np.int64))
    granule = page_size * -(-shape.granule // page_size)
    sizes = -(-tiles[_KEYS] // granule)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    total = int(ends[-1])
    if not shape.persistent:
        return _Cut(_cut_evenly(tiles, sizes, granule, shape, workers, page_size), ends[:1])
    workers = min(workers, -(-total * granule // shape.least_run), total)
    bounds = np.arange(workers + 1) * total // workers
    starts = np.concatenate([begins, bounds[:-1]])
    starts.sort()
    starts = starts[np.append(True, starts[1:] != starts[:-1])]
    tile = np.searchsorted(ends, starts, side="right")
    offset = (starts - begins[tile]) * granule
    length = (np.append(starts[1:], total) - starts) * granule
    runs = tiles[:, tile]
    runs[_PAGE] += offset // page_size
    runs[_START] += offset
    runs[_KEYS] = np.minimum(length, runs[_KEYS] - offset)
    return _Cut(runs, np.searchsorted(starts, bounds))


def _cut_evenly(
    tiles: Int, sizes: Int, granule: int, shape: TileShape, workers: int, page_size: int
) -> Int:
    """Cut tiles that would leave workers idle at the end; dearest first, sharers of keys together.

    Tiles of one segment are cut alike, so that their runs of the same keys follow each other.
    """
    total = int(sizes.sum())
    if int(sizes.max()) * workers * 8 > total:
        length = max(-(-total // (workers * shape.waves)), -(-shape.least_run // granule))
        count = -(-sizes // length)
        piece = -(-sizes // count)
        count = -(-sizes // piece)
        tile = np.repeat(np.arange(len(count)), count)
        offset = np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
        offset *= piece[tile] * granule
        tiles = tiles[:, tile]
        tiles[_PAGE] += offset // page_size
        tiles[_START] += offset
        tiles[_KEYS] = np.minimum(piece[tile] * granule, tiles[_KEYS] - offset)
    return tiles[:, np.lexsort((tiles[_ROW], tiles[_PAGE], -tiles[_KEYS]))]


def _finish(
    cuts: list[_Cut],
    num_packed: int,
    chunk: int,
    problem: Problem,
) -> tuple[tuple[Launch, ...], Merges]:
    """Decide which runs are final, number the partial rows, make items and merge lists."""
    runs = _beside([cut.runs for cut in cuts])
    num_chunks = num_packed // chunk
    first = runs[_ROW] // chunk
    past = (runs[_ROW] + runs[_ROWS]) // chunk
    change = np.bincount(first, minlength=num_chunks + 1)
    change -= np.bincount(past, minlength=num_chunks + 1)
    seen = np.cumsum(change)[:-1]
    shared = np.concatenate([[0], np.cumsum(seen > 1)])
    partial = shared[past] > shared[first]
    lengths = np.where(partial, runs[_ROWS], 0)
    ends = np.cumsum(lengths)
    where = np.where(partial, ends - lengths, FINAL)

    items = np.empty((runs.shape[1], len(ITEM_FIELDS)), np.int32)
    items[:, :6] = runs[_LAYER:_CAUSAL].T
    items[:, 6] = _hidden(runs, problem.window_left)
    items[:, 7] = where
    launches, at = [], 0
    for shape, cut in zip(problem.shapes, cuts, strict=True):
        stop = at + cut.runs.shape[1]
        launches.append(Launch(shape, items[at:stop], cut.worker_begin.astype(np.int32)))
        at = stop

    # merge lists: one entry per partial run and chunk, gathered by chunk
    run = np.flatnonzero(partial)
    width = (past - first)[run]
    which = np.repeat(run, width)
    inside = np.arange(len(which)) - np.repeat(np.cumsum(width) - width, width)
    merges = _merges(
        first[which] + inside,
        where[which] + inside * chunk,
        np.flatnonzero(seen == 0),
        chunk,
        int(ends[-1]) if len(ends) else 0,
    )
    return tuple(launches), merges


def _hidden(runs: Int, window_left: int) -> Int:
    """The rules each run still needs, key by key: bits of WorkItem.causal."""
    hide: Int = runs[_CAUSAL]
    if window_left < 0 and not hide.any():
        return hide
    future = runs[_START] + runs[_KEYS] - 1 > runs[_LEAST]
    hide = np.where((hide != 0) & future, HIDE_FUTURE, 0)
    if window_left >= 0:
        hide |= np.where(runs[_START] < runs[_GREATEST] - window_left, HIDE_WINDOW, 0)
    return hide


def _merges(chunks: Int, members: Int, unseen: Int, chunk: int, num_partial_rows: int) -> Merges:
    """Merge lists from (chunk, partial row) entries, and empty ones for the unseen chunks."""
    order = np.argsort(chunks, kind="stable")
    chunks = chunks[order]
    fresh = np.flatnonzero(np.append(True, chunks[1:] != chunks[:-1])) if len(chunks) else order
    indptr = np.full(len(fresh) + len(unseen) + 1, len(chunks), np.int32)
    indptr[: len(fresh)] = fresh
    return Merges(
        chunk_rows=chunk,
        chunks=np.concatenate([chunks[fresh], unseen]).astype(np.int32),
        indptr=indptr,
        members=members[order].astype(np.int32),
        num_partial_rows=num_partial_rows,
    )
