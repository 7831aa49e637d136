"""Layer groups: satellites of leading pages, windows that return pages, and what they hold."""

from __future__ import annotations

import numpy as np
import pytest
from core_pool import EMPTY, TokenPool, int32

from service.core.errors import InvalidRequest, OutOfPages, WindowReturned
from service.core.plans.plan import explicit_levels, make_plan
from service.core.pool.satellites import GroupShape
from service.core.values import NewSpec

FULL, SMALL = GroupShape((0, 3), 4), GroupShape((2,), 2)


def windowed(window: int, size: int = 2) -> GroupShape:
    return GroupShape((1,), size, window)


def pool_of(window: int = 6, num_pages: int = 400, slack: int = 0) -> TokenPool:
    """A leading group, one with a window, whose pages are a half, and a second one without."""
    shapes = [windowed(window), FULL, SMALL]
    return TokenPool(num_pages, 4, 4, shapes, slack)


def settle(pool: TokenPool, *names: str) -> None:
    assert pool.tree.windows is not None
    pool.tree.windows.settle([pool.tree.books.leaf(name) for name in names])
    pool.poison()
    pool.tree.check_integrity()


def used(pool: TokenPool) -> int:
    return pool.tree.allocator.num_pages - pool.tree.allocator.num_free


def test_every_group_reads_its_own_pages_back() -> None:
    pool = pool_of()
    pool.start("a", range(9))
    pool.fork("b", "a", 7)
    pool.append("b", [50, 51, 52])
    for layer in range(4):
        assert pool.read_slots("a", layer) == [*range(9)]
        assert pool.read_slots("b", layer) == [*range(7), 50, 51, 52]
    assert used(pool) == (3 + 2) * (1 + 2 + 2)  # a page of each is shared
    pool.tree.check_integrity()


def test_a_group_without_a_window_has_the_same_levels_as_the_leading_one() -> None:
    pool = pool_of()
    pool.start("a", range(13))
    pool.fork("b", "a")
    pool.append("b", [70])
    rows = int32(0, 1, 2)
    plans = [make_plan(pool.tree, ["a", "b"], layer, rows, True, "always") for layer in (0, 2)]
    assert [plan.num_levels for plan in plans] == [2, 2]
    assert pool.expand(plans[0], True, 0) == pool.expand(plans[1], True, 2)
    assert plans[1].levels[0].kv_indices.size == 2 * plans[0].levels[0].kv_indices.size
    levels = [(["a"], int32(0, 1)), (["c"], int32(0, 1))]
    pool.start("c", [5, 6])
    plan = explicit_levels(pool.tree, 2, levels, False)
    assert [token for _, token in pool.expand(plan, False, 2)[0]] == [*range(13), 5, 6]


@pytest.mark.parametrize(
    ("shapes", "field"),
    [
        ([windowed(3), GroupShape((0,), 4, 2)], "groups"),  # none leads
        ([FULL, windowed(3)], "groups"),  # layer 2 is in none
        ([FULL, SMALL, windowed(3), GroupShape((1,), 4)], "groups"),  # layer 1 is in two
        ([FULL, SMALL, windowed(3, 3)], "groups.page_size"),
        ([FULL, SMALL, windowed(0)], "groups.window"),
        ([GroupShape((0, 3), 2), SMALL, windowed(3)], "page_size"),
    ],
)
def test_groups_that_do_not_fit_together_are_refused(shapes, field) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        TokenPool(8, 4, 4, shapes)
    assert refusal.value.field == field


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
@pytest.mark.parametrize("slack", [0, 3])
def test_a_window_returns_the_pages_that_no_later_row_sees(window: int, slack: int) -> None:
    pool = pool_of(window, slack=slack)
    pool.create(NewSpec("a"))
    for length in range(40):
        pool.append("a", [length])
        settle(pool, "a")
        kept = max(0, length + 1 - window - slack) // 4 * 4  # whole bundles of 4 tokens
        assert pool.read_slots("a", 1) == [EMPTY] * kept + [*range(kept, length + 1)]
        seen = pool.expand(make_plan(pool.tree, ["a"], 1, int32(0, 1), True, "auto"), True, 1)[0]
        assert [token for _, token in seen][-window:] == [*range(length + 1)][-window:]
        assert all(position == token for position, token in seen)
        for layer in (0, 2, 3):
            assert pool.read_slots("a", layer) == [*range(length + 1)]


