"""Levels -> tiles: each level's segments cut into tiles of packed rows for the kernel that fits.

A tile is one column of an int32 matrix whose first rows are the fields of a work item, in order, so
that finished tiles become items by one transposed copy; see work.cuh for the words.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Int32, Level
from kernels.cuda.common.structs import WORK_ITEM

Int = NDArray[np.signedinteger[Any]]

ITEM_FIELDS: Final = WORK_ITEM.names or ()
LAYER, ROW, ROWS, PAGE, KEYS, START, RULES, PARTIAL = map(
    ITEM_FIELDS.index,
    ("layer", "row_begin", "num_rows", "kv_begin", "num_keys", "kv_start", "rules", "partial"),
)
LEAST, GREATEST = 8, 9  # least and greatest position among the tile's rows
SHAPE = 10  # index into PlannerConfig.shapes
FIELDS: Final = 11
FINAL: Final = -1
HIDE_FUTURE: Final = 1
HIDE_WINDOW: Final = 2


@dataclass(frozen=True, slots=True)
class TileShape:
    """One kernel as the planner sees it: its tile, and how many workers the device runs at once.

    `persistent` kernels take a worker's list of items; the others' workers take items as they are
    free, dearest first, for `heads_at_once` kv heads at a time where these go up (0: all). So many
    workers of a persistent kernel as `teams` names, growing from 1, may share an item as one team.
    Runs are cut at multiples of `granule` keys and of whole pages. Segments of at most `most_rows`
    packed rows go to the first shape that takes them. `item_seconds` and `key_seconds` are what an
    item costs its worker, and each of its keys.
    """

    name: str
    rows: int
    most_rows: int
    workers: int
    granule: int
    persistent: bool
    least_run: int
    item_seconds: float = 0.0
    key_seconds: float = 1.0
    heads_at_once: int = 0
    teams: tuple[int, ...] = (1,)

    def heads_together(self, num_kv_heads: int) -> int:
        """For how many kv heads items are taken before the next ones' turn."""
        if self.heads_at_once == 0:
            return num_kv_heads
        return self.heads_at_once if num_kv_heads % self.heads_at_once == 0 else 1


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """What the planner needs to know besides the plans; `team` forces the size of teams."""

    group_size: int
    page_size: int
    num_kv_heads: int
    window_left: int
    shapes: tuple[TileShape, ...]
    team: int | None = None

    @property
    def chunk(self) -> int:
        """Packed rows that always travel together, whichever kernel has them."""
        return chunk_rows(self.group_size, min(shape.rows for shape in self.shapes))


@cache
def chunk_rows(group_size: int, rows: int) -> int:
    """Packed rows that always travel together: the largest divisor of the group within `rows`."""
    return max(d for d in range(1, min(group_size, rows) + 1) if group_size % d == 0)


def beside(parts: Sequence[Int]) -> Int:
    """Matrices of tiles one after another."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, axis=1) if parts else np.zeros((FIELDS, 0), np.int32)


def spread(counts: Int) -> tuple[Int, Int]:
    """Item i repeated `counts[i]` times: the item of each copy, and how many copies came before."""
    begins = np.add.accumulate(counts) - counts
    item = np.arange(len(counts)).repeat(counts)
    return item, np.arange(len(item)) - begins.repeat(counts)


def level_tiles(
    layer: int,
    positions: Int32,
    level: Level,
    row: int,
    page: int,
    chunk: int,
    config: PlannerConfig,
) -> Int:
    """Tiles of one level, before runs are cut; `row` and `page` are where the plan's begin."""
    group = config.group_size
    tiles = _segments(layer, level, page, config)
    if tiles.shape[1] == 0:
        return tiles
    least, _, fewest_keys = np.minimum.reduce(tiles[ROWS : KEYS + 1], axis=1).tolist()
    if least < 1 or fewest_keys < 1:
        tiles = tiles.compress((tiles[ROWS] > 0) & (tiles[KEYS] > 0), axis=1)
        if tiles.shape[1] == 0:
            return tiles
        least = int(np.minimum.reduce(tiles[ROWS]))
    most = least
    if least * tiles.shape[1] != int(level.qo_indptr[-1]) * group:  # else all have the same
        most = int(np.maximum.reduce(tiles[ROWS]))
    tiles = _fit(tiles, least, most, chunk, config.shapes)
    if level.causal or config.window_left >= 0:
        tiles = _clip(tiles, positions, config)
    if row:
        tiles[ROW] += row * group
    return tiles


