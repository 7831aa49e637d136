"""Page tables, whose memory follows the pages that sequences own, not those that they share; and
the allocator of pages."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from core_pool import int32, truncate

from service.core.errors import IntegrityError, OutOfPages
from service.core.keys import Prefix
from service.core.page_table import BLOCK_PAGES
from service.core.pool.allocator import PageAllocator
from service.core.tree import PrefixTree
from service.core.values import NewSpec

PAGES = 20_000
COUNT = 40
MOST_BYTES = 16 * BLOCK_PAGES
"""Of each sequence: its own end, twice as large as needed, and what refers to blocks. The whole
table takes 80 kB."""


@pytest.fixture
def tree() -> Iterator[PrefixTree]:
    """With one sequence, "parent", of committed pages."""
    made = PrefixTree(2 * PAGES + 4 * COUNT, 1, 1)
    grow(made, "parent")
    made.commits.commit("parent", prompt())
    tracemalloc.start()
    yield made
    tracemalloc.stop()
    made.check_integrity()


def prompt() -> Prefix:
    return Prefix(np.arange(PAGES, dtype=np.uint32))


def grow(tree: PrefixTree, name: str) -> None:
    tree.create([NewSpec(name)])
    tree.extend(0, [name], np.array([PAGES], np.int32))


def fork(tree: PrefixTree, name: str) -> None:
    tree.create([NewSpec(name, "parent", PAGES - 7)])


def fork_of_fork(tree: PrefixTree, name: str) -> None:
    before = f"s{int(name[1:]) - 1}"
    tree.create([NewSpec(name, before if before in tree.books else "parent")])
    tree.extend(0, [name], np.ones(1, np.int32))


def fork_then_commit(tree: PrefixTree, name: str) -> None:
    """The fork of a sequence that it outlives."""
    grow(tree, "other")
    tree.create([NewSpec(name, "other")])
    tree.free(["other"])
    tree.commits.commit(name, prompt())


def from_prefix(tree: PrefixTree, name: str) -> None:
    tree.create([NewSpec(name, prefix=prompt())])


def committed(tree: PrefixTree, name: str) -> None:
    """Its own pages are freed: it moves onto those of the same names."""
    grow(tree, name)
    tree.commits.commit(name, prompt())


def truncated(tree: PrefixTree, name: str) -> None:
    grow(tree, name)
    truncate(tree, name, 1)


def undone(tree: PrefixTree, name: str) -> None:
    tree.create([NewSpec(name)])
    tree.undo(tree.extend(0, [name], np.array([PAGES], np.int32)))


def evicted(tree: PrefixTree, name: str) -> None:
    """The first page of a node stays, pinned; the others are evicted."""
    other, number = "other", int(name[1:]) + 1
    grow(tree, other)
    keys = np.arange(2 * number * PAGES, 2 * (number + 1) * PAGES, dtype=np.uint64)
    tree.commits.commit(other, Prefix(None, keys.reshape(-1, 2)))
    key = tree.cache.named.key_of(tree.books.leaf(other).table.page(0))
    tree.cache.pin("default", key, "", None)
    tree.free([other])
    tree.cache.evict("default", PAGES - 1)
    tree.create([NewSpec(name)])


@pytest.mark.parametrize(
    "make",
    [
        *(fork, fork_of_fork, fork_then_commit, from_prefix, committed, truncated, undone),
        evicted,
    ],
)
def test_what_sequences_leave_takes_memory_for_their_own_pages_alone(
    tree: PrefixTree, make: Callable[[PrefixTree, str], None]
) -> None:
    names = [f"s{number}" for number in range(COUNT)]
    make(tree, names[0])
    before = tracemalloc.get_traced_memory()[0]
    for name in names[1:]:
        make(tree, name)
    assert tracemalloc.get_traced_memory()[0] - before < COUNT * MOST_BYTES
    tree.extend(0, names, np.ones(COUNT, np.int32))
    assert tracemalloc.get_traced_memory()[0] - before < COUNT * MOST_BYTES


def test_released_pages_are_the_next_to_be_handed_out_in_their_old_order() -> None:
    pages = PageAllocator(8)
    pages.allocate(6)
    pages.release(int32(4, 1, 3))
    assert pages.allocate(4).tolist() == [4, 1, 3, 6]


def test_too_large_an_allocation_takes_nothing_and_says_how_many_are_free() -> None:
    pages = PageAllocator(4)
    pages.allocate(1)
    with pytest.raises(OutOfPages) as refused:
        pages.allocate(4)
    assert refused.value.args[:3] == (4, 3, 4)
    assert pages.num_free == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (int32(5), "page 5 of 4 released"),
        (int32(-1), "page -1 of 4 released"),
        (int32(3), "free page 3 released"),
        (int32(0, 1, 0), "page 0 released twice at once"),
    ],
)
def test_releasing_a_page_without_holders_is_a_bug_and_changes_nothing(given, message) -> None:
    pages = PageAllocator(4)
    pages.allocate(3)
    with pytest.raises(IntegrityError, match=f"{message}: this is a bug"):
        pages.release(given)
    assert (pages.num_free, pages.held().tolist()) == (1, [True, True, True, False])