def test_rows_that_may_yet_be_undone_return_nothing() -> None:
    pool = pool_of(window=5)
    pool.start("a", range(12))
    tree, leaf = pool.tree, pool.tree.books.leaf("a")
    assert tree.windows is not None
    more = [tree.extend(layer, ["a"], int32(8)) for layer in range(4)]
    tree.windows.settle([leaf], {leaf: 12})
    for extension in reversed(more):
        tree.undo(extension)
    assert pool.read_slots("a", 1)[8:] == [8, 9, 10, 11]
    assert tree.windows.is_due([leaf], [16])
    tree.windows.settle([leaf], skipped=[leaf])
    tree.check_integrity()


def test_layers_that_lag_behind_keep_their_window() -> None:
    pool = pool_of(window=3)
    pool.start("a", range(4))
    for layer in (1, 0, 3):
        pool.append("a", range(4, 20), [layer])
    settle(pool, "a")
    assert pool.read_slots("a", 1) == [*range(20)]
    pool.append("a", range(4, 20), [2])
    settle(pool, "a")
    assert pool.read_slots("a", 1) == [EMPTY] * 16 + [16, 17, 18, 19]


def test_truncate_fork_and_old_rows_below_the_slack_are_refused_with_the_numbers() -> None:
    pool = pool_of(window=6, slack=4)
    pool.start("a", range(40))
    settle(pool, "a")  # rows from 40 - 6 - 4 on are kept
    pool.truncate("a", 36)
    for call in (lambda: pool.truncate("a", 32), lambda: pool.fork("b", "a", 31)):
        with pytest.raises(WindowReturned) as refusal:
            call()
        numbers = refusal.value.extra
        assert numbers["sequences"] == ["a"]
        assert (numbers["group"], numbers["window"], numbers["kept"]) == (0, 6, 28)
        assert numbers["first"] in (27, 26)
    with pytest.raises(WindowReturned):
        pool.tree.cut_layer("a", 1, 32)
    with pytest.raises(WindowReturned):
        make_plan(pool.tree, ["a"], 1, int32(0, 5), True, "auto")
    pool.tree.cut_layer("a", 2, 9)
    pool.append("a", range(9, 36), [2])
    pool.fork("b", "a", 33)
    assert pool.read_slots("b", 1)[28:] == [*range(28, 33)]
    pool.truncate("a", 0)  # nothing is seen from there
    pool.append("a", range(100, 130))
    settle(pool, "a")
    assert pool.read_slots("a", 1)[24:] == [*range(124, 130)]


def test_kept_rows_move_within_every_group() -> None:
    pool = pool_of(window=6)
    pool.start("a", range(20))
    pool.fork("b", "a", 18)
    pool.cut_many(["a", "b"], [10, 9], [[12, 17], [11, 13, 14]])
    for layer in range(4):
        assert pool.read_slots("a", layer)[-7:] == [*range(5, 10), 12, 17]
        assert pool.read_slots("b", layer)[-7:] == [*range(5, 9), 11, 13, 14]
    settle(pool, "a", "b")


def test_shared_pages_stay_until_a_sequence_has_them_for_itself() -> None:
    pool = pool_of(window=3)
    pool.start("a", range(16))
    pool.fork("b", "a")
    for name in "ab":
        pool.append(name, range(16, 32))
    settle(pool, "a", "b")
    assert pool.read_slots("a", 1)[:16] == [*range(16)]
    pool.tree.free(["b"])
    settle(pool, "a")
    assert pool.read_slots("a", 1)[:28] == [EMPTY] * 28


