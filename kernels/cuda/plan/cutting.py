"""Where tiles are cut: at multiples of granules and whole pages, alike or where shares end."""

from __future__ import annotations

from typing import Final

import numpy as np

from kernels.backend import Int32
from kernels.cuda.common.extremes import greatest, least
from kernels.cuda.common.scalars import int32, int64
from kernels.cuda.plan.tiles import (
    KEYS,
    PAGE,
    START,
    Int,
    Splits,
    TileShape,
    spread,
)

SNAP: Final = 0.03
"""A share ends with a tile when that is no further off than this part of the share."""


def granule_of(shape: TileShape, page_size: int) -> int:
    """Keys between places where a run may end: whole granules of the kernel, whole pages."""
    return page_size * -(-shape.granule // page_size)


def cut_alike(
    tiles: Int, keys: Int, most: int, granule: int, page_size: int
) -> tuple[Int, Int | None]:
    """Every tile cut into as many runs, `most` or as many granules as the shortest tile has.

    `keys` are the tiles'. Returns the runs and how many each tile has; None for one each.
    """
    sizes = in_granules(keys, granule)
    count = min(most, least(sizes))
    if count == 1:
        return tiles, None
    pieces = np.full(len(sizes), count)
    past = sizes[:, None] * np.arange(count) // count
    later = (past > 0).reshape(-1).nonzero()[0]
    return runs_at(tiles, pieces, later, past.take(later), granule, page_size), pieces


def equal_shares(
    tiles: Int, keys: Int, teams: int, granule: int, page_size: int
) -> tuple[Int, Int, Int32]:
    """Lay the tiles end to end and cut where each team's equal share ends, or a tile close by.

    `keys` are the tiles'. Returns the runs, how many each tile has, and where each team's begin.
    """
    sizes = in_granules(keys, granule)
    ends = np.add.accumulate(sizes)
    total: int = ends.item(-1)
    teams = min(teams, total)
    bounds = np.arange(0, teams * total + 1, total)
    bounds //= teams
    tile = ends.searchsorted(bounds)
    left = ends[tile] - bounds
    past = sizes[tile] - left
    # a bound that is closer to an edge of its tile moves there, the others cut it
    cuts = np.minimum(past, left) > int(SNAP * total) // teams
    # runs before a bound: those of the tiles before its own, its own tile's first unless the bound
    # is where that begins, and one for each cut before it
    begin = np.add.accumulate(cuts.astype(np.intp))
    begin += tile
    begin += (past > left) > cuts
    which = cuts.nonzero()[0]
    pieces = np.bincount(tile[which], minlength=len(sizes))
    pieces += int64(1)
    later = (begin[which], past[which])
    return runs_at(tiles, pieces, *later, granule, page_size), pieces, begin.astype(np.int32)


def cut_at_splits(tiles: Int, at: Splits, page_size: int, lead: int = 0) -> tuple[Int, bool]:
    """Tiles as runs of a split each, in order; the first run of as many as `lead` keys hold.

    With the runs, whether one of them is of several splits.

    Splits end with the page of a tile in which they would end.
    """
    start, keys = tiles[:, START].astype(np.intp), tiles[:, KEYS].astype(np.intp)
    first = at.number(start)
    splits = at.number(start + (keys - 1) // page_size * page_size) + 1 - first
    leads = np.where(keys <= lead, splits, at.number(start + lead) - first)
    leads = np.clip(leads, 1, splits)
    count = splits + 1 - leads
    tile, inside = spread(count)
    later = inside.nonzero()[0]
    where = tile[later]
    begins = at.begin((first + leads - 1)[where] + inside[later]) - start[where]
    pages = -(begins // -page_size)
    runs = runs_at(tiles, count, later, pages, page_size, page_size)
    return runs, greatest(leads) > 1


def in_granules(keys: Int, granule: int) -> Int:
    """Number of granules for a number of keys."""
    sizes = keys + int64(granule - 1)
    sizes //= int64(granule)
    return sizes


def runs_at(tiles: Int, pieces: Int, later: Int, past: Int, granule: int, page_size: int) -> Int:
    """Tile i as `pieces[i]` runs, each up to where the next of its tile begins.

    `later` are the runs that are not their tile's first, each `past` its begin by a number of
    granules.
    """
    runs = tiles.repeat(pieces, axis=0)
    page, keys, start = runs[:, PAGE], runs[:, KEYS], runs[:, START]
    begins = (past * int64(granule)).astype(np.int32)
    skipped = np.zeros(len(runs), np.int32)
    skipped[later] = begins
    page += skipped // int32(page_size)
    start += skipped
    keys[later - int64(1)] = begins
    keys -= skipped
    return runs
