"""Tiles -> runs: tiles are cut, where whole ones would leave the device idle, into balanced runs.

A persistent kernel's tiles are laid end to end and assigned to teams of workers, each a consecutive
list of runs. Where tiles are few, teams are large, so that a tile need not be cut to keep every
worker busy; cutting costs a partial state for every row. Tiles of the other kernels go to whichever
worker is free: they are cut into as many runs as let the last worker end soonest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final

import numpy as np

from kernels.backend import Int32
from kernels.cuda.common.extremes import greatest, total
from kernels.cuda.plan import rounds
from kernels.cuda.plan.cutting import (
    cut_alike,
    cut_at_splits,
    equal_shares,
    granule_of,
    runs_at,
)
from kernels.cuda.plan.tiles import (
    KEYS,
    PAGE,
    ROW,
    ROWS,
    START,
    Int,
    PlannerConfig,
    TileShape,
    spread,
)

EQUAL: Final = 1.03
"""Tiles are of one size when the largest is at most this many times the mean."""
BUSY: Final = 0.95
"""Share of the workers that whole tiles, or tiles cut alike, must occupy."""
BUSY_BESIDE: Final = 0.85
"""The same beside another kernel, whose workers are taken from no sooner than they must be."""
FILLED: Final = 0.95
"""Share of the places for whole tiles, a few per worker, that must be taken."""
ALIKE: Final = 1.25
"""Tiles that share cached keys run in step if the largest is at most this many times the mean."""
MET_ROUNDS: Final = 3
"""Rounds of the device under which they are not worth it."""
ENOUGH: Final = 7
"""Rounds of the longest tile above which it is not cut: little is idle at the end."""
LATE: Final = 1.05
"""A persistent kernel that would end so much later than the others may have more workers: others
can take over what it leaves, it cannot take over theirs."""
MORE: Final = 1.2
MOST_SHARE: Final = 0.9
"""Maximum multiple of its share, and maximum part of the device."""
LEADS: Final = (16384, 8192, 4096, 0)
"""Keys of first runs, of several fixed splits, that are tried."""
UNEVEN: Final = 2.2
"""Runs of a causal prefill, the longest of which is twice the mean, are not."""
JOINED_ROWS: Final = 7
"""Rows of a tile from which joining its splits is cheaper than merging them."""
SHARES: Final = (0.875, 1.0)
"""Parts of the device, for many rows beside few, that are tried."""
SPARE: Final = 2
"""Workers assumed busy with earlier work."""


Parts = Sequence[tuple[int, Int]]
"""Indices into `PlannerConfig.shapes`, going up, and each one's tiles: some."""


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a plan
class KernelWork:
    """Items of one kernel, `PlannerConfig.shapes[index]`: the runs that its tiles were cut into.

    Items are int32 [num_items, 8] as in work.cuh, with `num_keys` keys in all; tile i is the next
    `pieces[i]` of them, or None: one each. The rest is for persistent kernels: worker w, a team of
    `team` warps, owns items `worker_begin[w]:worker_begin[w + 1]`; `heads_first`: all items of a kv
    head come before the next head's, more teams than there are at once.

    Of fixed splits, `joins`: some run is several. `all_heads`: the longest of all come first;
    `seconds`: when they end.
    """

    index: int
    shape: TileShape
    num_keys: int
    items: Int
    worker_begin: Int32
    team: int = 1
    pieces: Int | None = None
    heads_first: bool = False
    joins: bool = False
    all_heads: bool = False
    seconds: float = 0.0

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def num_rows(self) -> int:
        return total(self.items[:, ROWS])

    @property
    def num_workers(self) -> int:
        return len(self.worker_begin) - 1

    @property
    def one_each(self) -> bool:
        """Whether every worker has one item, worker w item w."""
        return len(self.worker_begin) - 1 == len(self.items)  # no worker is without items


