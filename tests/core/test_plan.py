"""Plans: the levels of a batch, spelled out for known trees and expanded for random ones."""

from __future__ import annotations

import numpy as np
import pytest
from core_pool import TokenPool, int32
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.errors import InvalidRequest, UnknownSequence
from service.core.plans.levels import CascadeLevel
from service.core.plans.plan import explicit_levels, make_plan
from service.core.values import NewSpec

MODES = ("auto", "always", "never")


def rows(count: int) -> np.ndarray:
    """qo_indptr of `count` sequences with one row each."""
    return np.arange(count + 1, dtype=np.int32)


def spelled(level: CascadeLevel) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """qo_indptr, kv_indptr, kv_indices, kv_last_page_len, kv_start."""
    for array in (level.qo_indptr, level.kv_indptr, level.kv_indices, level.kv_last_page_len):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    return (
        level.qo_indptr.tolist(),
        level.kv_indptr.tolist(),
        level.kv_indices.tolist(),
        level.kv_last_page_len.tolist(),
        level.kv_start.tolist(),
    )


@pytest.fixture
def figure() -> TokenPool:
    """Eight requests in three levels: one root, three nodes under it, eight leaves.

    Pages of 4: the root is pages 0, 1; the nodes are page 2 (requests 0-2), pages 3, 4 (requests
    3, 4) and page 5 (requests 5-7); request i has i of its own tokens, from page 6 on.
    """
    pool = TokenPool(num_pages=32, page_size=4)
    pool.start("root", range(8))
    for name, count in [("left", 4), ("middle", 8), ("right", 4)]:
        pool.fork(name, "root")
        pool.append(name, range(100, 100 + count))
    for i, parent in enumerate(["left"] * 3 + ["middle"] * 2 + ["right"] * 3):
        pool.fork(f"r{i}", parent)
        pool.append(f"r{i}", range(1000 * i, 1000 * i + i))
    pool.tree.free(["root", "left", "middle", "right"])
    return pool


REQUESTS = [f"r{i}" for i in range(8)]


