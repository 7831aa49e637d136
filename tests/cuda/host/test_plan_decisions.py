"""Single decisions of the planner, which whole plans hide: they cost time, or bits, not rows.

Merge lists made from tile cuts equal the lists of the runs themselves.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from flat_plans import decode_plan, flat_level

from kernels.backend import Plan
from kernels.cuda.plan.merges import merge_lists
from kernels.cuda.plan.planner import make_work
from kernels.cuda.plan.runs import whole_each
from kernels.cuda.plan.tiles import (
    FIELDS,
    FINAL,
    GREATEST,
    HIDE_FUTURE,
    KEYS,
    LEAST,
    PARTIAL,
    ROWS,
    RULES,
    START,
    PlannerConfig,
    Splits,
    TileShape,
    keep_rules,
)

NARROW = TileShape("narrow", 16, 16, 132 * 8, 16, True, 128, teams=(1, 2, 4, 8))
WIDE = TileShape("wide", 128, 2**30, 132, 64, False, 256, key_seconds=0.25)
PAGE = 16


@pytest.mark.parametrize("window", [0, 1, 31, 100, 999, 2000])
@pytest.mark.parametrize("split_keys", [0, 256])
def test_pages_left_of_every_window_are_left_out(window: int, split_keys: int) -> None:
    """With fixed splits, whole key tiles of the split."""
    length = 1000
    config = PlannerConfig(4, PAGE, 8, window, (WIDE,), splits=Splits(split_keys))
    items = make_work([(0, decode_plan([length], PAGE))], config).kernels[0].items
    step = WIDE.granule if split_keys else PAGE
    first = max(length - 1 - window, 0) // step * step
    assert items[:, START].min() == first
    assert items[:, KEYS].sum() == length - first


def test_windows_begin_at_splits_of_sequences_whose_level_does_not() -> None:
    """A level from token 40 on, in pages of 16, and splits of 64: the next page is at 72."""
    level = replace(flat_level([200], PAGE), kv_start=np.array([40], np.int32))
    config = PlannerConfig(4, PAGE, 8, 150, (WIDE,), splits=Splits(64))
    work = make_work([(0, Plan((level,), np.array([239], np.int32)))], config)
    assert sorted(work.kernels[0].items[:, START].tolist()) == [72, 136, 200]
    level = replace(flat_level([33], PAGE), kv_start=np.array([40], np.int32))
    plain = PlannerConfig(4, PAGE, 8, -1, (WIDE,), splits=Splits(64))
    work = make_work([(0, Plan((level,), np.array([72], np.int32)))], plain)
    assert sorted(work.kernels[0].items[:, START].tolist()) == [40, 72], "its last page begins late"


def test_all_levels_of_a_cascade_are_cut_at_splits() -> None:
    shared, own = flat_level([1024], PAGE), flat_level([300, 700], PAGE)
    shared = replace(shared, qo_indptr=np.array([0, 2], np.int32))
    own = replace(own, kv_start=np.array([1024, 1024], np.int32))
    config = PlannerConfig(4, PAGE, 8, -1, (WIDE,), splits=Splits(256), leads=True)
    plan = Plan((shared, own), np.array([1323, 1723], np.int32))
    items = make_work([(0, plan)], config).kernels[0].items
    later = items[items[:, START] >= 1024]
    assert sorted(later[:, START].tolist()) == [1024, 1024, 1280, 1280, 1536]
    assert later[:, KEYS].max() == 256


@pytest.mark.parametrize("own_first", [False, True])
def test_few_rows_and_many_have_their_runs_apart_and_merge_by_position(own_first: bool) -> None:
    """Levels come in any order of widths; 7 / 8 of the workers have the tiles of many rows."""
    few = replace(WIDE, rows=64, most_rows=64, workers=264)
    config = PlannerConfig(4, PAGE, 8, -1, (few, WIDE), splits=Splits(256), leads=True)
    shared, own = flat_level([5000], PAGE), flat_level([600] * 100, PAGE)
    shared = replace(shared, qo_indptr=np.array([0, 100], np.int32))
    first, second = (own, shared) if own_first else (shared, own)
    keys = 608 if own_first else 5008
    second = replace(second, kv_start=np.full(len(second.kv_start), keys, np.int32))
    plan = Plan((first, second), np.full(100, 5607, np.int32))
    work = make_work([(0, plan)], config)
    assert [launch.index for launch in work.kernels] == [1, 0], "many rows first"
    assert [launch.shape.workers for launch in work.kernels] == [116, 264]
    assert not work.kernels[1].joins
    places = []
    for launch in work.kernels:
        for item in launch.items.tolist():
            places += [(item[PARTIAL] + i, item[START]) for i in range(0, item[ROWS], 4)]
    assert sorted(row for row, _ in places) == [*range(0, work.merges.num_partial_rows, 4)]
    start_of = dict(places)
    for begin, end in pairwise(work.merges.indptr.tolist()):
        starts = [start_of[member] for member in work.merges.members[begin:end].tolist()]
        assert starts == sorted(starts)
        assert len(starts) > 3


def test_runs_keep_a_rule_only_where_a_row_needs_it() -> None:
    """Keys 0 to 99: seen by all from position 99 on, and with a window of 50 by none beyond 50."""
    runs = np.zeros((4, FIELDS), np.int32)
    runs[:, KEYS], runs[:, RULES] = 100, HIDE_FUTURE
    runs[:, LEAST], runs[:, GREATEST] = (98, 99, 20, 99), (98, 99, 50, 99)
    keep_rules(runs, -1)
    assert runs[:, RULES].tolist() == [1, 0, 1, 0]
    keep_rules(runs, 50)
    assert runs[:, RULES].tolist() == [3, 2, 1, 2]


@pytest.mark.parametrize(
    ("num_tiles", "teams", "busy", "each"),
    [
        pytest.param(100, 100, 0.95, 1, id="one each"),
        pytest.param(200, 100, 0.95, 2, id="two each"),
        pytest.param(95, 100, 0.95, 1, id="just enough are busy"),
        pytest.param(94, 100, 0.95, 0, id="teams are idle"),
        pytest.param(130, 100, 0.5, 2, id="half of the teams suffice"),
        pytest.param(130, 100, 0.95, 0, id="a third is idle"),
        pytest.param(10, 3, 0.95, 0, id="the last has too few"),
    ],
)
def test_whole_tiles_are_shared_out_where_no_team_is_idle(
    num_tiles: int, teams: int, busy: float, each: int
) -> None:
    assert whole_each(num_tiles, teams, busy) == each


@pytest.mark.parametrize(("team", "expected"), [(None, (1, 132, 528)), (2, (2, 66, 528))])
def test_equal_tiles_go_whole_to_teams_that_fill_the_device(
    team: int | None, expected: tuple[int, ...]
) -> None:
    """528 sequences for 132 workers of a kv head; the smallest teams unless others are wanted."""
    config = PlannerConfig(4, PAGE, 8, -1, (NARROW,), team)
    (narrow,) = make_work([(0, decode_plan([4096] * 528, PAGE))], config).kernels
    assert (narrow.team, narrow.num_workers, narrow.num_items) == expected


@pytest.mark.parametrize(("kv_len", "runs"), [(32_768, 16), (30_000, 16), (40_000, 21)])
def test_the_first_splits_are_one_run_where_that_lets_all_runs_begin_at_once(
    kv_len: int, runs: int
) -> None:
    """132 workers are 16 runs of eight heads."""
    config = PlannerConfig(4, PAGE, 8, -1, (WIDE,), splits=Splits(2048, 1024), leads=True)
    (wide,) = make_work([(0, decode_plan([kv_len], PAGE))], config).kernels
    assert wide.num_items == runs and wide.joins == (kv_len == 32_768)


@pytest.mark.parametrize(
    ("kv_lens", "is_uneven"), [([4096] * 200, False), ([20_000, *[256] * 200], True)]
)
def test_the_longest_of_all_heads_come_first_where_runs_are_uneven(
    kv_lens: list[int], is_uneven: bool
) -> None:
    config = PlannerConfig(8, PAGE, 8, -1, (WIDE,), splits=Splits(256), leads=True)
    (wide,) = make_work([(0, decode_plan(kv_lens, PAGE))], config).kernels
    assert wide.all_heads == is_uneven


@pytest.mark.parametrize(
    "kv_lens",
    [
        pytest.param([100, 100], id="whole"),
        pytest.param([1000], id="one sequence"),
        pytest.param([9000] * 3, id="cut alike"),
        pytest.param([4000, 17, 900], id="few"),
        pytest.param([40_000, 3000, 40_000, 17], id="skewed"),
        pytest.param(list(range(100, 3000, 10)), id="many"),
    ],
)
def test_merge_lists_of_cuts_are_those_gathered_from_the_runs(kv_lens: list[int]) -> None:
    config = PlannerConfig(4, PAGE, 8, -1, (NARROW, WIDE))
    work = make_work([(0, decode_plan(kv_lens))], config)
    (launch,) = work.kernels
    runs = launch.items.copy()
    runs[:, PARTIAL] = FINAL
    gathered = merge_lists(runs, len(kv_lens) * config.group_size, config.chunk)
    assert runs.tolist() == launch.items.tolist()
    for name in ("chunks", "indptr", "members"):
        assert getattr(work.merges, name).tolist() == getattr(gathered, name).tolist(), name
    assert gathered.longest == max([0, *np.diff(gathered.indptr).tolist()])
    assert not len(gathered.chunks) or work.merges.longest == gathered.longest
