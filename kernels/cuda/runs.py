"""Tiles -> runs: tiles are cut, where whole ones would leave the device idle, into balanced runs.

A persistent kernel's tiles are laid end to end and dealt to teams of workers, each a consecutive
list of runs. Where tiles are few, teams are large, so that a tile need not be cut to keep every
worker busy; cutting costs a partial state for every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kernels.cuda.tiles import KEYS, PAGE, ROW, SHAPE, START, Int, Problem, TileShape

EQUAL: Final = 1.03
"""Tiles are of one size when the largest is at most this many times the mean."""
BUSY: Final = 0.9
"""Share of the workers that whole tiles, or tiles cut alike, must occupy."""
FILLED: Final = 0.95
"""Share of the places for whole tiles, a few per worker, that must be taken."""
SNAP: Final = 0.03
"""A share ends with a tile when that is no further off than this part of the share."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Runs of one shape; `worker_begin` and `team` are for persistent kernels.

    Team w owns runs `worker_begin[w]:worker_begin[w + 1]`; `team` workers share each run.
    """

    runs: Int
    worker_begin: Int
    team: int = 1


def cut(tiles: Int, problem: Problem) -> list[Cut]:
    """Runs of every shape; a persistent kernel beside another gets its share of the device."""
    shapes = problem.shapes
    counts = np.bincount(tiles[SHAPE], minlength=len(shapes)).tolist()
    mine = [
        tiles if count == tiles.shape[1] else tiles[:, tiles[SHAPE] == index if count else []]
        for index, count in enumerate(counts)
    ]
    share = _persistent_share(mine, shapes) if len(shapes) > counts.count(0) + 1 else 1.0
    cuts = []
    for part, shape in zip(mine, shapes, strict=True):
        workers = max(1, shape.workers // problem.num_kv_heads)
        if part.shape[1] == 0:
            cuts.append(Cut(part, np.zeros(1, np.int32)))
        elif shape.persistent:
            cuts.append(_deal(part, shape, max(1, round(workers * share)), problem))
        else:
            runs = _cut_evenly(part, shape, workers, problem.page_size)
            cuts.append(Cut(runs, np.zeros(1, np.int32)))
    return cuts


def _persistent_share(mine: list[Int], shapes: tuple[TileShape, ...]) -> float:
    """What part of the batch's cost the persistent kernels have."""
    cost = [int(t[KEYS].sum()) * s.key_cost for t, s in zip(mine, shapes, strict=True)]
    kept = sum(c for c, s in zip(cost, shapes, strict=True) if s.persistent)
    return kept / max(sum(cost), 1e-9)


def _granule(shape: TileShape, page_size: int) -> int:
    """Keys between places where a run may end: whole granules of the kernel, whole pages."""
    return page_size * -(-shape.granule // page_size)


def _deal(tiles: Int, shape: TileShape, workers: int, problem: Problem) -> Cut:
    """Deal tiles to teams of `workers`, whole ones or runs of one length where that fills them."""
    granule = _granule(shape, problem.page_size)
    sizes = -(-tiles[KEYS] // granule)
    num_tiles, largest = len(sizes), int(np.maximum.reduce(sizes))
    total = int(np.add.reduce(sizes))
    useful = max(1, -(-largest * granule // shape.granule))  # one tile of keys for each worker
    most = min(shape.most_team, useful, max(1, workers // num_tiles))
    team = min(problem.team or _floor_power(most), shape.most_team)
    teams = max(1, workers // team)
    worth = -(-total * granule // shape.least_run)  # more would not be worth their partial states

    if num_tiles > teams:
        each = -(-num_tiles // teams)
        used = -(-num_tiles // each)
        alike = largest * num_tiles <= EQUAL * total
        if alike and num_tiles >= FILLED * each * used and used >= BUSY * teams:
            return Cut(tiles, np.append(np.arange(0, num_tiles, each), num_tiles), team)
    elif largest * granule <= shape.least_run * team:
        return Cut(tiles, np.arange(num_tiles + 1), team)
    elif largest * num_tiles <= EQUAL * total:
        pieces = min(teams // num_tiles, max(1, worth // num_tiles))
        if pieces * num_tiles >= BUSY * min(teams, worth):
            runs = _cut_alike(tiles, sizes, pieces, granule, problem.page_size)
            return Cut(runs, np.arange(runs.shape[1] + 1), team)
    return _equal_shares(tiles, sizes, min(teams, worth, total), granule, problem.page_size, team)


def _floor_power(most: int) -> int:
    """The greatest power of two within `most`."""
    return 1 << (most.bit_length() - 1)


def _cut_alike(tiles: Int, sizes: Int, pieces: int, granule: int, page_size: int) -> Int:
    """Every tile cut into as many runs, `pieces` or as many granules as the shortest tile has."""
    pieces = min(pieces, int(np.minimum.reduce(sizes)))
    if pieces == 1:
        return tiles
    bounds = sizes[:, None] * np.arange(pieces + 1) // pieces
    offset = bounds[:, :-1].reshape(-1)
    length = bounds[:, 1:].reshape(-1) - offset
    return _runs(
        tiles, np.repeat(np.arange(len(sizes)), pieces), offset, length, granule, page_size
    )


def _equal_shares(
    tiles: Int, sizes: Int, teams: int, granule: int, page_size: int, team: int
) -> Cut:
    """Lay the tiles end to end and cut where each team's equal share ends, or a tile close by."""
    ends = np.cumsum(sizes)
    begins = ends - sizes
    total = int(ends[-1])
    bounds = np.arange(teams + 1) * total // teams
    tile = np.searchsorted(ends, bounds)
    before, after = begins[tile], ends[tile]
    nearest = np.where(after - bounds < bounds - before, after, before)
    bounds = np.where(np.abs(nearest - bounds) * teams <= SNAP * total, nearest, bounds)
    starts = np.concatenate([begins, bounds[:-1]])
    starts.sort()
    starts = starts[np.append(True, starts[1:] != starts[:-1])]
    tile = np.searchsorted(ends, starts, side="right")
    length = np.append(starts[1:], total) - starts
    runs = _runs(tiles, tile, starts - begins[tile], length, granule, page_size)
    return Cut(runs, np.searchsorted(starts, bounds), team)


def _runs(tiles: Int, tile: Int, offset: Int, length: Int, granule: int, page_size: int) -> Int:
    """Runs of `length` granules of the given tiles, from `offset` granules on."""
    runs = tiles[:, tile]
    skipped = offset * granule
    runs[PAGE] += skipped // page_size
    runs[START] += skipped
    runs[KEYS] = np.minimum(length * granule, runs[KEYS] - skipped)
    return runs


def _cut_evenly(tiles: Int, shape: TileShape, workers: int, page_size: int) -> Int:
    """Cut tiles that would leave workers idle at the end; dearest first, sharers of keys together.

    Tiles of one segment are cut alike, so that their runs of the same keys follow each other.
    """
    granule = _granule(shape, page_size)
    sizes = -(-tiles[KEYS] // granule)
    total = int(sizes.sum())
    if int(sizes.max()) * workers * 8 > total:
        most = max(-(-total // (workers * shape.waves)), -(-shape.least_run // granule))
        count = -(-sizes // most)
        piece = -(-sizes // count)
        count = -(-sizes // piece)
        tile = np.repeat(np.arange(len(count)), count)
        inside = np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
        tiles = _runs(tiles, tile, inside * piece[tile], piece[tile], granule, page_size)
    return tiles[:, np.lexsort((tiles[ROW], tiles[PAGE], -tiles[KEYS]))]