def _segments(layer: int, level: Level, page: int, config: PlannerConfig) -> Int:
    """One tile per segment of a level, whatever its rows and keys; below 1 key: no pages."""
    qo, kv = level.qo_indptr, level.kv_indptr
    tiles = np.zeros((FIELDS, len(level.kv_start)), np.int32)
    rows, keys = tiles[ROWS], tiles[KEYS]
    np.subtract(qo[1:], qo[:-1], out=rows)
    rows *= config.group_size
    np.subtract(kv[1:], kv[:-1], out=keys)
    keys -= 1
    keys *= config.page_size
    keys += level.kv_last_page_len
    np.multiply(qo[:-1], config.group_size, out=tiles[ROW])
    np.add(kv[:-1], page, out=tiles[PAGE])
    tiles[START] = level.kv_start
    if layer:
        tiles[LAYER] = layer
    if level.causal:
        tiles[RULES] = HIDE_FUTURE
    tiles[PARTIAL] = FINAL
    return tiles


def _fit(tiles: Int, least: int, most: int, chunk: int, shapes: Sequence[TileShape]) -> Int:
    """Choose each segment's kernel by its packed rows, and cut it into tiles of whole chunks.

    `least` and `most` are the fewest and the most rows of a segment.
    """
    takes = [shape.most_rows for shape in shapes[:-1]]
    first, last = bisect_left(takes, least), bisect_left(takes, most)
    if first != last:
        tiles[SHAPE] = np.searchsorted(takes, tiles[ROWS])
    elif first:
        tiles[SHAPE] = first
    if first == last and most <= shapes[first].rows // chunk * chunk:
        return tiles
    capacities = np.array([shape.rows // chunk * chunk for shape in shapes], np.int32)
    capacity = capacities.take(tiles[SHAPE])
    segment, within = spread(-(tiles[ROWS] // -capacity))
    capacity = capacity.take(segment)
    within *= capacity
    tiles = tiles.take(segment, axis=1)
    tiles[ROW] += within
    tiles[ROWS] = np.minimum(capacity, tiles[ROWS] - within)
    return tiles


def _clip(tiles: Int, positions: Int32, config: PlannerConfig) -> Int:
    """Drop the keys that no row of a tile sees: those after its last row, those left of windows."""
    group, page_size, window = config.group_size, config.page_size, config.window_left
    bounds = np.empty((tiles.shape[1], 2), np.intp)
    np.floor_divide(tiles[ROW], group, out=bounds[:, 0])
    np.floor_divide(tiles[ROW] + (tiles[ROWS] - 1), group, out=bounds[:, 1])
    bounds[:, 1] += 1
    padded = np.concatenate([positions, positions[-1:]])  # so that the second may be the end
    where = bounds.reshape(-1)
    tiles[LEAST] = np.minimum.reduceat(padded, where)[::2]
    tiles[GREATEST] = np.maximum.reduceat(padded, where)[::2]
    if tiles[RULES, 0]:
        np.minimum(tiles[KEYS], tiles[GREATEST] - tiles[START] + 1, out=tiles[KEYS])
    if window >= 0:
        start = tiles[START].astype(np.int64)
        hidden = np.maximum(tiles[LEAST] - start - window, 0) // page_size
        tiles[PAGE] += hidden
        hidden *= page_size
        tiles[START] += hidden
        tiles[KEYS] -= hidden
    if int(np.minimum.reduce(tiles[KEYS])) > 0:
        return tiles
    return tiles.compress(tiles[KEYS] > 0, axis=1)


def keep_rules(runs: Int, window_left: int) -> None:
    """Leave in RULES the rules each run still needs, key by key."""
    rules = runs[RULES]  # HIDE_FUTURE or 0
    rules *= runs[START] + runs[KEYS] - 1 > runs[LEAST]
    if window_left >= 0:
        start = runs[START].astype(np.int64)
        rules[start + window_left < runs[GREATEST]] |= HIDE_WINDOW
