"""The plan cache: one object per (sequences, lengths), until a change makes it untrue."""

from __future__ import annotations

import numpy as np
import pytest

from service.core.tree import PrefixTree
from service.core.values import NewSpec
from service.engine.store import plan_cache as plans
from service.engine.store.plan_cache import PlanCache

IDS = ("a", "b")
ONE_EACH = np.array([0, 1, 2], dtype=np.int32)


@pytest.fixture
def tree() -> PrefixTree:
    tree = PrefixTree(64, 4, 3)
    tree.create([NewSpec("a"), NewSpec("b")])
    for layer in range(3):
        tree.extend(layer, IDS, np.array([9, 6], dtype=np.int32))
    return tree


def test_every_layer_of_a_step_gets_the_same_plan_object(tree: PrefixTree) -> None:
    cache = PlanCache(tree)
    found = [cache.sequences(IDS, layer, ONE_EACH, True, "auto") for layer in range(3)]
    assert found[0].plan is found[1].plan is found[2].plan
    assert len(cache) == 1


def test_what_changes_the_plan_makes_another(tree: PrefixTree) -> None:
    cache = PlanCache(tree)
    first = cache.sequences(IDS, 0, ONE_EACH, True, "auto")
    others = [
        cache.sequences(IDS[::-1], 0, ONE_EACH, True, "auto"),
        cache.sequences(IDS, 0, ONE_EACH, False, "auto"),
        cache.sequences(IDS, 0, ONE_EACH, True, "never"),
        cache.sequences(IDS, 0, 2 * ONE_EACH, True, "auto"),
    ]
    tree.extend(0, IDS, np.array([1, 1], dtype=np.int32))
    others.append(cache.sequences(IDS, 0, ONE_EACH, True, "auto"))
    assert all(other.plan is not first.plan for other in others)
    assert cache.sequences(IDS, 1, ONE_EACH, True, "auto").plan is first.plan


def test_an_undone_extension_leaves_no_plan_that_names_its_pages(tree: PrefixTree) -> None:
    cache = PlanCache(tree)
    grow = np.array([4], dtype=np.int32)
    extension = tree.extend(0, ("a",), grow)
    stale = cache.sequences(("a",), 0, ONE_EACH[:2], True, "auto")
    tree.undo(extension)
    tree.extend(0, ("b",), grow)  # takes the page that the undone extension had
    tree.extend(0, ("a",), grow)
    again = cache.sequences(("a",), 0, ONE_EACH[:2], True, "auto")
    assert again.plan is not stale.plan
    pages = again.plan.levels[0].kv_indices.tolist()
    assert pages == tree.page_table(("a",), 0).kv_indices.tolist()


def test_explicit_levels_are_cached_by_their_sequences_rows_and_row_count(tree: PrefixTree) -> None:
    cache = PlanCache(tree)
    levels = [(("a",), ONE_EACH[:2]), (("b",), ONE_EACH[:2])]
    first = cache.levels(levels, 0, False, 1)
    assert cache.levels(levels, 2, False, 1).plan is first.plan
    assert cache.levels(levels, 0, False, 2).plan is not first.plan
    assert cache.levels(levels[::-1], 0, False, 1).plan is not first.plan
    assert (first.num_levels, first.is_cascade, first.tokens_read) == (2, True, 15)


def test_a_plan_counts_the_segments_with_keys_since_the_others_cost_nothing() -> None:
    tree = PrefixTree(64, 4, 1)
    tree.create([NewSpec(name) for name in "abc"])
    tree.extend(0, ("b",), np.array([9], dtype=np.int32))
    rows = np.arange(4, dtype=np.int32)
    planned = PlanCache(tree).sequences(("a", "b", "c"), 0, rows, True, "never")
    assert planned.num_segments == 1


def test_the_least_recently_used_plan_goes_first(
    tree: PrefixTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MAX_ENTRIES", 2)
    cache = PlanCache(tree)

    def plan(name: str, causal: bool = False) -> object:
        return cache.sequences((name,), 0, ONE_EACH[:2], causal, "auto").plan

    a, b = plan("a"), plan("b")
    assert plan("a") is a
    plan("a", causal=True)
    assert len(cache) == 2
    assert plan("a") is a
    assert plan("b") is not b


def test_large_plans_count_by_their_size(tree: PrefixTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_INDICES", 7)
    cache = PlanCache(tree)
    cache.sequences(("a",), 0, ONE_EACH[:2], False, "auto")  # three pages and a row
    cache.sequences(("b",), 0, ONE_EACH[:2], False, "auto")  # two pages and a row
    assert len(cache) == 2
    big = cache.sequences(IDS, 0, ONE_EACH, False, "auto")
    assert len(cache) == 1, "a plan too large for its neighbours is kept alone"
    assert cache.sequences(IDS, 0, ONE_EACH, False, "auto").plan is big.plan
