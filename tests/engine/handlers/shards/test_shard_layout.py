"""The tokens of a whole sequence that a shard holds, and its record of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from service.core.errors import InvalidRequest
from service.core.shards import Shard, ShardLayout, ShardView, as_shards, extend_layers
from service.core.tree import PrefixTree
from service.core.values import Int32, NewSpec
from service.engine.handlers.exports import generation


@pytest.mark.parametrize("ranks", range(1, 5))
def test_the_least_whole_sequence_for_full_pages_of_a_shard(ranks: int) -> None:
    for rank in range(ranks):
        layout = ShardLayout(rank, ranks)
        assert layout.whole_for(0, 4) == 0
        for pages in range(1, 6):
            whole = layout.whole_for(pages, 4)
            assert layout.held(whole, 4) == 4 * pages
            assert layout.held(whole - 1, 4) < 4 * pages


def int32(*values: int) -> Int32:
    return np.array(values, np.int32)


@pytest.mark.parametrize("window", [-1, 0, 1, 5, 9, 40])
def test_a_window_of_the_whole_sequence_is_seen_in_each_shard(window: int) -> None:
    """Three queries at the end of 23 tokens, in pages of 4, on each of 3 ranks."""
    length, queries, size = 23, 3, 4
    view = ShardView(int32(length), window)
    for rank in range(3):
        tree = PrefixTree(16, size, 1)
        tree.create([NewSpec("a", shard=Shard(ShardLayout(rank, 3), int32(length)))])
        leaves = [tree.books.leaf("a")]
        own = [at for at in range(length) if at // size % 3 == rank]
        places = range(length - queries, length)
        last = [sum(at <= place for at in own) - 1 for place in places]
        first = [sum(at < place - window for at in own) for place in places]
        count = int32(queries)
        assert view.positions(leaves, count, size, hides=True).tolist() == last
        if window < 0:
            assert view.positions(leaves, count, size, hides=False).tolist() == last
            assert view.first_seen(leaves, count, size).tolist() == [0] * queries
        else:
            assert view.positions(leaves, count, size, hides=False).tolist() == [
                begin + window for begin in first
            ]
            assert view.first_seen(leaves, count, size).tolist() == first


@pytest.fixture
def tree() -> PrefixTree:
    """With sequence a, of which rank 0 of 2 is here; pages of 4."""
    tree = PrefixTree(16, 4, 1)
    tree.create([NewSpec("a", shard=Shard(ShardLayout(0, 2), int32(0)))])
    return tree


@pytest.mark.parametrize(("length", "is_right"), [(-1, False), (9, True), (10, False), (12, False)])
def test_a_fork_of_a_shard_is_no_longer_than_the_whole_sequence(
    tree: PrefixTree, length: int, is_right: bool
) -> None:
    """Of 9 tokens 5 are here, and of 12 tokens 8 would be."""
    extend_layers(tree, (0,), ["a"], int32(9), int32(0))
    if is_right:
        tree.create(as_shards(tree, [NewSpec("b", "a", length)], [0]))
        assert tree.describe("b").length == 5
        return
    with pytest.raises(InvalidRequest, match="0 to 9, the length of the whole parent"):
        as_shards(tree, [NewSpec("b", "a", length)], [0])
    shard = Shard(ShardLayout(0, 2), int32(0))
    with pytest.raises(InvalidRequest, match="shard of its parent") as refused:
        as_shards(tree, [NewSpec("b", "a", shard=shard)], [0])
    assert (refused.value.field, refused.value.value) == ("shard", "b")


def test_the_generation_of_a_shard_changes_with_the_whole_sequence(tree: PrefixTree) -> None:
    """Tokens that another rank stores change only the length of the whole."""
    extend_layers(tree, (0,), ["a"], int32(4), int32(0))
    leaf = tree.books.leaf("a")
    before = generation(tree, leaf, "i")
    extend_layers(tree, (0,), ["a"], int32(2), int32(4))
    assert tree.describe("a").length == 4
    assert generation(tree, leaf, "i") != before


def test_an_extension_that_is_undone_leaves_the_length_of_the_whole_as_it_was(
    tree: PrefixTree,
) -> None:
    extension = extend_layers(tree, (0,), ["a"], int32(6), int32(0))
    assert (tree.describe("a").length, extension.slots.tolist()[4:]) == (4, [-1, -1])
    tree.undo(extension)
    shard = tree.describe("a").shard
    assert shard is not None and shard.lengths.tolist() == [0]
    tree.check_integrity()
