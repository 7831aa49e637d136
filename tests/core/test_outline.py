"""The pool and the tree as a viewer sees them: states, sums, the largest parts only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_cache import PAGE, grow, ids, keep

from service.core import outline as outlines
from service.core.keys import Prefix
from service.core.nodes import CACHED, PINNED, REFERENCED
from service.core.outline import Outline, outline, page_states
from service.core.tree import PrefixTree
from service.core.values import NewSpec


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(64, PAGE, 1)


def start(tree: PrefixTree, name: str, pages: int, parent: str | None = None, **of: Any) -> None:
    tree.create([NewSpec(name, parent, **of)])
    grow(tree, name, pages * PAGE)


def keep_hard(tree: PrefixTree, *pages: int) -> None:
    """Pin cached pages hard."""
    node = tree.cache.match("default", Prefix(ids(*pages))).node
    assert node is not None
    tree.cache.pin("default", tree.cache.named.last_key(node), "", None)


def rows(view: Outline) -> list[tuple[int, int, int, int, int]]:
    """(parent, pages, total, sequences, state) of each."""
    columns = (view.parents, view.pages, view.totals, view.sequences, view.states)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_every_page_has_the_state_that_its_counters_say(tree: PrefixTree) -> None:
    keep(tree, 1, 2, 3)
    keep(tree, 7, 8)
    keep_hard(tree, 7, 8)
    start(tree, "a", 5)
    states, step = page_states(tree)
    counts = np.bincount(states, minlength=4)
    (held,) = tree.budget.namespaces.values()
    assert (states.size, step) == (64, 1)
    assert counts[0] == tree.allocator.num_free == 54
    assert (counts[REFERENCED], counts[PINNED], counts[CACHED]) == (5, 2, 3)
    assert (held.referenced, held.pinned, held.cached) == (5, 2, 3)
    tree.check_integrity()


def test_states_follow_nodes_that_split_merge_and_are_evicted(tree: PrefixTree) -> None:
    keep(tree, 1, 2, 3, 4)
    tree.create([NewSpec("a", prefix=Prefix(ids(1, 2)))])
    assert np.bincount(page_states(tree)[0], minlength=4).tolist() == [60, 2, 0, 2]
    tree.free(["a"])
    tree.check_integrity()
    assert np.bincount(page_states(tree)[0], minlength=4).tolist() == [60, 0, 0, 4]
    tree.cache.evict("default", 3)
    assert np.bincount(page_states(tree)[0], minlength=4).tolist() == [63, 0, 0, 1]


def test_of_a_pool_with_more_pages_than_can_be_listed_some_are(tree: PrefixTree) -> None:
    start(tree, "a", 10)
    whole, (some, step) = page_states(tree)[0], page_states(tree, 20)
    assert step == 4 and some.tolist() == whole[::4].tolist()


def test_a_shared_prefix_is_the_parent_of_its_sequences(tree: PrefixTree) -> None:
    start(tree, "a", 3)
    start(tree, "b", 2, parent="a")
    start(tree, "c", 1, parent="a")
    view = outline(tree)
    assert view.namespaces == ["default"]
    found = rows(view)
    assert found[0] == (-1, 0, 6, 3, 0)
    assert found[1] == (0, 3, 6, 3, REFERENCED)
    assert sorted(found[2:]) == [(1, 1, 1, 1, REFERENCED), (1, 2, 2, 1, REFERENCED)]


def test_a_part_was_used_when_anything_below_it_was(tree: PrefixTree) -> None:
    tree.books.is_watched = True
    tree.tick(1.0)
    start(tree, "a", 1)
    keep(tree, 5)
    tree.tick(2.0)
    start(tree, "b", 1, parent="a")
    start(tree, "c", 1)
    tree.tick(9.0)
    grow(tree, "b", PAGE)
    view = outline(tree)
    found = sorted(zip(view.totals.tolist(), view.used.tolist(), strict=True))
    # children of a: its own end has no pages; b has two; c and the cached node have one each
    assert found == [(1, 1.0), (1, 2.0), (2, 9.0), (3, 9.0), (5, 9.0)]


def test_each_namespace_has_a_row_with_its_own_pages(tree: PrefixTree) -> None:
    start(tree, "red/a", 2, namespace="red")
    start(tree, "blue/a", 5, namespace="blue")
    keep(tree, 1, 2, 3, namespace="red")
    found = outline(tree)
    assert found.namespaces in (["red", "blue"], ["blue", "red"])
    red, blue = found.namespaces.index("red"), found.namespaces.index("blue")
    assert found.totals[[red, blue]].tolist() == [5, 5]
    assert found.sequences[[red, blue]].tolist() == [1, 1]
    assert sorted(found.parents[2:].tolist()) == sorted([red, red, blue])
    assert set(found.states.tolist()) == {0, REFERENCED, CACHED}


def test_only_the_largest_parts_have_rows_and_sums_know_of_the_others(tree: PrefixTree) -> None:
    for number, pages in enumerate((7, 1, 5, 2, 1, 1)):
        start(tree, f"s{number}", pages)
        start(tree, f"fork{number}", 1, parent=f"s{number}")
    found = outline(tree, 5)
    assert len(found.parents) == 5 and found.totals[0] == 23 and found.sequences[0] == 12
    assert sorted(found.totals[1:].tolist()) == [2, 3, 6, 8]
    assert (found.parents < np.arange(5)).all()


def test_of_very_many_sequences_and_nodes_the_longest_are_looked_at(
    tree: PrefixTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlines, "MOST_CANDIDATES", 2)
    for number, pages in enumerate((1, 6, 3, 9, 1)):
        start(tree, f"s{number}", pages)
        keep(tree, *range(10 * number, 10 * number + pages))
    assert sorted(outline(tree).totals.tolist()) == [6, 6, 9, 9, 30]