def test_eight_requests_in_three_levels_give_the_arrays_of_the_documents(figure) -> None:
    plan = make_plan(figure.tree, REQUESTS, 0, rows(8), False, "always")
    assert plan.is_cascade
    assert plan.order is None
    assert [spelled(level) for level in plan.levels] == [
        ([0, 8], [0, 2], [0, 1], [4], [0]),
        ([0, 3, 5, 8], [0, 1, 3, 4], [2, 3, 4, 5], [4, 4, 4], [8, 8, 8]),
        (
            [0, 1, 2, 3, 4, 5, 6, 7, 8],
            [0, 0, 1, 2, 3, 4, 6, 8, 10],
            [6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
            [0, 1, 2, 3, 4, 1, 2, 3],
            [12, 12, 12, 16, 16, 12, 12, 12],
        ),
    ]
    assert plan.positions.tolist() == [11, 12, 13, 18, 19, 16, 17, 18]
    assert plan.tokens_read == 8 + (4 + 8 + 4) + 28
    assert plan.tokens_flat == 8 * 8 + 3 * 4 + 2 * 8 + 3 * 4 + 28


def test_rows_are_put_in_an_order_where_each_subtree_is_contiguous(figure) -> None:
    mixed = ["r5", "r0", "r3", "r6", "r1", "r4", "r7", "r2"]
    plan = make_plan(figure.tree, mixed, 0, int32(0, 2, 3, 3, 4, 5, 6, 7, 8), False, "always")
    assert plan.order is not None
    assert plan.order.tolist() == [0, 1, 3, 6, 2, 4, 7, 5]
    assert plan.levels[0].qo_indptr.tolist() == [0, 8]
    assert plan.levels[1].qo_indptr.tolist() == [0, 4, 7, 8]
    assert plan.levels[1].kv_indices.tolist() == [5, 2, 3, 4]
    assert plan.levels[2].qo_indptr.tolist() == [0, 2, 3, 4, 5, 6, 7, 7, 8]


def test_never_gives_the_flat_table(figure) -> None:
    plan = make_plan(figure.tree, REQUESTS, 0, rows(8), True, "never")
    table = figure.tree.page_table(REQUESTS, 0)
    assert (plan.num_levels, plan.is_cascade, plan.order) == (1, False, None)
    assert plan.levels[0].kv_indptr.tolist() == table.kv_indptr.tolist()
    assert plan.levels[0].kv_indices.tolist() == table.kv_indices.tolist()
    assert plan.levels[0].kv_last_page_len.tolist() == table.kv_last_page_len.tolist()
    assert plan.tokens_read == plan.tokens_flat


def test_auto_folds_what_saves_too_little_and_keeps_what_saves_enough() -> None:
    pool = TokenPool(num_pages=200, page_size=4)
    pool.start("root", range(160))
    pool.start("small", range(8))
    pool.create(*(NewSpec(f"{p}{i}", p) for p in ("root", "small") for i in range(2)))
    ids = ["root0", "small0", "root1", "small1"]
    for name in ids:
        pool.append(name, [1])
    always = make_plan(pool.tree, ids, 0, rows(4), True, "always")
    assert spelled(always.levels[0])[3:] == ([4, 4], [0, 0])
    auto = make_plan(pool.tree, ids, 0, rows(4), True, "auto")
    assert auto.is_cascade
    assert auto.levels[0].qo_indptr.tolist() == [0, 2, 3, 4]
    assert auto.levels[0].kv_last_page_len.tolist() == [4, 1, 1], "small is flat, at level 0"
    assert auto.levels[1].qo_indptr.tolist() == [0, 1, 2, 4]
    assert auto.levels[1].kv_last_page_len.tolist() == [1, 1, 0]
    flat = make_plan(pool.tree, ["small0", "small1"], 0, rows(2), True, "auto")
    assert (flat.num_levels, flat.is_cascade) == (1, False)


def test_sequences_without_rows_do_not_make_sharing_worth_while() -> None:
    pool = TokenPool(num_pages=200, page_size=4)
    pool.start("a", range(400))
    pool.create(NewSpec("b", "a"), NewSpec("c", "a"))
    pool.append("b", [1])
    ids = ["a", "b", "c"]
    assert make_plan(pool.tree, ids, 0, int32(0, 1, 2, 2), True, "auto").is_cascade
    plan = make_plan(pool.tree, ids, 0, int32(0, 0, 2, 2), True, "auto")
    assert not plan.is_cascade
    assert plan.tokens_read == plan.tokens_flat == 401


def test_auto_makes_few_levels_of_a_chain_of_forks_and_still_reads_little() -> None:
    pool = TokenPool(num_pages=2000, page_size=16)
    pool.start("s0", range(64))
    for i in range(1, 100):
        pool.fork(f"s{i}", f"s{i - 1}")
        pool.append(f"s{i}", range(64))
    ids = [f"s{i}" for i in range(100)]
    auto = make_plan(pool.tree, ids, 0, rows(100), True, "auto")
    assert make_plan(pool.tree, ids, 0, rows(100), True, "always").num_levels == 100
    assert auto.num_levels <= 25, "each level must save more than it costs"
    assert auto.tokens_read < auto.tokens_flat / 5


def test_nodes_that_the_batch_sees_alike_are_one_segment() -> None:
    pool = TokenPool(num_pages=64, page_size=4)
    pool.start("a", range(16))
    for length in (4, 8, 12):
        pool.fork(f"other{length}", "a", length)
    pool.fork("b", "a")
    pool.append("b", [1])
    assert pool.tree.links.count == 4
    plan = make_plan(pool.tree, ["a", "b"], 0, rows(2), True, "always")
    assert spelled(plan.levels[0]) == ([0, 2], [0, 4], [0, 1, 2, 3], [4], [0])
    assert spelled(plan.levels[1]) == ([0, 1, 2], [0, 0, 1], [4], [0, 1], [16, 16])
    alone = make_plan(pool.tree, ["b"], 0, rows(1), True, "always")
    assert spelled(alone.levels[0]) == ([0, 1], [0, 5], [0, 1, 2, 3, 4], [1], [0])


def test_sequences_with_nothing_of_their_own_need_one_level_that_is_still_shared() -> None:
    pool = TokenPool(num_pages=64, page_size=4)
    pool.start("a", range(16))
    pool.fork("b", "a")
    plan = make_plan(pool.tree, ["a", "b"], 0, rows(2), True, "always")
    assert (plan.num_levels, plan.is_cascade) == (1, True)
    assert (plan.tokens_read, plan.tokens_flat) == (16, 32)


def test_a_layer_behind_the_others_uses_its_own_lengths() -> None:
    pool = TokenPool(num_pages=64, page_size=4, num_layers=2)
    pool.start("a", range(8))
    pool.fork("b", "a")
    pool.append("b", range(8, 19), layers=[0])
    pool.append("b", range(8, 11), layers=[1])
    plan = make_plan(pool.tree, ["a", "b"], 1, rows(2), True, "always")
    assert plan.levels[1].kv_last_page_len.tolist() == [0, 3]
    assert plan.positions.tolist() == [7, 10]


def test_a_level_is_causal_only_where_it_has_keys_to_hide() -> None:
    pool = TokenPool(num_pages=64, page_size=4)
    pool.start("a", range(8))
    pool.create(NewSpec("b", "a"), NewSpec("c", "a"))
    pool.append("b", range(4))
    pool.append("c", range(4))
    for qo_len, expected in [(1, [False, False]), (4, [False, True]), (6, [True, True])]:
        plan = make_plan(pool.tree, ["b", "c"], 0, int32(0, qo_len, 2 * qo_len), True, "always")
        assert [level.causal for level in plan.levels] == expected, f"{qo_len} rows"
    plan = make_plan(pool.tree, ["b", "c"], 0, int32(0, 6, 12), False, "always")
    assert [level.causal for level in plan.levels] == [False, False]


def test_more_queries_than_keys_have_negative_positions() -> None:
    pool = TokenPool()
    pool.start("a", range(2))
    pool.create(NewSpec("e"))
    plan = make_plan(pool.tree, ["a", "e"], 0, int32(0, 4, 6), True, "auto")
    assert plan.positions.tolist() == [-2, -1, 0, 1, -2, -1]
    assert plan.levels[0].causal
    assert plan.levels[0].kv_last_page_len.tolist() == [2, 0]


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_and_an_empty_sequence_can_be_planned(mode) -> None:
    pool = TokenPool()
    plan = make_plan(pool.tree, [], 0, int32(0), True, mode)
    assert (plan.num_levels, plan.positions.size, plan.levels[0].qo_indptr.tolist()) == (1, 0, [0])
    pool.create(NewSpec("a"))
    plan = make_plan(pool.tree, ["a"], 0, int32(0, 1), True, mode)
    assert spelled(plan.levels[0]) == ([0, 1], [0, 0], [], [0], [0])
    assert plan.positions.tolist() == [-1]
    with pytest.raises(UnknownSequence):
        make_plan(pool.tree, ["x"], 0, int32(0, 1), True, mode)


def test_a_long_chain_of_forks_is_planned_without_recursion() -> None:
    pool = TokenPool(num_pages=3000, page_size=1)
    pool.start("s0", [0])
    for i in range(1, 1200):
        pool.fork(f"s{i}", f"s{i - 1}")
        pool.append(f"s{i}", [i])
    ids = ["s0", "s600", "s1199"]
    plan = make_plan(pool.tree, ids, 0, rows(3), True, "always")
    assert [level.kv_indices.size for level in plan.levels] == [1, 600, 599]
    assert pool.tree.links.count == 1199


# Any forest, any batch.

PARENTS = st.none() | st.integers(0, 9)
FOREST = st.lists(st.tuples(PARENTS, st.floats(0, 1), st.integers(0, 40)), min_size=1, max_size=9)


def grow(forest: list[tuple[int | None, float, int]], page_size: int) -> TokenPool:
    """Sequence i forks one made before it at a fraction of its length, then grows by a count."""
    pool = TokenPool(num_pages=400, page_size=page_size)
    for i, (parent, fraction, count) in enumerate(forest):
        if parent is None or i == 0:
            pool.create(NewSpec(f"s{i}"))
        else:
            length = pool.tree.describe(f"s{parent % i}").length
            pool.fork(f"s{i}", f"s{parent % i}", round(fraction * length))
        pool.append(f"s{i}", range(1000 * i, 1000 * i + count))
    return pool


@settings(max_examples=300, deadline=None)
@given(
    forest=FOREST, page_size=st.sampled_from([1, 2, 5, 16]), causal=st.booleans(), data=st.data()
)
def test_every_row_sees_every_token_once_and_in_order_in_every_mode(
    forest, page_size, causal, data
) -> None:
    pool = grow(forest, page_size)
    every = [f"s{i}" for i in range(len(forest))]
    ids = data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=12), label="ids")
    qo_lens = data.draw(st.lists(st.integers(0, 4), min_size=len(ids), max_size=len(ids)))
    qo_indptr = int32(0, *np.cumsum(qo_lens))
    expected = []
    for name, qo_len in zip(ids, qo_lens, strict=True):
        tokens = list(map(list, enumerate(pool.read(name))))
        for i in range(qo_len):
            visible = len(tokens) - qo_len + i + 1
            expected.append(tokens[: max(visible, 0)] if causal else tokens)
    read = {}
    for mode in MODES:
        plan = make_plan(pool.tree, ids, 0, qo_indptr, causal, mode)
        assert pool.expand(plan, causal) == expected, mode
        if plan.order is not None:
            assert sorted(plan.order.tolist()) == list(range(plan.positions.size)), mode
        read[mode] = plan.tokens_read
        assert plan.tokens_flat == sum(
            len(pool.read(name)) for name, qo_len in zip(ids, qo_lens, strict=True) if qo_len
        )
    assert read["always"] <= read["auto"] <= read["never"] == plan.tokens_flat


