"""Trees deeper than one call walks: results are right, with less sharing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_pool import TokenPool, int32

from service.core.errors import InvalidRequest
from service.core.keys import Prefix
from service.core.outline import outline
from service.core.plans import segments
from service.core.plans.plan import make_plan
from service.core.prefix import matching
from service.core.tree import PrefixTree
from service.core.values import NewSpec

MOST = 3


def chain(depth: int) -> TokenPool:
    """Each sequence a fork of the one before, with two more pages of two tokens."""
    pool = TokenPool(num_pages=4 * depth, page_size=2, num_layers=1)
    pool.start("n0", [0, 1, 2, 3])
    for number in range(1, depth):
        pool.fork(f"n{number}", f"n{number - 1}")
        pool.append(f"n{number}", range(4 * number, 4 * number + 4))
    return pool


@pytest.mark.parametrize(("nodes", "levels"), [(4, 128), (4096, 2), (5, 3), (1, 1)])
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_plan_of_a_deep_tree_has_every_key_once(
    nodes: int, levels: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MOST_NODES", nodes)
    monkeypatch.setattr(segments, "MOST_LEVELS", levels)
    pool = chain(12)
    ids = [f"n{number}" for number in range(12)]
    random.Random(5).shuffle(ids)
    at = np.arange(13, dtype=np.int32)
    plan = make_plan(pool.tree, ids, 0, at, True, mode)  # type: ignore[arg-type]
    flat = make_plan(pool.tree, ids, 0, at, True, "never")
    assert pool.expand(plan, True) == pool.expand(flat, True)
    assert plan.num_levels <= levels


def committed(depth: int) -> PrefixTree:
    """Pages of one prompt, each with a lease of its own, so that each is a node."""
    tree = PrefixTree(3 * depth, 1, 1)
    tree.tick(0.0)
    tree.create([NewSpec("a")])
    tree.extend(0, ["a"], int32(depth))
    tree.commits.commit("a", prompt(depth))
    for pages in range(1, depth + 1):
        assert tree.cache.lease("default", prompt(pages), f"l{pages}", 9.0) == pages
    return tree


def prompt(pages: int) -> Prefix:
    return Prefix(np.arange(pages, dtype=np.uint32))


def test_a_call_finds_a_bounded_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = committed(8)
    assert tree.cache.match("default", prompt(8)).num_pages == 8
    key = tree.cache.named.key_of(tree.books.leaf("a").table.page(7))
    tree.create([NewSpec("c")])
    tree.extend(0, ["c"], int32(8))
    before = tree.allocator.num_free, tree.links.count
    monkeypatch.setattr(matching, "MOST_MATCHED", MOST)
    monkeypatch.setattr("service.core.prefix.cache.MOST_MATCHED", MOST)
    assert tree.cache.match("default", prompt(8)).num_pages == MOST
    assert tree.cache.use("default", prompt(8)) == MOST
    with pytest.raises(InvalidRequest, match="the first 3 tokens are cached"):
        tree.commits.commit("c", prompt(8))
    for soft in (None, 5.0):
        with pytest.raises(InvalidRequest, match="nodes of the tree above it, not 7"):
            tree.cache.pin("default", key, "", soft)
    assert (tree.allocator.num_free, tree.links.count) == before
    tree.check_integrity()
    assert tree.commits.commit("c", prompt(MOST)) == MOST
    tree.create([NewSpec("b", prefix=prompt(8))])
    assert tree.describe("b").length == MOST
    tree.check_integrity()


def test_an_outline_of_a_deep_tree_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.core.outline.MOST_ROWS", 20)
    pool = chain(60)
    reply = outline(pool.tree, most=512)
    assert reply.parents.size < 100
    assert ((reply.parents < np.arange(reply.parents.size)) & (reply.parents >= -1)).all()


def test_ids_are_in_order_whatever_came_and_went() -> None:
    chance, tree, names = random.Random(9), PrefixTree(4, 4, 1), set[str]()
    for _ in range(300):
        for _ in range(chance.randrange(6)):
            name = f"s{chance.randrange(40)}"
            if name in names:
                tree.free([name])
                names.remove(name)
            else:
                tree.create([NewSpec(name)])
                names.add(name)
        if chance.random() < 0.5:
            assert [view.id for view in tree.list(None, 100)] == sorted(names)
            assert tree.books.with_prefix("s1", 99) == sorted(
                name for name in names if name.startswith("s1")
            )
    for number in range(5000):
        tree.create([NewSpec("again")])
        tree.free(["again"])
        assert number < 4999 or len(tree.books._unsorted) < 2000
