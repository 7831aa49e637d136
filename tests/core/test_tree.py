"""The prefix tree, one edge at a time; pages hold 4 tokens unless a test says otherwise."""

import numpy as np
import pytest
from core_pool import TokenPool, int32

from service.core.errors import (
    IntegrityError,
    InvalidRequest,
    LengthMismatch,
    OutOfPages,
    SequenceExists,
    UnknownSequence,
)
from service.core.keys import Prefix
from service.core.tree import PrefixTree
from service.core.values import NewSpec


@pytest.fixture
def pool():
    pool = TokenPool(num_pages=32, page_size=4, num_layers=2)
    yield pool
    pool.tree.check_integrity()
    pool.free_all()
    pool.tree.check_integrity()
    assert pool.tree.allocator.num_free == 32
    assert pool.tree.links.count == 0


def everything(tree: PrefixTree) -> list[object]:
    """All that a caller can see of the tree."""
    views = tree.list(None, 1000)
    ids = [view.id for view in views]
    tables = [tree.page_table(ids, layer) for layer in range(tree.num_layers)]
    numbers = [tree.links.count, tree.allocator.num_free, tree.allocator.free_pages.tolist()]
    keys = [tree.plan_key(ids, layer) for layer in range(tree.num_layers)]
    return [views, [table.kv_indices.tolist() for table in tables], numbers, keys]


def test_a_fork_copies_just_the_rows_past_the_last_full_page(pool) -> None:
    pool.start("a", range(10))
    copies = pool.fork("b", "a", 7)
    assert copies.src_pages.tolist() == [pool.pages("a")[1]]
    assert copies.dst_pages.tolist() == [pool.pages("b")[1]]
    assert copies.num_rows.tolist() == [3]


def test_a_fork_without_a_length_takes_the_least_over_layers(pool) -> None:
    pool.start("a", range(5))
    pool.append("a", range(5, 12), layers=[0])
    pool.fork("b", "a")
    assert pool.tree.describe("b").lengths == (5, 5)
    pool.append("a", range(5, 12), layers=[1])
    pool.append("b", [90])
    assert pool.read("a", 1) == list(range(12))
    assert pool.read("b", 0) == [0, 1, 2, 3, 4, 90]


@pytest.mark.parametrize(
    ("length", "is_right"), [(3, False), (4, True), (6, True), (7, True), (8, False)]
)
def test_a_cut_of_one_layer_ends_between_its_shared_pages_and_its_length(
    pool, length: int, is_right: bool
) -> None:
    pool.start("a", range(7))
    pool.fork("b", "a")
    before = everything(pool.tree)
    if is_right:
        pool.tree.cut_layer("b", 1, length)
        assert pool.tree.describe("b").lengths == (7, length)
        assert (pool.read("b", 0), pool.read("b", 1)) == ([*range(7)], [*range(length)])
        return
    with pytest.raises(InvalidRequest, match=r"4 \(tokens in shared pages\) to 7"):
        pool.tree.cut_layer("b", 1, length)
    assert everything(pool.tree) == before


def test_truncate_into_a_shared_page_needs_no_free_page_when_it_gives_one_up() -> None:
    pool = TokenPool(num_pages=3)
    pool.start("a", range(8))
    pool.fork("b", "a")
    pool.append("b", [8])
    assert pool.tree.allocator.num_free == 0
    own = pool.pages("b")[2]
    copies = pool.truncate("b", 6)
    assert copies.dst_pages.tolist() == [own]
    assert pool.read("b") == list(range(6))
    pool.tree.check_integrity()


def test_truncate_into_a_shared_page_without_any_free_page_changes_nothing() -> None:
    pool = TokenPool(num_pages=2)
    pool.start("a", range(8))
    pool.fork("b", "a")
    before = everything(pool.tree)
    with pytest.raises(OutOfPages) as refused:
        pool.truncate("b", 6)
    assert refused.value.args[:3] == (1, 0, 2)
    assert everything(pool.tree) == before


