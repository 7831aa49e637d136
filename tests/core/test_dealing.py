"""Whole sequences that become shards in their place: which pages stay, move and go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.errors import OutOfPages
from service.core.keys import Prefix
from service.core.shards import Shard, held
from service.core.tree import PrefixTree
from service.core.values import NewSpec

SIZE, LAYERS, PAGES = 4, 2, 64


def tree_of(num_pages: int = PAGES) -> PrefixTree:
    return PrefixTree(num_pages, SIZE, LAYERS)


def grown(tree: PrefixTree, name: str, count: int, parent: str | None = None, **at: Any) -> None:
    tree.create([NewSpec(name, parent, **at)])
    for layer in range(LAYERS):
        tree.extend(layer, (name,), np.array([count], np.int32))


def named(tree: PrefixTree, name: str, pages: int) -> None:
    ids = np.arange(pages * SIZE, dtype=np.uint32)
    tree.cache.commit(name, Prefix(ids, None, ""))


def table(tree: PrefixTree, name: str) -> list[int]:
    pages: list[int] = tree.page_table((name,), 0).kv_indices.tolist()
    return pages


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 12 * SIZE),
    fork=st.integers(0, 12 * SIZE),
    more=st.integers(0, 9),
    commits=st.integers(0, 12),
    ranks=st.integers(2, 4),
    rank=st.integers(0, 3),
)
def test_a_part_stays_others_keep_theirs_and_no_page_is_lost(
    length: int, fork: int, more: int, commits: int, ranks: int, rank: int
) -> None:
    tree, shard = tree_of(), Shard(rank % ranks, ranks)
    grown(tree, "a", length)
    grown(tree, "f", 0, "a", length=min(fork, length))
    tree.extend(1, ("a",), np.array([more], np.int32))
    named(tree, "a", min(commits, length // SIZE))
    before, other = table(tree, "a"), table(tree, "f")
    before = tree.books.leaf("a").table[: tree.describe("a").pages].tolist()
    room = tree.allocator.num_free
    tree.make_room("a", shard, 0)
    copies = tree.deal_out("a", shard, 7)
    tree.check_integrity()
    view = tree.describe("a")
    lengths = np.array([length, length + more])
    assert (view.shard, view.epoch, view.whole_lengths) == (shard, 7, (length, length + more))
    assert view.lengths == tuple(held(lengths, shard.rank, ranks, SIZE).tolist())
    came_from = dict(zip(copies.dst_pages.tolist(), copies.src_pages.tolist(), strict=True))
    after = tree.books.leaf("a").table[: view.pages].tolist()
    assert [came_from.get(page, page) for page in after] == before[shard.rank :: ranks]
    assert not set(copies.src_pages.tolist()) & set(copies.dst_pages.tolist())
    assert table(tree, "f") == other
    assert not set(after) & set(other)
    tree.free(["a", "f"])
    tree.cache.evict("default", PAGES)
    tree.check_integrity()
    assert tree.allocator.num_free == PAGES >= room


def test_names_go_only_where_there_is_no_room_without_them() -> None:
    for filler, kept in ((PAGES - 16, 8), (PAGES - 8, 0)):
        tree = tree_of()
        grown(tree, "a", 8 * SIZE)
        named(tree, "a", 8)
        grown(tree, "filler", filler * SIZE)
        tree.make_room("a", Shard(0, 2), 0)
        tree.deal_out("a", Shard(0, 2), 1)
        tree.check_integrity()
        ids = np.arange(8 * SIZE, dtype=np.uint32)
        assert tree.cache.match("default", Prefix(ids, None, "")).num_pages == kept


def test_names_stay_where_it_would_not_help_to_lose_them() -> None:
    tree = tree_of()
    grown(tree, "a", 8 * SIZE)
    named(tree, "a", 8)
    grown(tree, "filler", (PAGES - 8) * SIZE)
    with pytest.raises(OutOfPages):
        tree.make_room("a", Shard(0, 2), 5)
    prefix = Prefix(np.arange(8 * SIZE, dtype=np.uint32), None, "")
    assert tree.cache.match("default", prefix).num_pages == 8
    tree.make_room("a", Shard(0, 2), 4)
    assert tree.cache.match("default", prefix).num_pages == 0


def test_what_is_shared_is_refused_where_its_part_cannot_be_copied() -> None:
    tree = tree_of()
    grown(tree, "a", 8 * SIZE)
    grown(tree, "f", 0, "a", length=8 * SIZE)
    grown(tree, "filler", (PAGES - 8 - 3) * SIZE)
    with pytest.raises(OutOfPages):
        tree.make_room("a", Shard(0, 2), 0)
    with pytest.raises(OutOfPages):
        tree.deal_out("a", Shard(0, 2), 1)
    tree.check_integrity()
    assert tree.describe("a").length == 8 * SIZE
    tree.make_room("a", Shard(0, 3), 0)
    with pytest.raises(OutOfPages):
        tree.make_room("a", Shard(0, 3), 1)
