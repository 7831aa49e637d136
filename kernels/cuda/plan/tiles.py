"""Levels -> tiles: each level's segments cut into tiles of packed rows for the kernel that fits.

A tile is one row of an int32 matrix: the fields of a work item, in order, so that finished tiles
are items; and, where rules hide keys by position, two more. See work.cuh for the words.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Int32, Level
from kernels.cuda.common.extremes import greatest, least
from kernels.cuda.common.scalars import int32
from kernels.cuda.common.structs import WORK_ITEM

Int = NDArray[np.signedinteger[Any]]

ITEM_FIELDS: Final = WORK_ITEM.names or ()
LAYER, ROW, ROWS, PAGE, KEYS, START, RULES, PARTIAL = map(
    ITEM_FIELDS.index,
    ("layer", "row_begin", "num_rows", "kv_begin", "num_keys", "kv_start", "rules", "partial"),
)
LEAST, GREATEST = 8, 9  # least and greatest position among the tile's rows
PLAIN_FIELDS: Final = 8
FIELDS: Final = 10
FINAL: Final = -1
HIDE_FUTURE: Final = 1
HIDE_WINDOW: Final = 2


@dataclass(frozen=True, slots=True)
class TileShape:
    """One kernel as the planner sees it: its tile, and how many workers the device runs at once.

    `persistent` kernels take a worker's list of items; the others' workers take items as they are
    free, dearest first, for `heads_at_once` kv heads at a time where these go up (0: all). As
    many workers of a persistent kernel as `teams` names, from 1 up, may share an item as a team.
    Runs are cut at multiples of `granule` keys and of whole pages. Segments of at most `most_rows`
    packed rows go to the first shape that takes them. `item_seconds` and `key_seconds` are the
    costs of an item and of each of its keys to its worker, `partial_seconds` of a row's partial
    state.
    `ahead`: a worker takes items before it begins them, unless it begins beside another kernel.
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
    partial_seconds: float = 3e-10
    ahead: bool = False

    def heads_together(self, num_kv_heads: int) -> int:
        """For how many kv heads items are taken before the next ones' turn."""
        if self.heads_at_once == 0:
            return num_kv_heads
        return self.heads_at_once if num_kv_heads % self.heads_at_once == 0 else 1


@dataclass(frozen=True, slots=True)
class Splits:
    """Positions at which every row's keys are split: multiples of `keys`, and `first` before them.

    Both are whole pages. `keys` 0: there are none; `first` 0: only multiples.
    """

    keys: int
    first: int = 0

    def __bool__(self) -> bool:
        return self.keys > 0

    def number(self, position: Any) -> Any:
        """The split that a position is in, counted from 0."""
        return position // self.keys + (self.first > 0) * (position >= self.first)

    def begin(self, number: Int) -> Int:
        """Where a split begins: the opposite of `number`."""
        if self.first == 0:
            return number * self.keys
        return np.where(number == 1, self.first, np.maximum(number - 1, 0) * self.keys)

    def longest(self, keys: int) -> int:
        """The longest run of a sequence of this many keys, from its first on."""
        most = min(keys, self.keys)
        if keys >= 2 * self.keys:
            return most
        return max(min(most, self.first), most - self.first, keys - self.keys)


NO_SPLITS: Final = Splits(0)


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """The planner's inputs besides the plans.

    `page_bytes` counts a page's K and V of all heads. `team` forces the size of teams.
    `chunk`: packed rows that always travel together, whichever kernel has them. `takes`: how many
    rows each shape takes at most; the last one any. `splits`: every tile is cut at these, and
    nowhere else, for the last shape alone; none: where it pays. `leads`: a row's first run may be
    several splits, which the kernel joins itself.
    """

    group_size: int
    page_size: int
    num_kv_heads: int
    window_left: int
    shapes: tuple[TileShape, ...]
    team: int | None = None
    page_bytes: int = 0
    splits: Splits = NO_SPLITS
    leads: bool = False
    chunk: int = field(init=False)
    takes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        chunk = chunk_rows(self.group_size, min(shape.rows for shape in self.shapes))
        object.__setattr__(self, "chunk", chunk)
        object.__setattr__(self, "takes", tuple(shape.most_rows for shape in self.shapes[:-1]))


def chunk_rows(group_size: int, rows: int) -> int:
    """Packed rows that always travel together: the largest divisor of the group within `rows`."""
    return max(d for d in range(1, min(group_size, rows) + 1) if group_size % d == 0)


