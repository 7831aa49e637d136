"""Into how many runs many-row tiles are cut, and the estimate of the end that decides it."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cuda.plan.costs import H200
from kernels.cuda.plan.rounds import (
    TileQueue,
    last_end,
    pieces,
    seconds,
    sizes_of,
)

GRANULE = 1.8e-6
ITEM = 2e-6
ALL = [(0.0, 130)]


def queue(
    sizes: list[tuple[int, int]],
    free: list[tuple[float, int]] = ALL,
    turns: int = 1,
    merged: bool = False,
) -> TileQueue:
    return TileQueue(sizes, turns, free, 128, merged, ITEM, GRANULE)


def many(given: TileQueue, most: int) -> int:
    return pieces(given, most)[0]


def taken_one_by_one(given: TileQueue, most: int) -> float:
    """The same end, each run by itself given to the worker that is free first."""
    turn, partial = [], 0
    for size, count in given.sizes:
        cut = -(-size // most)
        turn += [-(-size // cut)] * (count * cut)
        partial += given.turns * count * cut if cut > 1 or given.merged else 0
    free = [at for at, count in given.free for _ in range(count)]
    heapq.heapify(free)
    end = 0.0
    for size in sorted(turn, reverse=True) * given.turns:
        done = heapq.heappop(free) + size * given.granule_seconds + given.item_seconds
        heapq.heappush(free, done)
        end = max(end, done)
    merging = partial * given.rows * H200.partial + (H200.merge if partial else 0.0)
    return end + merging


SIZES = st.dictionaries(st.integers(1, 60), st.integers(1, 40), min_size=1, max_size=4)


@given(
    SIZES,
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from([0.0, 2e-5, 9e-5]), st.integers(1, 50)), max_size=2),
    st.integers(1, 60),
)
def test_the_end_is_that_of_dealing_runs_one_by_one(
    sizes: dict[int, int], turns: int, later: list[tuple[float, int]], most: int
) -> None:
    given = queue(sorted(sizes.items(), reverse=True), sorted([(0.0, 7), *later]), turns)
    assert seconds(given, most) == pytest.approx(taken_one_by_one(given, most), rel=1e-9)


@pytest.mark.parametrize(("ahead", "end"), [(0, 10.0), (1, 11.0), (2, 12.0)])
def test_runs_taken_ahead_wait_behind_a_long_one(ahead: int, end: float) -> None:
    assert last_end([(10.0, 1), (1.0, 4)], [(0.0, 2)], ahead) == end


def test_one_tile_is_cut_for_all_the_workers_as_far_as_runs_are_worth_it() -> None:
    assert many(queue([(2560, 1)]), 1280) == 130
    assert many(queue([(64, 1)]), 32) == 32
    assert many(queue([(1, 1)]), 0) == 1


def test_tiles_of_many_sizes_stay_whole_or_make_a_few_rounds() -> None:
    short = [(8, 8), (7, 8), (6, 8), (5, 8), (4, 8), (3, 8), (2, 8), (1, 8)]
    assert many(queue(short, turns=4), 4) == 1
    assert many(queue([(128, 8), (16, 16)], [(0.0, 99), (9e-5, 31)], turns=4), 64) == 7


def test_sizes_are_counted_longest_first_to_a_sixteenth_of_the_longest() -> None:
    tiles = np.array([64, 1, 64, 57, 8, 9], np.int32)
    assert sizes_of(tiles, 64) == [(64, 2), (60, 1), (12, 1), (8, 1), (4, 1)]
    assert sizes_of(np.array([3, 3], np.int32), 3) == [(3, 2)]
