"""Into how many runs to cut tiles whose workers take items as they are free: who ends when.

More runs even out the end, but each is a partial state more for its rows, to be written and merged.
So what a few counts would take is worked out, and the fewest runs that end about as soon as the
best are taken.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import numpy as np

from kernels.cuda.plan.costs import H200
from kernels.cuda.plan.tiles import Int

ROUNDS: Final = 4
"""How often, at most, runs are meant to go round the workers."""
AS_SOON: Final = 1.03
"""Fewer runs are taken where they end this much later at most."""
AHEAD: Final = 2
"""Units between the one that the wide kernel begins and the one that it takes then."""


@dataclass(frozen=True, slots=True)
class TileQueue:
    """Tiles, and the workers that take them as they are free.

    `sizes`: in granules, longest first, and how many tiles have each; all of it comes `turns`
    times, for other heads each time. `free`: when workers are, in seconds from the start, and how
    many, the first of them at once; `rows` are a tile's, which are merged anyway if `merged`.
    `item_seconds` is a worker's time per item, `granule_seconds` its time per granule,
    `partial_seconds` what a row's partial state costs. `ahead`: workers take items before they
    begin them.
    """

    sizes: list[tuple[int, int]]
    turns: int
    free: list[tuple[float, int]]
    rows: int
    merged: bool
    item_seconds: float
    granule_seconds: float
    partial_seconds: float = H200.partial
    ahead: bool = False

    @property
    def longest(self) -> int:
        return self.sizes[0][0]


def sizes_of(tiles: Int, longest: int) -> list[tuple[int, int]]:
    """`TileQueue.sizes` of one head's tiles, sizes rounded up to a sixteenth of the longest."""
    step = -(longest // -16)
    counts = np.bincount(-(tiles // -step)).tolist()
    return [(i * step, count) for i, count in reversed(list(enumerate(counts))) if count]


def pieces(queue: TileQueue, most: int) -> tuple[int, float]:
    """How many runs to make of the longest tiles, at most `most`, and when the last is done.

    No other tile's runs are longer.

    Tiles of one size: as many as fill some rounds of the workers. Others: as many as bring the
    longest down to what makes a few rounds.
    """
    workers = sum(count for _, count in queue.free)
    tiles = queue.turns * sum(count for _, count in queue.sizes)
    if len(queue.sizes) == 1:
        wanted = {
            rounds * filled // tiles
            for rounds in range(1, ROUNDS + 1)
            for filled in (queue.free[0][1], workers)
        }
    else:
        granules = queue.turns * sum(size * count for size, count in queue.sizes)
        round_of = workers * queue.longest
        wanted = {2, 3, *(-(n * round_of // -granules) for n in range(1, ROUNDS + 1))}
    choices = sorted({1, *(max(1, min(count, most)) for count in wanted)})
    ends = [seconds(queue, -(queue.longest // -count)) for count in choices]
    soon = min(ends) * AS_SOON
    return next(made for made in zip(choices, ends, strict=True) if made[1] <= soon)


def seconds(queue: TileQueue, most: int) -> float:
    """How long the tiles take, cut to runs of at most `most` granules, the longest first."""
    runs, partial = [], 0
    for size, count in queue.sizes:
        cut = -(size // -most)
        runs.append((-(size // -cut) * queue.granule_seconds + queue.item_seconds, count * cut))
        partial += queue.turns * count * cut if cut > 1 or queue.merged else 0
    runs.sort(reverse=True)
    end = last_end(runs * queue.turns, queue.free)
    if queue.ahead:  # which worker has the longest of them is chance: between the best and worst
        end = (end + last_end(runs * queue.turns, queue.free, AHEAD)) / 2
    return end + merge_seconds(partial * queue.rows, queue.partial_seconds)


def last_end(runs: list[tuple[float, int]], free: list[tuple[float, int]], ahead: int = 0) -> float:
    """When the last of runs is done that are taken in order: each one's cost, and how many.

    A worker takes each run when it begins the one `ahead` runs before.
    """
    order, end = itertools.count(), 0.0
    # when workers take their next run, in which order; when they begin that and those before; count
    queue = [(start, next(order), (start,) * (ahead + 1), workers) for start, workers in free]
    for cost, left in runs:
        while left:
            takes, turn, begins, workers = heappop(queue)
            taken = min(workers, left)
            left -= taken
            after = (begins[0] + cost, *begins[:-1])
            end = max(end, after[0])
            heappush(queue, (after[-1], next(order), after, taken))
            if taken < workers:
                heappush(queue, (takes, turn, begins, workers - taken))
    return end


def merge_seconds(partial_rows: int, seconds: float = H200.partial) -> float:
    """The cost of the partial states of rows, with their merge."""
    return partial_rows * seconds + (H200.merge if partial_rows else 0.0)