def test_out_of_pages_names_the_numbers_and_changes_nothing() -> None:
    pool = TokenPool(num_pages=4)
    pool.start("a", range(6))
    pool.start("b", range(4))
    before = everything(pool.tree)
    with pytest.raises(OutOfPages) as refused:
        pool.tree.extend(0, ["a", "b"], int32(2, 5))
    assert refused.value.args[:3] == (2, 1, 4)
    with pytest.raises(OutOfPages):
        pool.create(NewSpec("c", "a"), NewSpec("d", "a", 5))
    with pytest.raises(OutOfPages):
        pool.tree.extend(0, ["a"], int32(2**31 - 1))
    assert everything(pool.tree) == before
    pool.tree.check_integrity()


def test_undo_puts_lengths_and_pages_back_latest_first(pool) -> None:
    pool.start("a", range(3))
    pool.start("b", range(4))
    before = everything(pool.tree)
    first = pool.tree.extend(0, ["b", "a"], int32(6, 1))
    second = pool.tree.extend(0, ["a"], int32(9))
    within = pool.tree.extend(0, ["b"], int32(1))  # no new page
    with pytest.raises(IntegrityError, match="this is a bug"):
        pool.tree.undo(first)
    pool.tree.undo(within)
    pool.tree.undo(second)
    pool.tree.undo(first)
    pool.tree.check_integrity()
    assert everything(pool.tree)[:-1] == before[:-1]
    pool.append("a", [3, 4])
    assert pool.read("a") == [0, 1, 2, 3, 4]


def test_undo_is_refused_once_its_own_sequences_have_changed(pool) -> None:
    pool.start("a", range(3))
    extension = pool.tree.extend(0, ["a"], int32(1))
    pool.truncate("a", 2)
    with pytest.raises(IntegrityError):
        pool.tree.undo(extension)
    assert pool.tree.describe("a").lengths == (2, 2)
    deleted = pool.tree.extend(0, ["a"], int32(2))
    pool.tree.free(["a"])
    pool.start("a", range(4))
    with pytest.raises(IntegrityError):
        pool.tree.undo(deleted)
    assert pool.tree.describe("a").lengths == (4, 4)


def test_undo_does_not_mind_what_became_of_other_sequences(pool) -> None:
    pool.start("a", range(3))
    pool.start("c", range(4))
    extension = pool.tree.extend(0, ["a"], int32(6))
    pool.create(NewSpec("b"), NewSpec("d", "c"))
    pool.tree.extend(1, ["b"], int32(5))
    pool.tree.free(["c"])
    pool.tree.undo(extension)
    assert pool.tree.describe("a").lengths == (3, 3)
    assert pool.tree.describe("b").lengths == (0, 5)
    pool.tree.check_integrity()


def test_a_plan_key_changes_when_written_pages_may_have(pool) -> None:
    pool.start("a", range(4))
    pool.start("b", range(4))
    key = pool.tree.plan_key(["a", "b"], 0)
    assert key == pool.tree.plan_key(["a", "b"], 1), "the same for every layer of a step"
    assert key != pool.tree.plan_key(["b", "a"], 0)
    extension = pool.tree.extend(0, ["a"], int32(1))
    longer = pool.tree.plan_key(["a", "b"], 0)
    pool.tree.undo(extension)
    assert longer != key != pool.tree.plan_key(["a", "b"], 0)
    pool.start("c", range(4))
    assert pool.pages("c") == [2], "the page that was given back"
    pool.tree.extend(0, ["a"], int32(1))
    assert pool.tree.plan_key(["a", "b"], 0) != longer
    key = pool.tree.plan_key(["a", "b"], 0)
    pool.fork("d", "b")
    assert pool.tree.plan_key(["a", "b"], 0) == key, "a fork leaves its parent's pages"
    pool.tree.free(["b"])
    pool.start("b", range(4))
    assert pool.tree.plan_key(["a", "b"], 0) != key


