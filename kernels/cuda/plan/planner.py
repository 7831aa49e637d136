"""Plans -> work items: pure numpy, one pass over a batch's segments, no loop over rows or pages.

Tiles first (tiles.py): each level's segments are cut into tiles of packed rows, each with the keys
that at least one of its rows can see. Then runs (runs.py): tiles are assigned to the workers, whole
or cut, so that all finish together. Rows that end up with more than one run, or none, go on merge
lists. See work.cuh for the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.ma  # np.unique imports it at its first call: not amid a request

from kernels.backend import Int32, Level, Plan
from kernels.cuda.plan.costs import H200
from kernels.cuda.plan.cutting import cut_at_splits
from kernels.cuda.plan.merges import MergeLists, lists_of_pieces, merge_lists
from kernels.cuda.plan.runs import KernelWork, cut, dearest_first
from kernels.cuda.plan.tiles import (
    FIELDS,
    PLAIN_FIELDS,
    START,
    Int,
    PlannerConfig,
    beside,
    keep_rules,
    level_tiles,
)

LONG: Final = 2048
"""Keys a sequence from which it is worth looking whether others have the same pages."""
FIRST_POSITION: Final = np.int32(-1)
"""Of rows before all keys: those see none, or all, wherever they are. From here on, differences of
positions, and windows left of rows that one hides keys of, are numbers of 32 bits."""


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a plan
class BatchWork:
    """Everything a batch needs on the device; row arrays run over all plans, one after another.

    `kernels` has those of `PlannerConfig.shapes` that have items.
    """

    kernels: Sequence[KernelWork]
    merges: MergeLists
    order: Int32
    positions: Int32
    kv_indices: Int32
    num_rows: int


def make_work(requests: Sequence[tuple[int, Plan]], config: PlannerConfig) -> BatchWork:
    """Work for (layer, plan) requests of one scoring, rows packed one plan after another."""
    plans = [plan for _, plan in requests]
    levels = [level for plan in plans for level in plan.levels]
    positions = [np.maximum(plan.positions, FIRST_POSITION) for plan in plans]
    num_rows = sum(map(len, positions))
    num_packed = num_rows * config.group_size
    ruled = config.window_left >= 0 or any(level.causal for level in levels)
    tiles = _tiles(requests, positions, config, FIELDS if ruled else PLAIN_FIELDS)
    kernels = cut(tiles, config, num_packed, _same_pages(levels, config))
    runs = beside([launch.items for launch in kernels])
    if config.splits and len(kernels) > 1:  # members of a list come in the order of position
        order = runs[:, START].argsort(kind="stable")
        ordered = runs.take(order, axis=0)
        merges = merge_lists(ordered, num_packed, config.chunk)
        runs[order] = ordered
    elif _tile_each(plans, tiles, num_packed // config.chunk, config):
        merges = lists_of_pieces(runs, kernels[0].pieces, config.chunk)
    else:
        merges = merge_lists(runs, num_packed, config.chunk)
    if ruled:
        keep_rules(runs, config.window_left)
        runs = np.ascontiguousarray(runs[:, :PLAIN_FIELDS])
    for launch in kernels:  # their runs with partial rows, and with an item's fields alone
        launch.items, runs = runs[: len(launch.items)], runs[len(launch.items) :]
        if config.splits:  # only now: merge lists are in the order of runs
            launch.items = dearest_first(launch.items)
    return BatchWork(
        kernels=kernels,
        merges=merges,
        order=_order(plans),
        positions=_joined(positions),
        kv_indices=_joined([level.kv_indices for level in levels]),
        num_rows=num_rows,
    )


def _same_pages(levels: Sequence[Level], config: PlannerConfig) -> bool:
    """Whether a long batch without levels reads pages over and over, and more than caches hold.

    Sequences that share a page share all before it: so as many pages as there are half-way through
    a sequence count for all.
    """
    if len(levels) != 1:
        return False
    (level,) = levels
    count, pages = len(level.kv_start), len(level.kv_indices)
    if count < 2 or pages * config.page_size < LONG * count:
        return False
    middle = np.minimum(level.kv_indptr[:-1] + pages // (2 * count), level.kv_indptr[1:] - 1)
    others = len(np.unique(level.kv_indices.take(middle)))
    return 2 * others <= count and others * pages // count * config.page_bytes > H200.cache_bytes


def _tile_each(
    plans: Sequence[Plan], tiles: Sequence[tuple[int, Int]], num_chunks: int, config: PlannerConfig
) -> bool:
    """Whether tile i is chunk i, and its runs stay where they are.

    Tiles of one level have no row twice: as many as there are chunks have each a chunk.
    """
    if len(tiles) != 1 or max([len(plan.levels) for plan in plans]) > 1:
        return False
    index, only = tiles[0]
    return len(only) == num_chunks and config.shapes[index].persistent


def _tiles(
    requests: Sequence[tuple[int, Plan]],
    positions: Sequence[Int32],
    config: PlannerConfig,
    fields: int,
) -> list[tuple[int, Int]]:
    """Tiles of every kernel that has some, by its index in `config.shapes`."""
    made: list[tuple[int, Int]] = []
    row = page = 0
    for (layer, plan), at in zip(requests, positions, strict=True):
        for depth, level in enumerate(plan.levels):
            mine = level_tiles(layer, at, level, row, page, config, fields)
            if depth and config.splits:  # only a row's first run may be several splits
                how = (config.splits, config.page_size)
                mine = [(index, cut_at_splits(tiles, *how)[0]) for index, tiles in mine]
            made += mine
            page += len(level.kv_indices)
        row += len(plan.positions)
    if len(made) == 1:
        return made
    kernels = sorted({index for index, _ in made})
    return [(index, beside([mine for i, mine in made if i == index])) for index in kernels]


def _order(plans: Sequence[Plan]) -> Int32:
    """Every plan row's row of q and o, rows of a plan counted from the last of the plan before."""
    orders, row = [], 0
    for plan in plans:
        count = len(plan.positions)
        order = np.arange(count, dtype=np.int32) if plan.order is None else plan.order
        orders.append(order + np.int32(row) if row else order)
        row += count
    return _joined(orders)


def _joined(parts: Sequence[Int32]) -> Int32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
