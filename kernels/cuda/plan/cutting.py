"""Where tiles are cut: at multiples of granules and whole pages, alike or where shares end."""

from __future__ import annotations

from typing import Final

import numpy as np

from kernels.backend import Int32
from kernels.cuda.common.extremes import least
from kernels.cuda.plan.tiles import KEYS, PAGE, START, Int, TileShape

SNAP: Final = 0.03
"""A share ends with a tile when that is no further off than this part of the share."""


def granule_of(shape: TileShape, page_size: int) -> int:
    """Keys between places where a run may end: whole granules of the kernel, whole pages."""
    return page_size * -(-shape.granule // page_size)


def cut_alike(tiles: Int, pieces: int, granule: int, page_size: int) -> Int:
    """Every tile cut into as many runs, `pieces` or as many granules as the shortest tile has."""
    sizes = -(tiles[:, KEYS] // -granule)
    pieces = min(pieces, least(sizes))
    if pieces == 1:
        return tiles
    tile = np.arange(len(sizes)).repeat(pieces)
    offset = (sizes[:, None] * np.arange(pieces) // pieces).reshape(-1).astype(np.int32)
    return runs_at(tiles, tile, offset, granule, page_size)


def equal_shares(tiles: Int, teams: int, granule: int, page_size: int) -> tuple[Int, Int32]:
    """Lay the tiles end to end and cut where each team's equal share ends, or a tile close by.

    Returns the runs and where each team's begin.
    """
    sizes = -(tiles[:, KEYS] // -granule)
    ends = np.add.accumulate(sizes)
    total: int = ends.item(-1)
    teams = min(teams, total)
    bounds = np.arange(0, teams * total + 1, total) // teams
    tile = ends.searchsorted(bounds)
    left = ends.take(tile) - bounds
    past = sizes.take(tile) - left
    # a bound that is closer to an edge of its tile moves there, the others cut it
    cuts = np.minimum(past, left) > int(SNAP * total) // teams
    # runs before a bound: those of the tiles before its own, its own tile's first unless the bound
    # is where that begins, and one for each cut before it
    begin = np.add.accumulate(cuts)
    begin += tile
    begin += (past > left) > cuts
    which = cuts.nonzero()[0]
    offset = np.zeros(len(sizes) + len(which), np.int32)
    offset[begin.take(which)] = past.take(which)
    tile = np.add.accumulate(offset == 0) - 1
    return runs_at(tiles, tile, offset, granule, page_size), begin.astype(np.int32)


def runs_at(tiles: Int, tile: Int, offset: Int, granule: int, page_size: int) -> Int:
    """Runs, each from `offset` granules of its `tile` on to the tile's next run, or to its end.

    They come in order; a tile's first run has offset 0.
    """
    runs = tiles.take(tile, axis=0)
    page, keys, start = runs[:, PAGE], runs[:, KEYS], runs[:, START]
    skipped = offset * granule
    page += skipped // page_size
    start += skipped
    keys -= skipped  # to the tile's end
    keys[:-1] -= keys[1:] * (offset[1:] > 0)  # less what its next run has
    return runs