def beside(parts: Sequence[Int]) -> Int:
    """Matrices of tiles one after another."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros((0, FIELDS), np.int32)


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
    config: PlannerConfig,
    fields: int,
) -> list[tuple[int, Int]]:
    """Tiles of one level, before runs are cut, with the index of their kernel in `config.shapes`.

    `row` and `page` are where the plan's begin; a tile has `fields` fields.
    """
    made = []
    for index, mine in _by_shape(*_segments(layer, level, page, config, fields), config):
        shape = config.shapes[index]
        tiles = mine if shape.most_rows <= shape.rows else _cut_rows(mine, shape.rows, config.chunk)
        if level.causal or config.window_left >= 0:
            tiles = _clip(tiles, positions, config, shape)
        if row:
            tiles[:, ROW] += row * config.group_size
        if len(tiles):
            made.append((index, tiles))
    return made


def _segments(
    layer: int, level: Level, page: int, config: PlannerConfig, fields: int
) -> tuple[Int, Int32, Int32]:
    """One tile per segment of a level, whatever its rows and keys; below 1 key: no pages.

    With these two columns by themselves: what lies side by side is looked through sooner.
    """
    packed, kv = level.qo_indptr * int32(config.group_size), level.kv_indptr
    rows, keys = packed[1:] - packed[:-1], kv[1:] - kv[:-1]
    keys -= int32(1)
    keys *= int32(config.page_size)
    keys += level.kv_last_page_len
    tiles = np.zeros((len(keys), fields), np.int32)
    tiles[:, ROW] = packed[:-1]
    tiles[:, ROWS] = rows
    tiles[:, PAGE] = kv[:-1]
    if page:
        tiles[:, PAGE] += page
    tiles[:, KEYS] = keys
    tiles[:, START] = level.kv_start
    if layer:
        tiles[:, LAYER] = layer
    if level.causal:
        tiles[:, RULES] = HIDE_FUTURE
    tiles[:, PARTIAL] = int32(FINAL)
    return tiles, rows, keys


def _by_shape(
    segments: Int, rows: Int32, keys: Int32, config: PlannerConfig
) -> list[tuple[int, Int]]:
    """Each segment's kernel by its packed rows: indices into `config.shapes`, and their segments.

    Segments without rows or without keys get no tile.
    """
    if len(segments) == 0:
        return []
    fewest, takes = least(rows), config.takes
    if fewest < 1 or least(keys) < 1:
        some = (rows > 0) & (keys > 0)
        left = (segments.compress(some, axis=0), rows.compress(some), keys.compress(some))
        return _by_shape(*left, config)
    first, last = bisect_left(takes, fewest), bisect_left(takes, greatest(rows))
    if first == last:
        return [(first, segments)]
    fitting = np.searchsorted(takes, rows)
    parts = [(i, segments.compress(fitting == i, axis=0)) for i in range(first, last + 1)]
    return [(index, part) for index, part in parts if len(part)]


def _cut_rows(segments: Int, rows: int, chunk: int) -> Int:
    """Tiles of at most this many packed rows, in whole chunks."""
    capacity = rows // chunk * chunk
    if greatest(segments[:, ROWS]) <= capacity:
        return segments
    segment, inside = spread(-(segments[:, ROWS] // -capacity))
    inside *= capacity
    tiles = segments.take(segment, axis=0)
    tiles[:, ROW] += inside
    tiles[:, ROWS] = np.minimum(capacity, tiles[:, ROWS] - inside)
    return tiles


def _clip(tiles: Int, positions: Int32, config: PlannerConfig, shape: TileShape) -> Int:
    """Drop the keys that no row of a tile sees: those after its last row, those left of windows."""
    group, window = config.group_size, config.window_left
    bounds = np.empty((len(tiles), 2), np.intp)
    np.floor_divide(tiles[:, ROW], group, out=bounds[:, 0])
    np.floor_divide(tiles[:, ROW] + (tiles[:, ROWS] - 1), group, out=bounds[:, 1])
    bounds[:, 1] += 1
    padded = np.concatenate([positions, positions[-1:]])  # so that the second may be the end
    where = bounds.reshape(-1)
    tiles[:, LEAST] = np.minimum.reduceat(padded, where)[::2]
    tiles[:, GREATEST] = np.maximum.reduceat(padded, where)[::2]
    if tiles[0, RULES]:
        last = np.minimum(tiles[:, KEYS] - 1, tiles[:, GREATEST] - tiles[:, START])
        np.add(last, 1, out=tiles[:, KEYS])
    if window >= 0:
        hidden = _left_of_windows(tiles, config, shape)
        tiles[:, PAGE] += hidden
        hidden *= config.page_size
        tiles[:, START] += hidden
        tiles[:, KEYS] -= hidden
    if least(tiles[:, KEYS]) > 0:
        return tiles
    return tiles.compress(tiles[:, KEYS] > 0, axis=0)


def _left_of_windows(tiles: Int, config: PlannerConfig, shape: TileShape) -> Int:
    """How many whole pages of each tile are left of its rows' windows.

    With fixed splits only whole key tiles of the split in which the windows begin: a row's keys
    then meet in the same tiles as without its neighbours.
    """
    start, page_size, splits = tiles[:, START].astype(np.int64), config.page_size, config.splits
    first = np.maximum(tiles[:, LEAST] - config.window_left, start)
    hidden: Int = (first - start) // page_size
    if not splits:
        return hidden
    begin = splits.begin(splits.number(start + hidden * page_size)) - start
    begin = np.maximum(-(begin // -page_size), 0)  # within a page: a split begins with the next
    step = math.lcm(page_size, shape.granule) // page_size
    hidden -= (hidden - begin) % step
    return hidden


def keep_rules(runs: Int, window_left: int) -> None:
    """Leave in RULES the rules each run still needs, key by key."""
    rules = runs[:, RULES]  # HIDE_FUTURE or 0
    rules *= runs[:, START] + runs[:, KEYS] - 1 > runs[:, LEAST]
    if window_left >= 0:
        start = runs[:, START].astype(np.int64)
        rules[start + window_left < runs[:, GREATEST]] |= HIDE_WINDOW
