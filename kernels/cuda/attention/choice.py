"""Which set of kernels takes a batch: the one that is estimated to be done first.

What a set takes is estimated from the batch's segments, before anything is planned: some numpy
calls a set. Its constants are fitted to batches that every set has been timed on (`plan/costs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from kernels.backend import Plan
from kernels.cuda.attention.kernel_sets import FEW_ROWS, BatchKind, KernelSet
from kernels.cuda.common.extremes import greatest, least, total
from kernels.cuda.common.scalars import int64
from kernels.cuda.plan.costs import H200, SetCosts
from kernels.cuda.plan.merges import NOTHING
from kernels.cuda.plan.tiles import Int, PlannerConfig, Splits

SHORT_DECODE: Final = 128
"""Keys a narrow warp, of a device full of them, up to which a decode is short."""
ONE_TILE: Final = (96, 128)
"""Keys of sequences of short decodes, at most one CTA each, that the kernel of 64 rows takes: on
average and at most, in groups of up to 8."""
NARROW_GROUP: Final = 8
"""Rows of a decode up to which the narrow kernel is bound by memory alone."""
WEIGHED_KEYS: Final = (100, 600)
"""Between how many keys of all heads a multiprocessor other kernels may be faster all the same,
above head_dim 128, where tiles have `LONG_ROWS_TILE` keys."""
LONG_ROWS_TILE: Final = 64
LONG_ROW_KEYS: Final = 1000
"""The same unit, from which on there the kernel of 64 rows takes larger groups."""
SHORT_PREFILL: Final = 512
LONG_PREFILL: Final = 128
"""Keys of the longest sequence of a short prefill; and at least, on average, of one for three
warpgroups, where there is that kernel."""
SURE: Final = 0.98
"""Part of the estimate for what is usual for a batch that others must stay below; and of that for
fixed splits which runs as they pay, of which less is known, must stay below."""
PAIR_KEYS: Final = 3000
"""Keys of all heads a multiprocessor from which few rows are read by two CTAs each."""
PAIR_TILES: Final = {128: 1.5, 192: 3.0}
"""Tiles of many rows for each run of few rows, by the tile's keys, up to which two CTAs each take
both."""
BESIDE_KEYS: Final = 1500
BESIDE_TILES: Final = 20
"""Keys of few rows, and tiles of many rows, of all heads a multiprocessor, from which each kind has
a launch of its own. These four are of fixed splits."""
ALIKE: Final = 1.03
"""Tiles are of one size when the longest is at most this many times the mean."""
ROUNDS: Final = 5
"""Rounds of units of one size, from which on how the last one is filled does not count."""


class Segments:
    """Those of all levels of a batch that have rows and keys, as columns.

    `rows` are packed, `keys` are whole pages, and begin at position `start`. `causal` hides some
    keys of one level; `merged`: rows are in several levels.
    """

    def __init__(self, rows: Int, keys: Int, start: Int, causal: bool, merged: bool) -> None:
        self.rows, self.keys, self.start = rows, keys, start
        self.causal, self.merged = causal, merged
        self.all_keys, self.most = (total(keys), greatest(keys)) if len(keys) else (0, 0)
        self._tiles: dict[int, Tiles] = {}
        self._pieces: dict[Splits, Int] = {}

    def tiles(self, capacity: int, group: int) -> Tiles:
        """Of at most `capacity` rows of groups of `group`."""
        found = self._tiles.get(capacity)
        if found is None:
            counts, seen = -(self.rows // -capacity), self.keys
            if self.causal:  # on average
                seen = seen - (self.rows - self.rows // counts) // (2 * group)
            found = Tiles(counts, total(counts), int(counts.dot(seen)), seen)
            self._tiles[capacity] = found
        return found

    def pieces(self, splits: Splits) -> Int:
        """Runs of each, with fixed splits."""
        found = self._pieces.get(splits)
        if found is None:
            last = self.start + self.keys - 1
            found = splits.number(last) - splits.number(self.start) + 1
            self._pieces[splits] = found
        return found


class Tiles(NamedTuple):
    """How many tiles of rows each segment has, all have, and how many keys these see in all."""

    counts: Int
    number: int
    all_keys: int
    seen: Int


class Load(NamedTuple):
    """Units of a kernel, each with one tile of rows and one run of keys, in all heads.

    The longest has `longest` tiles of keys. `partial_rows` are merged. `cut`: where that pays.
    """

    units: int
    longest: int
    partial_rows: int
    cut: bool


def batch_kind(
    plans: Sequence[Plan],
    usual: PlannerConfig,
    sets: Mapping[BatchKind, KernelSet],
    costs: SetCosts = H200.sets,
) -> BatchKind:
    """The set for a batch: of those that there are, whose usual one plans by `usual`."""
    if usual.splits:
        return fixed_kind(segments_of(plans, usual), usual, "pair fixed" in sets)
    kind, settled = _plain_kind(plans, usual, sets)
    chosen: BatchKind = kind if kind in sets else "usual"
    if settled or "wide whole" not in sets or usual.window_left >= 0:  # windows: not measured
        return chosen
    batch = segments_of(plans, usual)
    if not len(batch.rows):
        return chosen
    soonest = SURE * estimate(sets[chosen], batch, costs, chosen == "short decode")
    mixed = least(batch.rows) <= usual.takes[-1]
    for other, one in sets.items():
        if one.alone and (mixed or other != "wide whole"):  # else that is the usual set
            sure = 1.0 if one.planner.splits else SURE
            end = estimate(one, batch, costs, soonest=sure * soonest) / sure
            if end < soonest:
                chosen, soonest = other, end
    return chosen


def _plain_kind(
    plans: Sequence[Plan], usual: PlannerConfig, sets: Mapping[BatchKind, KernelSet]
) -> tuple[BatchKind, bool]:
    """A cheap classification, and whether no other set needs to be weighed against it."""
    rows = sequences = pages = 0
    for plan in plans:
        if len(plan.levels) != 1:
            return "usual", False
        rows += len(plan.positions)
        sequences += len(plan.levels[0].kv_start)
        pages += len(plan.levels[0].kv_indices)
    keys, group = pages * usual.page_size, usual.group_size
    each = usual.shapes[-1].workers / usual.num_kv_heads
    if rows == sequences:  # a decode
        narrow = usual.shapes[0]
        short = keys <= SHORT_DECODE * narrow.workers // usual.num_kv_heads
        long = usual.shapes[-1].granule == LONG_ROWS_TILE and "few fixed" in sets
        if long and usual.takes[-1] < group <= FEW_ROWS and keys >= LONG_ROW_KEYS * each:
            return "few fixed", True  # a tile of many rows would be half empty
        if group > NARROW_GROUP:
            return "short decode" if short and group <= narrow.rows else "usual", False
        if long:
            return "usual", not WEIGHED_KEYS[0] * each <= keys <= WEIGHED_KEYS[1] * each
        if not short:
            return "usual", True
        average, most = ONE_TILE if "short decode" in sets and "few fixed" in sets else (0, 0)
        likely = sequences <= each and average * sequences < keys <= most * sequences
        one_tile = likely and greatest(segments_of(plans, usual).keys) <= most
        return "few fixed" if one_tile else "short decode", True
    levels = [plan.levels[0] for plan in plans if len(plan.levels[0].kv_start)]
    fewest = min([least(level.qo_indptr[1:] - level.qo_indptr[:-1]) for level in levels])
    if fewest * group <= max(shape.rows for shape in usual.shapes[:-1]):
        return "usual", False
    if "long prefill" in sets and keys >= LONG_PREFILL * sequences:
        return "long prefill", False
    longest = max([greatest(level.kv_indptr[1:] - level.kv_indptr[:-1]) for level in levels])
    return "short prefill" if longest * usual.page_size <= SHORT_PREFILL else "usual", False


def fixed_kind(batch: Segments, usual: PlannerConfig, pairs: bool) -> BatchKind:
    """The class of a batch whose rows are split at fixed positions; `pairs`: all are there.

    Two CTAs a multiprocessor hide what each of their units waits for. One by itself is sooner done
    with a unit, and with 128 rows it reads keys of many rows half as often.
    """
    rows, keys = batch.rows, batch.keys
    if not len(rows):
        return "usual"
    few, shape = rows <= FEW_ROWS, usual.shapes[-1]
    if few.all():
        many = total(keys) * usual.num_kv_heads > PAIR_KEYS * shape.workers
        return "pair fixed" if pairs and many else "few fixed"
    tiles = -(rows // -shape.rows) * -(keys // -shape.granule)
    if pairs and total(tiles[~few]) <= PAIR_TILES[shape.granule] * np.count_nonzero(few):
        return "pair fixed"
    if not (pairs and few.any()):
        return "usual"
    each = shape.workers / usual.num_kv_heads
    apart = total(keys[few]) > BESIDE_KEYS * each and total(tiles[~few]) > BESIDE_TILES * each
    return "few beside many" if apart else "usual"


def segments_of(plans: Sequence[Plan], config: PlannerConfig) -> Segments:
    """The segments of plans, with whole pages."""
    levels = [level for plan in plans for level in plan.levels if len(level.kv_start)]
    if not levels:
        return Segments(NOTHING, NOTHING, NOTHING, False, False)
    rows = np.concatenate([level.qo_indptr[1:] - level.qo_indptr[:-1] for level in levels])
    pages = np.concatenate([level.kv_indptr[1:] - level.kv_indptr[:-1] for level in levels])
    start = np.concatenate([level.kv_start for level in levels])
    rows, keys = rows.astype(np.intp), pages * int64(config.page_size)
    rows *= config.group_size
    if least(rows) < 1 or least(keys) < 1:
        some = (rows > 0) & (keys > 0)
        rows, keys, start = rows[some], keys[some], start[some]
    merged = max([len(plan.levels) for plan in plans]) > 1
    return Segments(rows, keys, start, not merged and levels[0].causal, merged)


def estimate(
    one: KernelSet,
    batch: Segments,
    costs: SetCosts,
    short: bool = False,
    soonest: float = math.inf,
) -> float:
    """Microseconds until a set of Hopper's kernels is done with a batch, or some more than
    `soonest`; `short`: with the narrow kernel of short decodes."""
    config, rows, keys = one.planner, batch.rows, batch.keys
    read = (batch.all_keys * config.page_bytes / config.page_size / costs.bytes) ** 5
    latency, few_rows, longest = 0.0, 0, 0
    if config.takes:
        few = rows <= config.takes[-1]
        longest = greatest(keys * few)
    if longest:
        latency = (costs.short if short else costs.narrow) + longest * costs.narrow_key
        few_rows = total(rows * few) * config.num_kv_heads if batch.merged else 0
        some = ~few
        batch = Segments(rows[some], keys[some], batch.start[some], batch.causal, batch.merged)
    end = costs.merge + few_rows * one.unit.partial if few_rows else 0.0
    if len(batch.rows):
        latency += costs.launch + (costs.both if longest else 0.0)
        limit = max(0.0, (soonest - latency) ** 5 - read) ** 0.2
        end = _end(one, batch, costs, few_rows, longest > 0, limit)
    return latency + float((end**5 + read) ** 0.2)


def _end(
    one: KernelSet,
    batch: Segments,
    costs: SetCosts,
    few_rows: int,
    beside: bool,
    limit: float,
) -> float:
    """When all units are done and merged, with `few_rows` of others; `beside`: the kernel is beside
    another. Not looked into where it is after `limit`."""
    unit, shape, heads = one.unit, one.planner.shapes[-1], one.planner.num_kv_heads
    tiles = batch.tiles(shape.rows // one.planner.chunk * one.planner.chunk, one.planner.group_size)
    granules = heads * (tiles.all_keys / shape.granule + tiles.number / 2)
    work = (heads * tiles.number * unit.item + granules * unit.granule) / shape.workers
    if work > limit:
        return work
    ends = []
    alike = batch.most * len(batch.keys) <= ALIKE * batch.all_keys
    alike = alike and not (batch.causal and tiles.number > len(batch.keys))
    for load in loads(one, batch, tiles, granules, alike):
        longest = unit.item + load.longest * unit.granule
        rounds = -(-load.units // shape.workers)
        work = (load.units * unit.item + granules * unit.granule) / shape.workers
        end = max(longest, work + costs.tail * longest)
        if alike and rounds < ROUNDS and not beside:
            end = rounds * longest
        if load.cut:
            end *= costs.cut
        if partial := load.partial_rows + few_rows:
            end += costs.merge + partial * unit.partial
        ends.append(end)
    return min(ends)


def loads(
    one: KernelSet, batch: Segments, tiles: Tiles, granules: float, alike: bool
) -> Iterator[Load]:
    """What the kernel of many rows may get to do."""
    shape, heads, splits = one.planner.shapes[-1], one.planner.num_kv_heads, one.planner.splits
    most = batch.most
    if splits:
        pieces = batch.pieces(splits)
        units = int(tiles.counts.dot(pieces)) * heads
        cut = batch.merged or greatest(pieces) > 1
        partial = int(batch.rows.dot(pieces)) * heads if cut else 0
        yield Load(units, -(-splits.longest(most) // shape.granule), partial, False)
        return
    longest, whole = -(-most // shape.granule), tiles.number * heads
    yield Load(whole, longest, total(batch.rows) * heads if batch.merged else 0, False)
    for rounds in (1, 2):
        wanted = rounds * shape.workers * longest / granules
        count = min(math.floor(wanted) if alike else math.ceil(wanted), most // shape.least_run)
        if count > 1:
            run = -(-longest // count)
            pieces = -(tiles.seen // -(run * shape.granule))
            units = int(tiles.counts.dot(pieces)) * heads
            yield Load(units, run, int(batch.rows.dot(pieces)) * heads, True)