@pytest.mark.parametrize("shared", [False, True])
def test_a_plan_key_is_not_used_again_after_a_truncate(pool, shared) -> None:
    pool.start("a", range(8))
    if shared:
        pool.fork("b", "a")
    key, pages = pool.tree.plan_key(["a"], 0), pool.pages("a")
    pool.truncate("a", 4)
    pool.start("c", [0])
    pool.append("a", range(4, 8))
    assert pool.pages("a") != pages
    assert pool.tree.plan_key(["a"], 0) != key


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        ([NewSpec("x"), NewSpec("a")], SequenceExists, "a"),
        ([NewSpec("x"), NewSpec("x")], InvalidRequest, "duplicate id"),
        ([NewSpec("x", "y"), NewSpec("y"), NewSpec("z", "w")], UnknownSequence, "y, w"),
        ([NewSpec("x", "x")], UnknownSequence, "x"),
        ([NewSpec("x", "a", 6)], InvalidRequest, "0 to 5"),
        ([NewSpec("x", "a", -1)], InvalidRequest, "0 to 5"),
        ([NewSpec("x", "a", 3), NewSpec("y", "x", 4)], InvalidRequest, "0 to 3"),
        ([NewSpec("x", None, 2)], InvalidRequest, "parent"),
    ],
)
def test_a_create_that_is_refused_changes_nothing(pool, specs, error, message) -> None:
    pool.start("a", range(5))
    before = everything(pool.tree)
    with pytest.raises(error, match=message):
        pool.create(*specs)
    assert everything(pool.tree) == before


def test_every_unknown_id_is_named(pool) -> None:
    pool.create(NewSpec("a"))
    tree, ids = pool.tree, ["x", "a", "y"]
    for call in (
        lambda: tree.lengths(ids, 0),
        lambda: tree.page_table(ids, 0),
        lambda: tree.plan_key(ids, 0),
        lambda: tree.extend(0, ids, int32(1, 1, 1)),
        lambda: tree.free(ids),
    ):
        with pytest.raises(UnknownSequence) as refused:
            call()
        assert refused.value.extra["sequences"] == ["x", "y"]
    for one in (tree.describe, lambda name: pool.truncate(name, 0)):
        with pytest.raises(UnknownSequence):
            one("x")
    assert tree.num_sequences == 1


def test_changes_refuse_an_id_that_comes_twice(pool) -> None:
    pool.start("a", range(4))
    before = everything(pool.tree)
    with pytest.raises(InvalidRequest, match="sequences = a"):
        pool.tree.extend(0, ["a", "a"], int32(1, 1))
    with pytest.raises(InvalidRequest, match="sequences = a"):
        pool.tree.free(["a", "a"])
    assert everything(pool.tree) == before


def test_offsets_that_differ_are_answered_with_all_true_lengths(pool) -> None:
    pool.start("a", range(4))
    pool.start("b", range(2))
    before = everything(pool.tree)
    with pytest.raises(LengthMismatch) as refused:
        pool.tree.extend(0, ["b", "a"], int32(1, 1), int32(2, 5))
    assert refused.value.extra["lengths"] == {"b": 2, "a": 4}
    with pytest.raises(LengthMismatch) as refused:
        pool.tree.check_lengths(["b", "a"], 0, int32(2, 5))
    assert refused.value.extra["lengths"] == {"b": 2, "a": 4}
    pool.tree.check_lengths(["b", "a"], 0, int32(2, 4))
    assert everything(pool.tree) == before
    assert pool.tree.extend(0, ["b", "a"], int32(1, 1), int32(2, 4)).lengths.tolist() == [3, 5]


@pytest.mark.parametrize("counts", [int32(1), int32(1, -1), int32(1, 1, 1)])
def test_counts_must_be_one_number_per_sequence_and_not_negative(pool, counts) -> None:
    pool.create(NewSpec("a"), NewSpec("b"))
    with pytest.raises(InvalidRequest, match="counts"):
        pool.tree.extend(0, ["a", "b"], counts)


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_outside_the_pool_is_refused(pool, layer) -> None:
    pool.start("a", range(4))
    for call in (pool.tree.lengths, pool.tree.page_table, pool.tree.plan_key):
        with pytest.raises(InvalidRequest, match=f"layer = {layer}: 0 to 1"):
            call(["a"], layer)
    with pytest.raises(InvalidRequest, match="layer"):
        pool.tree.extend(layer, ["a"], int32(1))


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_outside_the_length_is_refused(pool, length) -> None:
    pool.start("a", range(5))
    with pytest.raises(InvalidRequest, match=f"length = {length}: 0 to 5"):
        pool.truncate("a", length)