# Explicit levels.


@pytest.fixture
def documents() -> TokenPool:
    """Sequences that have nothing in common, and `b`, a fork of `a`."""
    pool = TokenPool(num_pages=64, page_size=4)
    for name, count in [("a", 9), ("x", 5), ("y", 3), ("z", 4)]:
        pool.start(name, range(count))
    pool.fork("b", "a")
    pool.create(NewSpec("empty"))
    return pool


def test_explicit_levels_attend_whole_sequences_and_only_the_last_is_causal(documents) -> None:
    levels = [(["a"], int32(0, 4)), (["x", "y"], int32(0, 2, 4))]
    plan = explicit_levels(documents.tree, 0, levels, True)
    first, last = plan.levels
    assert first.kv_start.max() == last.kv_start.max() == 0
    assert [level.causal for level in plan.levels] == [False, True]
    assert plan.positions.tolist() == [3, 4, 1, 2], "5 - 2, then 3 - 2"
    assert plan.is_cascade
    seen = documents.expand(plan, False)
    assert [len(row) for row in seen] == [9 + 4, 9 + 5, 9 + 2, 9 + 3]
    assert (plan.tokens_read, plan.tokens_flat) == (9 + 5 + 3, 9 + 5 + 9 + 3)


def test_one_explicit_level_is_no_cascade(documents) -> None:
    plan = explicit_levels(documents.tree, 0, [(["a", "b"], int32(0, 1, 2))], True)
    assert (plan.num_levels, plan.is_cascade) == (1, False)


