"""What an engine does with its shards of sequences: which rows it stores, and what rows see there.

Callers count in tokens of the whole sequence, the books in tokens that are held here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.errors import InvalidRequest, LengthMismatch, SequenceTaken
from service.core.plans.ragged import Int32, ramps
from service.core.prefix.nodes import Leaf
from service.core.sequences.books import Ids
from service.core.shards.layout import held
from service.core.tree import PrefixTree, set_whole
from service.core.values import Extension

Int64 = NDArray[np.int64]
ELSEWHERE: Final = -1
"""The token slot of a row that another rank stores."""


class Sight(NamedTuple):
    """What it takes to plan in whole sequences: their kv_len, int32 [B], and the window."""

    lengths: Int32
    window_left: int

    @property
    def key(self) -> tuple[bytes, int]:
        """Equal for equal plans of equal queries over equal sequences."""
        return self.lengths.tobytes(), self.window_left


def has_shards(tree: PrefixTree, ids: Ids) -> bool:
    """Whether only a part of one of the sequences is here. Raises `UnknownSequence`."""
    books = tree.books
    if not books.num_shards:
        return False
    return any(not leaf.shard.is_whole for leaf in books.leaves(books.look_up(ids).indices))


def check_epochs(tree: PrefixTree, ids: Ids, epochs: Sequence[int] | None) -> None:
    """Every sequence is in the epoch that its caller believes; 0 stands for none, as does None.

    Raises `UnknownSequence`, `SequenceTaken` with those that are in another.
    """
    books = tree.books
    if epochs is None and not books.num_shards:
        return
    leaves = books.leaves(books.look_up(ids).indices)
    given = epochs or [0] * len(leaves)
    pairs = [(leaf, epoch_of(leaf), one) for leaf, one in zip(leaves, given, strict=True)]
    if taken := {leaf.id: epoch for leaf, epoch, one in pairs if epoch != one}:
        raise SequenceTaken(taken)


def epoch_of(leaf: Leaf) -> int:
    return 0 if leaf.whole is None else leaf.whole.epoch


def claim(leaf: Leaf, epoch: int) -> int:
    """Let nobody of an earlier epoch change or read a shard any more; the epoch before.

    Raises `SequenceTaken` where it is not an earlier one, `InvalidRequest` for a whole sequence.
    """
    if leaf.whole is None:
        raise InvalidRequest("id", leaf.id, "is whole: only a part of a sequence has epochs")
    before = leaf.whole.epoch
    if epoch <= before:
        raise SequenceTaken({leaf.id: before})
    leaf.whole.epoch = epoch
    return before


def whole_lengths(tree: PrefixTree, layer: int, ids: Ids, offsets: Int32 | None) -> Int32:
    """`offsets` [B], kv_len of the whole sequences, if they agree with what is held here.

    Raises `InvalidRequest` where they are missing, `LengthMismatch` with what is held.
    """
    lengths, leaves = tree.read(ids, layer)
    if offsets is None:
        leaf = next(leaf for leaf in leaves if not leaf.shard.is_whole)
        which = f"of sequence {leaf.id} rank {leaf.shard.rank} of {leaf.shard.ranks} is here"
        raise InvalidRequest("offsets", None, f"must be given: {which}, which does not tell kv_len")
    rank, ranks = ranks_of(leaves)
    is_same = np.array_equal(held(offsets, rank, ranks, tree.page_size), lengths)
    for leaf, offset in zip(leaves, offsets.tolist(), strict=True):
        if leaf.whole is not None and leaf.whole.epoch:
            is_same = is_same and int(leaf.whole.lengths[layer]) == offset
    if not is_same:
        raise LengthMismatch(dict(zip((leaf.id for leaf in leaves), lengths.tolist(), strict=True)))
    return offsets


def grown(before: Int32, counts: Int32) -> Int32:
    """kv_len of whole sequences that get `counts` more. Raises `InvalidRequest` beyond int32."""
    after = before + counts.astype(np.int64)
    if after.size and int(after.max()) > np.iinfo(np.int32).max:
        raise InvalidRequest(
            "offsets", int(before.max()), "a sequence has at most 2**31 - 1 tokens"
        )
    return after.astype(np.int32)


def extend(
    tree: PrefixTree,
    layer: int,
    ids: Ids,
    counts: Int32,
    offsets: Int32 | None = None,
) -> Extension:
    """`PrefixTree.extend`, where `counts` and `offsets` [B] are those of the whole sequences.

    So are the `slots` of the extension: `ELSEWHERE` for rows that other ranks store. Its lengths
    are what is held here.
    """
    if not has_shards(tree, ids):
        return tree.extend(layer, ids, counts, offsets)
    before = whole_lengths(tree, layer, ids, offsets)
    rank, ranks = ranks_of(tree.read(ids, layer)[1])
    size, after = tree.page_size, grown(before, counts)
    added = held(after, rank, ranks, size) - held(before, rank, ranks, size)
    extension = tree.extend(layer, ids, added.astype(np.int32))
    pages = ramps(before, counts) // size
    slots = np.full(pages.size, ELSEWHERE, np.int32)
    slots[pages % np.repeat(ranks, counts) == np.repeat(rank, counts)] = extension.slots
    set_whole(extension.leaves, layer, after)
    return replace(extension, slots=slots, whole_before=before)


def positions(
    leaves: Sequence[Leaf], sight: Sight, qo_lens: Int32, size: int, hides: bool
) -> Int32:
    """Where each query row stands among the tokens that are held here, int32 [n].

    With `hides` that is the last one that it may see. Without, rows see all that follows, and each
    stands `window_left` after the first one that its window leaves it.
    """
    at, rank, ranks = _rows(leaves, sight, qo_lens)
    if hides or sight.window_left < 0:
        stands = held(at + 1, rank, ranks, size) - 1
    else:
        stands = held(at - sight.window_left, rank, ranks, size) + sight.window_left
    return np.asarray(stands, np.int32)


def first_seen(leaves: Sequence[Leaf], sight: Sight, qo_lens: Int32, size: int) -> Int64:
    """The first of the tokens held here that each row's window leaves it, int64 [n]."""
    at, rank, ranks = _rows(leaves, sight, qo_lens)
    first: Int64 = held(at - max(sight.window_left, 0), rank, ranks, size)
    return first if sight.window_left >= 0 else np.zeros_like(first)


def tokens_here(leaf: Leaf, length: int, size: int) -> Int64:
    """Which of the whole sequence's first `length` tokens are held here, in order."""
    token = np.arange(length, dtype=np.int64)
    here: Int64 = token[token // size % leaf.shard.ranks == leaf.shard.rank]
    return here


def ranks_of(leaves: Sequence[Leaf]) -> tuple[Int64, Int64]:
    """Rank and ranks of each, int64 [B]."""
    pairs = np.array([(leaf.shard.rank, leaf.shard.ranks) for leaf in leaves], np.int64)
    rank, ranks = pairs.reshape(-1, 2).T
    return rank, ranks


def _rows(leaves: Sequence[Leaf], sight: Sight, qo_lens: Int32) -> tuple[Int64, Int64, Int64]:
    """Position in its whole sequence, rank and ranks of each query row."""
    rank, ranks = ranks_of(leaves)
    at = ramps(sight.lengths - qo_lens, qo_lens).astype(np.int64)
    return at, np.repeat(rank, qo_lens), np.repeat(ranks, qo_lens)