def cut(parts: Parts, config: PlannerConfig, num_packed: int, same_pages: bool) -> list[KernelWork]:
    """Runs of each part, of a batch of `num_packed` packed rows.

    Persistent kernels get their share of the device beside the others. `same_pages`: tiles read the
    pages of others, mostly.
    """
    if config.splits:
        merged = sum(total(tiles[:, ROWS]) for _, tiles in parts) > num_packed
        if len(parts) == 2:
            return _cut_apart(parts[0][1], parts[1][1], config)
        return [_cut_fixed(i, mine, config, config.shapes[i], merged) for i, mine in parts]
    if same_pages and len(parts) == 1 and (together := _together(*parts[0], config)):
        return [together]
    if not parts or config.shapes[parts[-1][0]].persistent:  # persistent ones come first
        heads = config.num_kv_heads
        return [_assign(i, mine, config.shapes[i].workers // heads, config) for i, mine in parts]
    merged = sum(total(tiles[:, ROWS]) for _, tiles in parts) > num_packed
    share = _persistent_share(parts, config)
    made = _beside(parts, share, merged, config)
    if made.persistent_end > LATE * made.end:
        more = _beside(parts, min(MOST_SHARE, MORE * share), merged, config)
        made = min(made, more, key=lambda side: max(side.persistent_end, side.end))
    return made.cuts


def _cut_apart(few: Int, many: Int, config: PlannerConfig) -> list[KernelWork]:
    """Runs of fixed splits, those of many rows first, on some of the multiprocessors.

    Few rows, of the first shape, have the others, and then all.
    """
    first, last = config.shapes
    made = _cut_fixed(0, few, config, first, merged=True)
    tried = []
    for share in SHARES:
        some = replace(last, workers=max(1, round(share * last.workers)))
        apart = _cut_fixed(1, many, config, some, merged=True)
        work = _busy_seconds(made, first) + _busy_seconds(apart, last)
        tried.append((max(apart.seconds, work * config.num_kv_heads), apart))
    return [min(tried, key=itemgetter(0))[1], made]


def _busy_seconds(made: KernelWork, shape: TileShape) -> float:
    """The work of a kv head, spread over all workers."""
    work = made.num_keys * shape.key_seconds + made.num_items * shape.item_seconds
    return work / shape.workers


def _cut_fixed(
    index: int, tiles: Int, config: PlannerConfig, shape: TileShape, merged: bool
) -> KernelWork:
    """Runs that end at fixed positions, those of a tile one after another.

    The first of a tile is as long as leaves no worker idle at the end, where it may be. Tiles apart
    from each other, which share no keys, need not meet in the L2 cache.
    """
    heads, keys = config.num_kv_heads, tiles[:, KEYS]
    whole, longest, busy = total(keys), greatest(keys), ENOUGH * shape.workers
    leads, joins = [0], config.leads and index == len(config.shapes) - 1
    apart = longest * busy > whole * heads and len(np.unique(tiles[:, PAGE])) == len(tiles)
    if joins and total(tiles[:, ROWS]) < JOINED_ROWS * len(tiles):
        where = (config.splits, config.page_size)
        counts = [len(cut_at_splits(tiles, *where, n)[0]) for n in (0, config.splits.keys)]
        if counts[1] * heads <= shape.workers < counts[0] * heads:
            leads = [config.splits.keys]  # all runs begin at once
    elif joins:
        leads = [longest]
        if longest * busy > whole * heads:
            leads += [lead for lead in LEADS if lead < longest]
    made = []
    for lead in leads:
        runs, joined = cut_at_splits(tiles, config.splits, config.page_size, lead)
        top = greatest(runs[:, KEYS])
        uneven = (apart or top * len(runs) > UNEVEN * whole) and top * busy > whole * heads
        seconds = _fixed_seconds(runs, uneven, len(runs) > len(tiles) or merged, config, shape)
        made.append((seconds, runs, joined, uneven))
    seconds, runs, joined, uneven = min(made, key=itemgetter(0))
    unused = np.zeros(1, np.int32)
    return KernelWork(
        index, shape, whole, runs, unused, joins=joined, all_heads=uneven, seconds=seconds
    )


def _fixed_seconds(
    runs: Int, all_heads: bool, merged: bool, config: PlannerConfig, shape: TileShape
) -> float:
    """When runs of fixed splits are done, dearest first, and merged if `merged`."""
    start, keys = runs[:, START].astype(np.intp), runs[:, KEYS].astype(np.intp)
    splits = config.splits.number(start + keys - 1) - config.splits.number(start) + 1
    granules = -(keys // -shape.granule)
    kinds, counts = np.unique(np.stack((granules, splits)), axis=1, return_counts=True)
    heads = config.num_kv_heads
    together = heads if all_heads else shape.heads_together(heads)
    costs = kinds[0] * (shape.granule * shape.key_seconds) + kinds[1] * shape.item_seconds
    costed = sorted(zip(costs.tolist(), (counts * together).tolist(), strict=True), reverse=True)
    free = [(0.0, shape.workers)]
    end = rounds.last_end(costed * (heads // together), free)
    return end + rounds.merge_seconds(total(runs[:, ROWS]) * heads * merged)


def dearest_first(items: Int) -> Int:
    """Items longest first; those that read the same keys follow each other, last rows first."""
    return items.take(np.lexsort((-items[:, ROW], items[:, PAGE], -items[:, KEYS])), axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class _Beside:
    """Runs of kernels beside each other, and when the persistent ones and the others are done."""

    cuts: list[KernelWork]
    persistent_end: float
    end: float


def _beside(parts: Parts, share: float, merged: bool, config: PlannerConfig) -> _Beside:
    """Runs where persistent kernels have a share of the device; `merged`: rows have many tiles."""
    cuts, persistent_end, end = [], 0.0, 0.0
    for index, part in parts:
        shape = config.shapes[index]
        if shape.persistent:
            workers = round(shape.workers // config.num_kv_heads * share)
            cuts.append(_assign(index, part, workers, config, BUSY_BESIDE))
            persistent_end = max(persistent_end, _assigned_seconds(cuts[-1]))
        else:
            busy = round(shape.workers * share)
            free = [(0.0, max(1, shape.workers - busy - SPARE)), (persistent_end, busy)]
            runs, end = _cut_evenly(part, shape, free[: 2 if busy else 1], merged, config)
            num_keys = total(part[:, KEYS])
            cuts.append(KernelWork(index, shape, num_keys, runs, np.zeros(1, np.int32)))
    return _Beside(cuts, persistent_end, end)


def _persistent_share(parts: Parts, config: PlannerConfig) -> float:
    """What part of the batch's cost the persistent kernels have."""
    kept = whole = 0.0
    for index, tiles in parts:
        shape = config.shapes[index]
        keys = total(tiles[:, KEYS])
        cost = (len(tiles) * shape.item_seconds + keys * shape.key_seconds) / shape.workers
        whole += cost
        kept += cost if shape.persistent else 0.0
    return kept / whole


def _assigned_seconds(made: KernelWork) -> float:
    """When the last team of a persistent kernel is done."""
    shape = made.shape
    shares = -(made.items[:, KEYS] // -(shape.granule * made.team)) * shape.granule
    costs = shape.item_seconds + shares * shape.key_seconds
    return float(np.maximum.reduce(np.add.reduceat(costs, made.worker_begin[:-1])))


def _assign(
    index: int, tiles: Int, workers: int, config: PlannerConfig, busy: float = BUSY
) -> KernelWork:
    """Runs for teams of `workers`: whole tiles, or runs of one length, where that fills them."""
    shape, keys = config.shapes[index], tiles[:, KEYS].astype(np.intp)
    num_tiles, largest, num_keys = len(keys), greatest(keys), total(keys)
    alike = largest * num_tiles <= EQUAL * num_keys
    team = config.team or _team(shape, -(-largest // shape.granule), workers // num_tiles)
    teams = max(1, workers // team)
    granule = granule_of(shape, config.page_size)
    worth = -(-num_keys // shape.least_run)  # more would not be worth their partial states

    if num_tiles > teams:
        for size in (shape.teams if config.team is None else (team,)) if alike else ():
            if each := whole_each(num_tiles, max(1, workers // size), busy):
                return KernelWork(index, shape, num_keys, tiles, _bounds(num_tiles, each), size)
    elif largest <= shape.least_run * (team if 2 * num_tiles > teams else max(1, team // 4)):
        # its team alone gets through a tile before a merge of several teams' states would
        return KernelWork(index, shape, num_keys, tiles, _bounds(num_tiles, 1), team)
    elif alike:
        pieces = min(teams // num_tiles, max(1, worth // num_tiles))
        if pieces * num_tiles >= busy * min(teams, worth):
            runs, made = cut_alike(tiles, keys, pieces, granule, config.page_size)
            return KernelWork(index, shape, num_keys, runs, _bounds(len(runs), 1), team, made)
    teams = min(teams, worth)
    runs, made, begin = equal_shares(tiles, keys, teams, granule, config.page_size)
    return KernelWork(index, shape, num_keys, runs, begin, team, made)


def _together(index: int, tiles: Int, config: PlannerConfig) -> KernelWork | None:
    """Whole tiles for a team each, head after head, so that tiles meet where they read the same.

    The smallest teams that leave few idle in the last of many rounds; None where none do.
    """
    shape, keys = config.shapes[index], tiles[:, KEYS]
    units, longest, num_keys = len(keys) * config.num_kv_heads, greatest(keys), total(keys)
    if not shape.persistent or longest * len(keys) > ALIKE * num_keys:
        return None
    for team in shape.teams if config.team is None else (config.team,):
        places = shape.workers // team
        rounds = -(-units // places)
        if rounds < MET_ROUNDS or longest < team * shape.least_run:
            continue
        if units >= FILLED * rounds * places:
            whole = (tiles, _bounds(len(keys), 1), team)
            return KernelWork(index, shape, num_keys, *whole, heads_first=True)
    return None


def _team(shape: TileShape, useful: int, most: int) -> int:
    """The smallest team with the `useful` workers that a tile has granules for, or the largest."""
    fit = shape.teams[: bisect_right(shape.teams, max(1, most))]
    return fit[min(bisect_left(fit, useful), len(fit) - 1)]


def whole_each(num_tiles: int, teams: int, busy: float) -> int:
    """How many whole tiles to give each team, or 0 where that would leave teams idle."""
    each = -(-num_tiles // teams)
    used = -(-num_tiles // each)
    return each if num_tiles >= FILLED * each * used and used >= busy * teams else 0


def _bounds(count: int, each: int) -> Int32:
    """Start of each team's runs if each has `each` of `count`, and the last one the rest."""
    bounds = np.arange(0, count + each, each, dtype=np.int32)
    bounds[-1] = count
    return bounds


def _cut_evenly(
    tiles: Int,
    shape: TileShape,
    free: list[tuple[float, int]],
    merged: bool,
    config: PlannerConfig,
) -> tuple[Int, float]:
    """Cut tiles that would leave workers idle at the end; dearest first, sharers of keys together.

    Returns the runs and when the last is done.

    Tiles of one segment are cut alike, so that their runs of the same keys follow each other, the
    last rows first: those see most where a custom mask is causal in shape.
    """
    granule, heads = granule_of(shape, config.page_size), config.num_kv_heads
    sizes = -(tiles[:, KEYS] // -granule)
    longest, granules = greatest(sizes), total(sizes)
    end = granules * heads * granule * shape.key_seconds / shape.workers
    if longest * shape.workers * ENOUGH > granules * heads:
        kinds = rounds.sizes_of(sizes, longest)
        # tiles of one size come in the same order however heads take turns
        together = shape.heads_together(heads) if len(kinds) > 1 else heads
        queue = rounds.TileQueue(
            sizes=[(size, count * together) for size, count in kinds],
            turns=heads // together,
            free=free,
            rows=shape.rows,
            merged=merged,
            item_seconds=shape.item_seconds,
            granule_seconds=granule * shape.key_seconds,
            partial_seconds=shape.partial_seconds,
            ahead=shape.ahead and len(free) == 1,
        )
        pieces, end = rounds.pieces(queue, longest * granule // shape.least_run)
        most = -(longest // -pieces)
        piece = -(sizes // (sizes // -most))
        count = -(sizes // -piece)
        tile, inside = spread(count)
        later = inside.nonzero()[0]
        past = inside.take(later) * piece.take(tile.take(later))
        tiles = runs_at(tiles, count, later, past, granule, config.page_size)
    return dearest_first(tiles), end