def test_a_row_of_an_invariant_split_begins_at_the_split_whatever_was_returned() -> None:
    """Pages before the first visible one stand for others, and the window hides them."""
    pool = pool_of(window=5)
    pool.start("a", range(30))
    settle(pool, "a")
    plan = make_plan(pool.tree, ["a"], 1, int32(0, 1), True, "auto", split_keys=16)
    (level,) = plan.levels
    assert level.kv_start.tolist() == [16]
    assert (level.kv_indices >= 0).all()
    seen = pool.expand(plan, True, 1)[0]
    assert [position for position, _ in seen] == [*range(16, 30)]
    assert [token for _, token in seen][-6:] == [*range(24, 30)]


def test_levels_and_page_tables_of_a_windowed_layer_are_refused() -> None:
    pool = pool_of()
    pool.start("a", range(9))
    for call in (
        lambda: explicit_levels(pool.tree, 1, [(["a"], int32(0, 1))], False),
        lambda: pool.tree.page_table(["a"], 1),
    ):
        with pytest.raises(InvalidRequest, match="window"):
            call()


def test_a_step_through_all_groups_has_the_slots_of_each() -> None:
    pool = pool_of()
    pool.create(NewSpec("a"), NewSpec("b"))
    every = pool.tree.extend_layers([0, 1, 2, 3], ["a", "b"], int32(5, 2))
    assert every.group_slots is not None
    for layer in range(4):
        pool.stored[layer, every.group_slots[pool.tree.group_of(layer)]] = [*range(7)]
        assert pool.read_slots("a", layer) == [0, 1, 2, 3, 4]
        assert pool.read_slots("b", layer) == [5, 6]
    pool.tree.undo(every)
    assert used(pool) == 0


def test_a_reserve_has_pages_of_all_groups() -> None:
    pool = pool_of(num_pages=30)
    pool.create(NewSpec("a", reserve=24))
    assert used(pool) == 30
    with pytest.raises(OutOfPages):
        pool.start("b", [1])
    pool.append("a", range(24))
    settle(pool, "a")
    pool.truncate("a", 0)
    pool.tree.check_integrity()
    pool.tree.free(["a"])
    assert used(pool) == 0


@pytest.mark.parametrize(
    ("window", "slack", "chunk"), [(5, 0, 1), (8, 3, 1), (6, 4, 5), (33, 0, 2)]
)
def test_sequences_run_to_their_length_in_a_pool_of_the_formula(
    window: int, slack: int, chunk: int
) -> None:
    """n sequences hold L / t pages in a full group, and (w + slack) / t + 1 in one with a window:
    a pool of 1.02 times that runs them, free pages poisoned and used again."""
    num, length, size = 7, 160, 4
    bundles = -(-(window + slack) // size) + 1
    most = num * (-(-length // size) * (1 + 2) + bundles * 2)
    pool = pool_of(window, int(most * 1.02), slack)
    names = [f"s{at}" for at in range(num)]
    pool.create(*[NewSpec(name) for name in names])
    rows = np.arange(num + 1, dtype=np.int32)
    released: set[int] = set()
    reused = 0
    for begin in range(0, length, chunk):
        for name in names:
            pool.append(name, range(begin, begin + chunk))
            held = pool.tree.allocator.held()
            reused += bool(released & set(np.flatnonzero(held).tolist()))
            settle(pool, name)
            released |= set(np.flatnonzero(held & ~pool.tree.allocator.held()).tolist())
        seen = pool.expand(make_plan(pool.tree, names, 1, rows, True, "auto"), True, 1)
        for row in seen:
            last = [*range(begin + chunk)][-window:]
            assert [token for _, token in row][-len(last) :] == last
    assert used(pool) <= most
    assert reused