def test_rows_that_a_level_leaves_out_see_nothing_there(documents) -> None:
    levels = [(["x"], int32(1, 2)), (["y", "empty"], int32(0, 2, 3))]
    plan = explicit_levels(documents.tree, 0, levels, False, num_rows=4)
    assert plan.levels[0].qo_indptr[-1] == 4
    assert [len(row) for row in documents.expand(plan, False)] == [3, 3 + 5, 0, 0]
    assert (plan.tokens_read, plan.tokens_flat) == (8, 3 + 8)


@pytest.mark.parametrize(
    ("levels", "row"),
    [
        ([(["a"], int32(0, 2)), (["x", "a"], int32(0, 1, 2))], 1),
        ([(["a"], int32(0, 2)), (["b", "x"], int32(0, 1, 2))], 0),
        ([(["x"], int32(0, 2)), (["y"], int32(0, 2)), (["z", "x"], int32(0, 1, 2))], 1),
    ],
)
def test_a_row_must_not_see_a_page_by_two_levels(documents, levels, row) -> None:
    with pytest.raises(InvalidRequest, match=f"row {row}") as refused:
        explicit_levels(documents.tree, 0, levels, False)
    assert refused.value.field == "levels"


def test_levels_may_share_pages_where_no_row_sees_them_twice(documents) -> None:
    levels = [(["a", "x"], int32(0, 1, 2)), (["y", "b"], int32(0, 1, 2))]
    plan = explicit_levels(documents.tree, 0, levels, False)
    assert [len(row) for row in documents.expand(plan, False)] == [9 + 3, 5 + 9]
    twice_nothing = [(["empty"], int32(0, 1)), (["empty"], int32(0, 1))]
    assert explicit_levels(documents.tree, 0, twice_nothing, False).tokens_read == 0
