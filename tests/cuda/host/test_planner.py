"""The planner in pure numpy: every visible (row, key) pair once, balanced, merge lists right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import lcm

import numpy as np
import pytest
from flat_plans import decode_plan, flat_level, shared_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.backend import Int32, Level, Plan
from kernels.cuda.plan.cutting import SNAP
from kernels.cuda.plan.planner import BatchWork, make_work
from kernels.cuda.plan.tiles import (
    FINAL,
    HIDE_FUTURE,
    HIDE_WINDOW,
    KEYS,
    NO_SPLITS,
    START,
    PlannerConfig,
    Splits,
    TileShape,
    chunk_rows,
)

NARROW_16 = TileShape("narrow16", 16, 16, 132 * 8, 16, True, 128, teams=(1, 2, 4, 8))
NARROW_32 = TileShape("narrow32", 32, 32, 132 * 8, 16, True, 128, teams=(1, 2, 4, 8))
WIDE = TileShape("wide", 128, 2**30, 132, 64, False, 256, key_seconds=0.25)
SHAPES = (NARROW_16, NARROW_32, WIDE)


def config(
    group: int = 4,
    page_size: int = 16,
    heads: int = 8,
    window: int = -1,
    shapes: tuple[TileShape, ...] = SHAPES,
    team: int | None = None,
    page_bytes: int = 0,
) -> PlannerConfig:
    return PlannerConfig(group, page_size, heads, window, shapes, team, page_bytes)


@pytest.mark.parametrize("first", [0, 64])
@pytest.mark.parametrize("leads", [False, True])
def test_with_fixed_splits_runs_end_there_whatever_else_is_in_the_batch(
    leads: bool, first: int
) -> None:
    fixed = replace(config(group=8, shapes=(WIDE,)), splits=Splits(256, first), leads=leads)
    alone = make_work([(0, decode_plan([5000], 16))], fixed)
    batch = make_work([(0, decode_plan([5000, 700, 30] * 40, 16))], fixed)
    places = sorted({first, *range(0, 5000, 256)})
    for work in (alone, batch):
        begins: dict[int, list[int]] = {}
        for item in work.kernels[0].items.tolist():
            assert item[5] in places, "runs begin at splits"
            begins.setdefault(item[1], []).append(item[5])
            crossed = [place for place in places if item[5] < place < item[5] + item[4]]
            assert not crossed or (leads and item[5] == 0), "only a first run is several splits"
        assert all(min(starts) == 0 for starts in begins.values())
        start_of = {i[7]: i[5] for i in work.kernels[0].items.tolist()}
        for begin, end in pairwise(work.merges.indptr.tolist()):
            starts = [start_of[member] for member in work.merges.members[begin:end].tolist()]
            assert starts == sorted(starts), "states are merged in order of position"
    many = make_work([(0, decode_plan([5000, 700, 30] * 400, 16))], fixed)
    assert (len(many.kernels[0].items) == 1200) == leads, "whole where there are enough"


def int32(*values: int) -> Int32:
    return np.array(values, np.int32)


def expected_pairs(plan: Plan, group: int, page_size: int, window: int) -> set[tuple[int, ...]]:
    """(packed row, page index over all levels, slot) a row must see, by the definitions."""
    pairs, base = set(), 0
    for level in plan.levels:
        for s in range(len(level.kv_start)):
            first, stop = int(level.kv_indptr[s]), int(level.kv_indptr[s + 1])
            keys = max(0, (stop - first - 1) * page_size + int(level.kv_last_page_len[s]))
            for row in range(int(level.qo_indptr[s]), int(level.qo_indptr[s + 1])):
                for key in range(keys):
                    position, own = int(level.kv_start[s]) + key, int(plan.positions[row])
                    if level.causal and position > own:
                        continue
                    if window >= 0 and position < own - window:
                        continue
                    page, slot = base + first + key // page_size, key % page_size
                    pairs |= {(row * group + g, page, slot) for g in range(group)}
        base += len(level.kv_indices)
    return pairs


def planned_pairs(
    work: BatchWork, group: int, page_size: int, window: int
) -> Counter[tuple[int, ...]]:
    """The same, as a kernel that follows the items would see them."""
    pairs: Counter[tuple[int, ...]] = Counter()
    for launch in work.kernels:
        for _, begin, rows, kv_begin, keys, kv_start, hide, _ in launch.items.tolist():
            assert rows <= launch.shape.rows, f"{rows} rows in a tile of {launch.shape}"
            for packed in range(begin, begin + rows):
                own = int(work.positions[packed // group])
                if hide:
                    first = own - kv_start - (window if hide & HIDE_WINDOW else 0)
                    assert first >= -(2**31), "the kernels subtract in 32 bits"
                for key in range(keys):
                    if hide & HIDE_FUTURE and kv_start + key > own:
                        continue
                    if hide & HIDE_WINDOW and kv_start + key < own - window:
                        continue
                    pairs[packed, kv_begin + key // page_size, key % page_size] += 1
    return pairs


def check_merges(work: BatchWork, num_packed: int) -> None:
    """Every packed row is written exactly once: by one final item, or by one merge list."""
    merges, written, members = work.merges, Counter[int](), Counter[int]()
    for launch in work.kernels:
        for item in launch.items.tolist():
            begin, rows, partial = item[1], item[2], item[7]
            for i in range(rows):
                if partial == FINAL:
                    written[begin + i] += 1
                else:
                    members[begin + i, partial + i] += 1
    for m, chunk in enumerate(merges.chunks.tolist()):
        for i in range(merges.chunk_rows):
            row = chunk * merges.chunk_rows + i
            written[row] += 1
            for first in merges.members[merges.indptr[m] : merges.indptr[m + 1]].tolist():
                assert members.pop((row, first + i)) == 1, f"member {first} of row {row}"
                assert first + i < merges.num_partial_rows
    assert not members, f"partial rows that are not merged: {list(members)[:4]}"
    assert written == Counter(range(num_packed))


def check(plan: Plan, p: PlannerConfig) -> BatchWork:
    work = make_work([(0, plan)], p)
    planned = planned_pairs(work, p.group_size, p.page_size, p.window_left)
    assert max(planned.values(), default=1) == 1, "a pair is attended twice"
    expected = expected_pairs(plan, p.group_size, p.page_size, p.window_left)
    assert set(planned) == expected
    check_merges(work, len(plan.positions) * p.group_size)
    return work


@dataclass(frozen=True)
class Tree:
    """A random cascade: levels, positions, in plan order."""

    plan: Plan
    page_size: int


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    page_size = draw(st.sampled_from([1, 3, 16, 64]))
    rows = draw(st.integers(0, 12))
    levels, length = [], np.zeros(rows, np.int64)
    depth = draw(st.integers(1, 3))
    for index in range(depth):
        cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
        indptr = [0, *cuts, rows]
        keys = [draw(st.integers(0, 150)) for _ in indptr[1:]]
        pages = [-(-k // page_size) for k in keys]
        starts = []
        for s, k in enumerate(keys):
            mine = length[indptr[s] : indptr[s + 1]]
            starts.append(int(mine.max(initial=0)))
            length[indptr[s] : indptr[s + 1]] = starts[-1] + k
        levels.append(
            Level(
                qo_indptr=int32(*indptr),
                kv_indptr=np.cumsum([0, *pages]).astype(np.int32),
                kv_indices=np.arange(sum(pages), dtype=np.int32),
                kv_last_page_len=int32(*((k - 1) % page_size + 1 if k else 0 for k in keys)),
                kv_start=int32(*starts),
                causal=index == depth - 1 and draw(st.booleans()),
            )
        )
    back = np.array([draw(st.integers(0, 40)) for _ in range(rows)], np.int64)
    if draw(st.booleans()):  # to the highest positions
        moved = 2**31 - 1 - int(length.max(initial=0))
        levels = [replace(level, kv_start=level.kv_start + np.int32(moved)) for level in levels]
        length += moved + 1
    return Tree(Plan(tuple(levels), (length - 1 - back).astype(np.int32)), page_size)


@settings(max_examples=80, deadline=None)
@given(
    trees(),
    st.sampled_from([1, 4, 7, 16, 24]),
    st.sampled_from([-1, 0, 30, 2**31 - 20, 2**31 - 1]),
    st.sampled_from([1, 8]),
    st.sampled_from([None, 1, 4]),
    st.sampled_from([NO_SPLITS, Splits(1), Splits(4, 1)]),
)
def test_every_visible_pair_is_attended_once_and_every_row_written_once(
    tree: Tree, group: int, window: int, heads: int, team: int | None, splits: Splits
) -> None:
    """Negative positions, and the highest, among them; `splits` in units of 64 keys, in pages."""
    planner = config(group, tree.page_size, heads, window, team=team)
    if splits:
        whole = [tree.page_size * -(-64 * n // tree.page_size) for n in (splits.keys, splits.first)]
        planner = replace(planner, shapes=(WIDE,), splits=Splits(*whole), leads=True)
    check(tree.plan, planner)


@pytest.mark.parametrize("window", [-1, 30, 2**31 - 2, 2**31 - 1])
@pytest.mark.parametrize("first", [-30, -1, 2**31 - 5])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_before_the_first_key_or_at_the_highest_position(
    causal: bool, first: int, window: int
) -> None:
    level = Level(int32(0, 5), int32(0, 3), int32(0, 1, 2), int32(8), int32(0), causal)
    check(Plan((level,), int32(*range(first, first + 5))), config(1, window=window))


@pytest.mark.parametrize("page_size", [5, 16])
def test_a_window_of_fixed_splits_begins_at_a_key_tile_of_its_split(page_size: int) -> None:
    """The keys of a row meet in the same tiles whatever the window, and few hidden ones do."""
    splits = Splits(page_size * -(-2048 // page_size))
    step = lcm(page_size, WIDE.granule)
    plan = decode_plan([30000, 4100, 2047, 90], page_size)
    for window in (0, 128, 2000, 5000):
        planner = replace(config(8, page_size, window=window, shapes=(WIDE,)), splits=splits)
        (launch,) = make_work([(0, plan)], planner).kernels
        seen = launch.items[:, KEYS].sum()
        assert seen <= sum(min(window + 1, n) + step + page_size for n in (30000, 4100, 2047, 90))
        for start in launch.items[:, START].tolist():
            assert (start - start // splits.keys * splits.keys) % step == 0


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    st.sampled_from([1, 5, 16, 64]),
    st.sampled_from([1, 8, 32]),
    st.sampled_from([None, 1, 2, 8]),
)
def test_decode_items_cover_each_sequence_in_order_and_no_worker_is_empty(
    kv_lens: list[int], page_size: int, heads: int, team: int | None
) -> None:
    plan = decode_plan(kv_lens, page_size)
    work = make_work([(0, plan)], config(4, page_size, heads, team=team))
    check_merges(work, len(kv_lens) * 4)
    launch, at = work.kernels[0], dict.fromkeys(range(len(kv_lens)), 0)
    assert launch.worker_begin[0] == 0 and launch.worker_begin[-1] == launch.num_items
    assert (np.diff(launch.worker_begin) > 0).all(), f"idle workers: {launch.worker_begin}"
    assert launch.num_workers * launch.team <= max(launch.team, NARROW_16.workers // heads)
    for _, row, _, kv_begin, keys, kv_start, _, _ in launch.items.tolist():
        sequence = row // 4
        assert kv_start == at[sequence], f"sequence {sequence} has a gap or an overlap"
        assert kv_start % page_size == 0
        first = int(plan.levels[0].kv_indptr[sequence])
        assert kv_begin == first + kv_start // page_size
        at[sequence] += keys
    assert at == dict(enumerate(kv_lens))


def test_narrow_workers_get_equal_shares_of_a_skewed_batch() -> None:
    rng = np.random.default_rng(0)
    kv_lens = np.exp(rng.uniform(np.log(128), np.log(32768), 128)).astype(int).tolist()
    (launch, *_) = make_work([(0, decode_plan(kv_lens))], config()).kernels
    shares = [int(launch.items[a:b, 4].sum()) for a, b in pairwise(launch.worker_begin)]
    assert launch.num_workers == 132
    assert launch.team == 1
    slack = 16 * (1 + max(np.diff(launch.worker_begin)))  # partly filled granules
    most = sum(kv_lens) / 132 * (1 + 2 * SNAP) + slack
    assert max(shares) <= most, f"{max(shares)} of {sum(kv_lens)} keys"


@pytest.mark.parametrize(
    ("batch", "keys", "heads", "team", "workers", "items"),
    [
        (16, 128, 8, 8, 16, 16),
        (1, 32768, 8, 8, 16, 16),
        (1, 131072, 8, 8, 16, 16),
        (64, 4096, 8, 2, 64, 64),
        (256, 1024, 8, 1, 128, 256),
        (64, 4096, 32, 1, 32, 64),
        (8, 8192, 8, 8, 16, 16),
        (1, 16, 8, 1, 1, 1),
        (1, 128, 8, 8, 1, 1),
        (1, 256, 8, 8, 1, 1),
        (1, 1024, 8, 8, 8, 8),
        (8, 1024, 8, 8, 16, 16),
        (12, 1024, 8, 8, 12, 12),
    ],
)
def test_equal_sequences_are_cut_alike_or_not_at_all(
    batch: int, keys: int, heads: int, team: int, workers: int, items: int
) -> None:
    work = make_work([(0, decode_plan([keys] * batch))], config(heads=heads))
    launch = work.kernels[0]
    assert (launch.team, launch.num_workers, launch.num_items) == (team, workers, items)
    assert len(work.merges.chunks) == (batch if items > batch else 0)
    assert len(set(launch.items[:, 4].tolist())) == 1, "runs differ"


def test_sequences_that_share_most_pages_keep_in_step_head_after_head() -> None:
    plan, large = decode_plan([4096 + i for i in range(64)]), config(page_bytes=2**18)
    (apart,) = make_work([(0, plan)], large).kernels
    (shared,) = make_work([(0, shared_pages(plan, 200))], large).kernels
    (few,) = make_work([(0, shared_pages(plan, 20))], large).kernels
    (cached,) = make_work([(0, shared_pages(plan, 200))], config(page_bytes=2**16)).kernels
    assert shared.heads_first and shared.one_each
    assert shared.num_items == 64
    assert not (apart.heads_first or few.heads_first or cached.heads_first)


def test_sequences_of_very_different_lengths_do_not_keep_in_step() -> None:
    plan = decode_plan([4096, *([30000] * 20), *([4096] * 63)])
    (launch,) = make_work([(0, shared_pages(plan, 256))], config(page_bytes=2**18)).kernels
    assert not launch.heads_first


def test_sequences_that_differ_by_a_few_tokens_count_as_equal() -> None:
    kv_lens = [4000 + i for i in range(64)]
    work = make_work([(0, decode_plan(kv_lens))], config())
    assert work.kernels[0].items[:, 4].tolist() == kv_lens
    assert work.merges.num_partial_rows == 0


def test_a_share_that_ends_near_a_sequence_ends_with_it() -> None:
    kv_lens = [16000, 15840, 32000, 48000]  # the first share of two would end 80 keys further on
    shape = TileShape("narrow", 16, 16, 7, 16, True, 128)
    work = make_work([(0, decode_plan(kv_lens))], config(heads=1, shapes=(shape, WIDE)))
    launch = work.kernels[0]
    assert launch.num_workers == 7
    first, second = launch.items[0].tolist(), launch.items[1].tolist()
    assert (first[1], first[4], first[7]) == (0, 16000, FINAL)
    assert (second[1], second[4], second[7]) == (4, 15840, FINAL)


def test_short_sequences_of_any_length_are_not_cut_when_each_has_a_team() -> None:
    kv_lens = [20 + 3 * i for i in range(64)]
    work = make_work([(0, decode_plan(kv_lens))], config())
    assert work.kernels[0].items[:, 4].tolist() == kv_lens
    assert work.kernels[0].num_workers == 64


@pytest.mark.parametrize("unit", [1.0, 0.5])
def test_narrow_work_beside_wide_work_takes_its_share_of_the_device(unit: float) -> None:
    """Whatever unit of time its costs are in."""
    shapes = tuple(replace(one, key_seconds=unit * one.key_seconds) for one in SHAPES)
    shared = flat_level([4096] * 64, 16)
    top = Level(
        int32(0, 64), int32(0, 256), np.arange(256, dtype=np.int32), int32(16), int32(0), False
    )
    plan = Plan((top, shared), np.full(64, 8191, np.int32))
    work = make_work([(0, plan)], config(shapes=shapes))
    narrow, wide = work.kernels
    cost = 2.0 * 2 * 4096 / (64 * 4096 + 2.0 * 2 * 4096)
    assert narrow.num_workers == round(132 * (1 - cost))
    assert wide.num_items >= 2


def test_a_row_that_sees_nothing_gets_an_empty_merge_list() -> None:
    work = make_work([(0, decode_plan([0, 16]))], config())
    assert work.merges.chunks.tolist() == [0]
    assert work.merges.indptr.tolist() == [0, 0]
    nothing = make_work([(0, Plan((), np.zeros(2, np.int32)))], config())
    assert nothing.merges.chunks.tolist() == [0, 1] and not nothing.kernels
    assert (nothing.kv_indices.size, nothing.kv_indices.dtype) == (0, np.int32)


def test_causal_prefill_leaves_out_keys_after_each_tile() -> None:
    level = Level(
        int32(0, 256), int32(0, 16), np.arange(16, dtype=np.int32), int32(16), int32(0), True
    )
    work = make_work([(0, Plan((level,), np.arange(256, dtype=np.int32)))], config(group=1))
    wide = work.kernels[0].items
    keys = {begin: int(wide[wide[:, 1] == begin, 4].sum()) for begin in (0, 128)}
    assert keys == {0: 128, 128: 256}
    assert (np.diff(wide[:, 4]) <= 0).all(), "the dearest item comes first"


def test_a_segment_with_one_visible_key_stays_beside_one_with_none() -> None:
    level = replace(flat_level([16, 16], 16), kv_start=np.array([0, 100], np.int32), causal=True)
    work = make_work([(0, Plan((level,), np.array([0, 50], np.int32)))], config())
    assert work.kernels[0].items[:, 1:5].tolist() == [[0, 4, 0, 1]]


def test_whole_tiles_are_final_though_the_dearest_comes_first() -> None:
    level = replace(flat_level([1024] * 40, 16), qo_indptr=np.arange(41, dtype=np.int32) * 256)
    plan = Plan((replace(level, causal=True),), np.tile(np.arange(768, 1024, dtype=np.int32), 40))
    work = make_work([(0, plan)], config(group=1))
    items = work.kernels[0].items
    assert len(items) == 80 and (np.diff(items[:, 1]) < 0).any(), "tiles are in another order"
    assert (items[:, 7] == FINAL).all()
    assert len(work.merges.chunks) == work.merges.num_partial_rows == 0


@pytest.mark.parametrize(
    ("heads", "together", "at_once"), [(8, 2, 2), (1, 1, 2), (7, 1, 2), (8, 8, 0)]
)
def test_kv_heads_take_turns_in_pairs_where_they_go_up(
    heads: int, together: int, at_once: int
) -> None:
    assert replace(WIDE, heads_at_once=at_once).heads_together(heads) == together


def test_tiles_of_a_single_kv_head_are_not_counted_twice() -> None:
    """1000 rows on 2000 keys, 8 heads on one: 63 tiles of many sizes are cut in two for 132."""
    shapes = (replace(WIDE, heads_at_once=2, item_seconds=2e-6, key_seconds=1.3e-8),)
    pages = np.arange(125, dtype=np.int32)
    level = Level(int32(0, 1000), int32(0, 125), pages, int32(16), int32(0), True)
    plan = Plan((level,), np.arange(1000, 2000, dtype=np.int32))
    (launch,) = make_work([(0, plan)], config(8, 16, 1, shapes=shapes)).kernels
    assert 110 < launch.num_items <= 126


def test_a_plan_is_only_read() -> None:
    plan = decode_plan([17, 0, 5000, 400] * 9)
    arrays = [plan.positions, *(getattr(plan.levels[0], f.name) for f in fields(Level)[:-1])]
    for array in arrays:
        array.flags.writeable = False
    work = make_work([(2, plan), (1, plan)], config(heads=1, window=600))
    assert work.merges.num_partial_rows > 0


def test_requests_of_several_layers_share_one_launch() -> None:
    plans = [(0, decode_plan([40, 50])), (3, decode_plan([20]))]
    work = make_work(plans, config(group=2))
    items = np.concatenate([launch.items for launch in work.kernels])
    assert dict(zip(items[:, 1].tolist(), items[:, 0].tolist(), strict=True)) == {0: 0, 2: 0, 4: 3}
    assert work.order.tolist() == [0, 1, 2]
    assert work.kv_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]


@pytest.mark.parametrize(
    ("group", "expected"), [(1, 1), (4, 4), (7, 7), (8, 8), (16, 16), (24, 12), (32, 16), (17, 1)]
)
def test_chunks_divide_the_group_and_fit_a_tile(group: int, expected: int) -> None:
    assert chunk_rows(group, 16) == expected
