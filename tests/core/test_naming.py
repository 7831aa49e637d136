"""Pages that get their names by themselves, once their ids are known and all layers have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from core_pool import TokenPool, int32

from service.core.errors import CoreError, InvalidRequest, KeyMismatch
from service.core.keys import Prefix
from service.core.values import NewSpec


def ids_of(ids: Sequence[int]) -> Prefix:
    return Prefix(np.array(ids, np.uint32))


class Pool(TokenPool):
    """Two layers of pages of four tokens."""

    def __init__(self) -> None:
        super().__init__(page_size=4, num_layers=2)
        self.naming = self.tree.naming

    def begin(self, name: str, ids: Sequence[int] = ()) -> None:
        self.create(NewSpec(name, prefix=ids_of(ids)))

    def learn(
        self, name: str, ids: Sequence[int], before: int, end: int, is_exact: bool = False
    ) -> list[int]:
        given, sums = np.array(ids, np.uint32), int32(0, len(ids))
        ends = [self.tree.books.leaf(name)], int32(before), int32(end)
        return self.naming.learn(*ends, given, sums, is_exact=is_exact)

    def write(self, name: str, ids: Sequence[int]) -> None:
        """Rows at both layers, with their ids, and names for what is complete."""
        before = self.tree.describe(name).length
        self.append(name, ids)
        self.learn(name, ids, before, before + len(ids))
        self.name(name)

    def name(self, name: str, length: int = 2**31) -> None:
        self.naming.name(self.tree.books.leaf(name), length)
        self.tree.check_integrity()

    def lens(self, name: str) -> tuple[int, int]:
        view = self.tree.describe(name)
        return view.known_len, view.committed_len

    def cached(self, ids: Sequence[int]) -> int:
        return self.tree.cache.match("default", ids_of(ids)).num_pages


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_page_is_named_when_all_layers_have_it_and_its_ids_are_known(pool: Pool) -> None:
    pool.begin("a")
    pool.append("a", range(6), [0])
    pool.learn("a", range(6), 0, 6)
    pool.name("a")
    assert pool.lens("a") == (6, 0), "a layer lacks the rows"
    pool.append("a", range(3), [1])
    pool.name("a")
    assert pool.lens("a") == (6, 0), "a layer lacks a row"
    pool.append("a", range(3, 8), [1])
    pool.name("a", 3)
    assert pool.lens("a") == (6, 0), "rows behind the third may yet be undone"
    before = pool.pages("a"), pool.tree.plan_key(["a"], 0)
    pool.name("a")
    assert pool.lens("a") == (6, 4)
    pool.append("a", range(6, 9), [0])
    pool.name("a")
    assert pool.lens("a") == (6, 4), "the ids of the next are not known"
    pool.learn("a", [6, 7], 9, 9)
    pool.name("a")
    assert pool.lens("a") == (8, 8) and pool.cached(range(8)) == 2
    assert pool.pages("a")[:2] == before[0][:2] and not pool.naming.due


def test_an_equal_cached_page_leaves_this_one_without_a_name(pool: Pool) -> None:
    for name in ("a", "b"):
        pool.begin(name)
        pool.write(name, range(4))
    pages = pool.pages("b")
    pool.write("b", range(4, 9))
    assert pool.lens("b") == (9, 0) and pool.pages("b")[:1] == pages != pool.pages("a")
    assert not pool.naming.due
    pool.tree.commits.commit("b", ids_of(range(8)))  # a commit moves it onto the cached page
    assert pool.lens("b") == (9, 8) and pool.pages("b")[0] == pool.pages("a")[0]


def test_a_sequence_from_the_cache_goes_on_with_its_chain_under_its_salt(pool: Pool) -> None:
    pool.begin("a")
    pool.write("a", range(5))
    pool.begin("b", range(9))
    assert pool.lens("b") == (4, 4)
    pool.write("b", range(4, 8))
    assert pool.cached(range(9)) == 2
    pool.create(NewSpec("c", prefix=Prefix(np.array([], np.uint32), cache_salt="other")))
    pool.write("c", range(8))
    assert pool.lens("c") == (8, 8), "under another salt they are other pages"


UNKNOWN = [  # ids, the row that the call begins at, and the error
    (range(5, 8), 8, InvalidRequest),  # known are 6 of 8
    ([4, 9], 4, KeyMismatch),
    ([4, 5, 6, 7, 8], 4, InvalidRequest),
    ([9], 0, KeyMismatch),
]


@pytest.mark.parametrize(("ids", "begin", "error"), UNKNOWN)
def test_ids_that_contradict_or_are_too_many_change_nothing(
    pool: Pool, ids: Sequence[int], begin: int, error: type[CoreError]
) -> None:
    pool.begin("a")
    pool.append("a", range(8))
    pool.learn("a", range(6), 0, 8)
    with pytest.raises(error):
        pool.learn("a", ids, begin, 8)
    pool.name("a")
    assert pool.lens("a") == (6, 4) and pool.cached(range(8)) == 1
    pool.learn("a", range(4, 6), 4, 8)  # those that are known already
    pool.learn("a", range(4, 8), 4, 8)
    pool.name("a")
    assert pool.cached(range(8)) == 2


def test_what_was_undone_is_not_known(pool: Pool) -> None:
    pool.begin("a")
    pool.append("a", range(3))
    pool.learn("a", range(3), 0, 3)
    extension = pool.tree.extend_layers([0, 1], ["a"], int32(2))
    extension.known = pool.learn("a", [3, 4], 3, 5)
    pool.tree.undo(extension)
    pool.name("a")
    assert pool.lens("a") == (3, 0)
    pool.write("a", [7])
    assert (pool.cached([0, 1, 2, 7]), pool.cached(range(4))) == (1, 0)


CUTS: list[tuple[Callable[[Pool], object], list[int]]] = [  # of 0 to 10, and the ids known then
    (lambda pool: pool.truncate("a", 6), [*range(6)]),
    (lambda pool: pool.truncate("a", 2), [0, 1]),
    (lambda pool: pool.cut_many(["a"], [5], [[6, 9]]), [*range(5)]),
    (lambda pool: pool.cut_many(["a"], [1], [[3, 5, 8]]), [0]),
    (lambda pool: pool.cut_many(["a"], [8], [[8, 9, 10]]), [*range(10)]),
    (lambda pool: pool.cut_many(["a"], [9], [[10]]), [*range(9)]),
    (lambda pool: pool.tree.cut_layer("a", 1, 9), [*range(9)]),
]


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize(("cut", "left"), CUTS)
def test_a_cut_keeps_the_ids_of_the_tokens_that_stay(
    pool: Pool, cut: Callable[[Pool], object], left: list[int], forks: bool
) -> None:
    """The last of 11 tokens has no id, and the first page a name."""
    pool.begin("a")
    pool.append("a", range(11))
    pool.learn("a", range(10), 0, 11)
    pool.name("a", 4)
    if forks:
        pool.fork("f", "a", 8)
    cut(pool)
    assert pool.lens("a")[0] == len(left)
    if (missing := max(pool.tree.describe("a").lengths) - len(left)) or len(left) < 9:
        pool.append("a", [99] * (9 - len(left) - missing))
    for layer in pool.layers:
        held = int(pool.tree.lengths(["a"], layer)[0])
        pool.append("a", [99] * (12 - held), [layer])
    more = [*left, *range(50, 62 - len(left))]
    pool.learn("a", more[len(left) :], len(left), 12)
    pool.name("a")
    assert pool.cached(more) == 3


def test_ids_of_a_cut_to_come_are_checked_before_it(pool: Pool) -> None:
    pool.begin("a")
    pool.append("a", range(9))
    pool.learn("a", range(7), 0, 9)
    leaf = pool.tree.books.leaf("a")
    for ids in ([6, 8], [6]):
        pool.naming.check_cut(leaf, 5, 2, np.array(ids, np.uint32))
    with pytest.raises(InvalidRequest):
        pool.naming.check_cut(leaf, 5, 2, np.array([6, 8, 9], np.uint32))
    pool.cut_many(["a"], [5], [[6, 8]])
    assert pool.lens("a") == (5, 0), "ids of tokens that moved are not known any more"
    pool.learn("a", [6, 8], 5, 7)
    assert pool.lens("a") == (7, 0)


def test_a_fork_has_its_parents_chain_where_the_ids_of_shared_pages_are_known(pool: Pool) -> None:
    pool.begin("a")
    pool.append("a", range(10))
    pool.learn("a", range(7), 0, 10)
    pool.fork("late", "a")
    assert pool.lens("late") == (0, 0), "two chains could name the shared rows otherwise"
    with pytest.raises(InvalidRequest, match="no chain"):
        pool.learn("late", [7], 10, 10)
    pool.learn("a", range(7, 10), 10, 10)
    pool.fork("b", "a")
    assert pool.lens("b") == (10, 0)
    pool.write("b", [70, 71])
    pool.write("a", [10, 11])
    assert pool.lens("b") == pool.lens("a") == (12, 12) and pool.lens("late") == (0, 8)
    assert pool.cached([*range(10), 70, 71]) == pool.cached(range(12)) == 3


def test_pages_that_were_named_by_keys_give_no_ids(pool: Pool) -> None:
    """Their ids are not known, and what their pages' former rows had is not theirs."""
    pool.begin("x")
    pool.write("x", range(30, 42))
    pool.tree.free(["x"])
    pool.tree.cache.evict("default", 9)
    pool.start("k", range(8))
    keys = np.arange(4, dtype=np.uint64).reshape(2, 2)
    pool.tree.commits.commit("k", Prefix(None, keys))
    pool.create(NewSpec("a", prefix=Prefix(None, keys)))
    assert pool.lens("a") == (8, 8)
    pool.truncate("a", 6)
    assert pool.lens("a") == (4, 4)
    pool.append("a", [8, 9])
    with pytest.raises(InvalidRequest, match="known are 4"):
        pool.learn("a", [8, 9], 6, 8, is_exact=True)
    pool.learn("a", [4, 5, 8, 9], 8, 8)
    pool.name("a")
    assert pool.lens("a") == (8, 8)