def test_the_list_is_sorted_and_continues_after_an_id(pool) -> None:
    pool.create(*(NewSpec(name) for name in ["d", "a", "c", "b"]))
    assert [view.id for view in pool.tree.list(None, 2)] == ["a", "b"]
    assert [view.id for view in pool.tree.list("b", 9)] == ["c", "d"]
    assert [view.id for view in pool.tree.list("bb", 1)] == ["c"]
    assert pool.tree.list("d", 9) == []
    pool.tree.free(["c"])
    assert [view.id for view in pool.tree.list("b", 9)] == ["d"]


def test_more_sequences_than_first_foreseen_keep_their_numbers() -> None:
    pool = TokenPool(num_pages=500, num_layers=2)
    for i in range(300):
        pool.start(f"s{i}", range(i % 7))
    assert [pool.read(f"s{i}", 1) for i in range(300)] == [list(range(i % 7)) for i in range(300)]
    pool.tree.check_integrity()


def test_a_batch_that_comes_again_is_what_its_names_mean_now() -> None:
    tree = PrefixTree(8, 4, 1)
    tree.create([NewSpec("a"), NewSpec("b")])
    batch, twice = ("a", "b"), ("a", "a")
    tree.extend(0, batch, int32(1, 2))
    assert tree.lengths(batch, 0).tolist() == [1, 2]
    tree.free(["a"])
    with pytest.raises(UnknownSequence):
        tree.lengths(batch, 0)
    tree.create([NewSpec("c"), NewSpec("a")])  # "c" has the column that was "a"'s
    assert tree.lengths(batch, 0).tolist() == [0, 2]
    tree.books.rename(tree.books.leaf("a"), "d")
    tree.books.rename(tree.books.leaf("b"), "a")
    with pytest.raises(UnknownSequence):
        tree.lengths(batch, 0)
    assert tree.lengths(twice, 0).tolist() == [2, 2]
    with pytest.raises(InvalidRequest):
        tree.extend(0, twice, int32(1, 1))


@pytest.mark.parametrize("given", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (2**20, 2**11, 1)])
def test_a_pool_without_slots_or_with_too_many_is_refused(given) -> None:
    with pytest.raises(InvalidRequest):
        PrefixTree(*given)


@pytest.mark.parametrize("change", ["fork", "commit", "free"])
def test_an_extension_that_others_share_is_not_undone(change) -> None:
    """Undone, its pages would be free while a fork or the cache still has them."""
    pool = TokenPool(num_pages=8, page_size=4)
    pool.create(NewSpec("a"))
    extension = pool.tree.extend(0, ["a"], int32(8))
    if change == "fork":
        pool.fork("b", "a")
    elif change == "commit":
        pool.tree.commits.commit("a", Prefix(np.arange(8, dtype=np.uint32)))
    else:
        pool.tree.free(["a"])
    with pytest.raises(IntegrityError, match="cannot roll back"):
        pool.tree.undo(extension)
    pool.tree.check_integrity()


def test_a_sequence_in_use_does_not_expire_however_short_its_life(pool) -> None:
    pool.create(NewSpec("a", ttl_s=1e-12), NewSpec("b", ttl_s=1e-12))
    books = pool.tree.books
    pool.tree.tick(1e6)  # a float near 1e6 has no place for 1e-12
    assert books.expired(lambda name: name == "a") == ["b"]
    assert books.expiry.next_due > books.now
    pool.tree.tick(1e6 + 1)
    assert books.expired(lambda _: False) == ["a"]
    pool.tree.free(["a", "b"])  # as the engine does at once
