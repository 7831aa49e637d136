"""Page tables: their memory follows the pages that sequences own, not those that they share."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from core_pool import truncate

from service.core.keys import Prefix
from service.core.page_table import BLOCK_PAGES
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
