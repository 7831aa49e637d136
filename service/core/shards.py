"""Batches with shards: epochs, the rows that are stored here, and the keys that a row sees here.

Callers count tokens of whole sequences, the books count this engine's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.errors import IntegrityError, InvalidRequest, LengthMismatch, SequenceTaken
from service.core.plans.ragged import ramps
from service.core.prefix.nodes import Leaf
from service.core.sequences.books import Ids
from service.core.tree import PrefixTree
from service.core.values import Extension, NewSpec

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Pages `rank`, `rank + ranks`, ... of a sequence."""

    rank: int
    ranks: int

    def held(self, tokens: int, page_size: int) -> int:
        """The number of tokens in these pages among the sequence's first `tokens`."""
        return int(held(tokens, self.rank, self.ranks, page_size))

    def whole_for(self, num_pages: int, page_size: int) -> int:
        """The least length of a sequence that fills `num_pages` of these pages."""
        return ((num_pages - 1) * self.ranks + self.rank + 1) * page_size if num_pages else 0


@dataclass(slots=True, eq=False)
class Shard:
    """An engine's knowledge of a sequence that it holds in part.

    `lengths` int32 [num_layers] is kv_len of the whole sequence. `epoch` numbers the door that may
    write, see `claim`; 0 while no door has claimed the sequence.
    """

    layout: ShardLayout
    lengths: Int32
    epoch: int = 0

    def claim(self, name: str, epoch: int) -> int:
        """Start a new epoch; returns the one before.

        Writers and readers of earlier epochs are rejected from now on. Raises `SequenceTaken` for
        an epoch that is not later than the present one.
        """
        before = self.epoch
        if epoch <= before:
            raise SequenceTaken({name: before})
        self.epoch = epoch
        return before

    def describe(self) -> dict[str, Any]:
        """Rank, ranks, epoch and the whole's lengths, as replies give them."""
        place = {"rank": self.layout.rank, "ranks": self.layout.ranks}
        return place | {"epoch": self.epoch, "lengths": self.lengths.tolist()}

    def fork(self, length: int | None) -> Shard:
        """The shard of a fork at `length` tokens of the whole sequence (None: all of them).

        Raises `InvalidRequest` for a length beyond the parent's.
        """
        longest = int(self.lengths.min())
        if length is None:
            length = longest
        if not 0 <= length <= longest:
            rule = f"0 to {longest}, the length of the whole parent"
            raise InvalidRequest("length", length, rule)
        return Shard(self.layout, np.full_like(self.lengths, length), self.epoch)

    def check(self, where: str, lengths: Int32, page_size: int) -> None:
        """Raises `IntegrityError` where the engine holds other `lengths` than the whole implies."""
        rank, ranks = self.layout.rank, self.layout.ranks
        if not np.array_equal(held(self.lengths, rank, ranks, page_size), lengths):
            whole = self.lengths.tolist()
            raise IntegrityError(f"{where}, rank {rank}, has {lengths.tolist()} of {whole} tokens")


def held(tokens: Any, rank: Any, ranks: Any, page_size: int) -> Any:
    """`ShardLayout.held` for numbers or int64 arrays; negative `tokens` count as none."""
    full, rest = np.divmod(np.maximum(tokens, 0), page_size)
    pages = (full - rank + ranks - 1) // ranks
    return pages * page_size + np.where(full % ranks == rank, rest, 0)


Int64 = NDArray[np.int64]
ELSEWHERE: Final = -1
"""The token slot of a row that another rank stores."""
WHOLE: Final = ShardLayout(0, 1)
"""All pages: a sequence that is not sharded."""


class ShardView(NamedTuple):
    """The input of a plan over shards: kv_len of whole sequences, int32 [B], and the window."""

    lengths: Int32
    window_left: int

    @property
    def key(self) -> tuple[bytes, int]:
        """Equal for equal plans of equal queries over equal sequences."""
        return self.lengths.tobytes(), self.window_left

    def positions(self, leaves: Sequence[Leaf], qo_lens: Int32, size: int, hides: bool) -> Int32:
        """The position of each query row among this engine's tokens, int32 [n].

        With `hides` that is the last token that the row can see. Without, rows see all later tokens
        too, and each position is `window_left` after the first token in the row's window.
        """
        at, rank, ranks = self._rows(leaves, qo_lens)
        if hides or self.window_left < 0:
            position = held(at + 1, rank, ranks, size) - 1
        else:
            position = held(at - self.window_left, rank, ranks, size) + self.window_left
        return np.asarray(position, np.int32)

    def first_seen(self, leaves: Sequence[Leaf], qo_lens: Int32, size: int) -> Int64:
        """The first of this engine's tokens in each row's window, int64 [n]."""
        at, rank, ranks = self._rows(leaves, qo_lens)
        first: Int64 = held(at - max(self.window_left, 0), rank, ranks, size)
        return first if self.window_left >= 0 else np.zeros_like(first)

    def _rows(self, leaves: Sequence[Leaf], qo_lens: Int32) -> tuple[Int64, Int64, Int64]:
        """Position in its whole sequence, rank and ranks of each query row."""
        rank, ranks = ranks_of(leaves)
        at = ramps(self.lengths - qo_lens, qo_lens).astype(np.int64)
        return at, np.repeat(rank, qo_lens), np.repeat(ranks, qo_lens)


def leaves_of(tree: PrefixTree, ids: Ids) -> list[Leaf]:
    """Raises `UnknownSequence`."""
    return tree.books.leaves(tree.books.look_up(ids).indices)


def has_shards(tree: PrefixTree, ids: Ids) -> bool:
    """Whether one of the sequences is a shard. Raises `UnknownSequence`."""
    return any(leaf.shard is not None for leaf in leaves_of(tree, ids))


def check_epochs(tree: PrefixTree, ids: Ids, epochs: Sequence[int] | None) -> None:
    """Checks that every sequence is in the epoch that its caller believes; None: 0 for each.

    Raises `UnknownSequence`, and `SequenceTaken` with the sequences that are in another.
    """
    leaves = leaves_of(tree, ids)
    pairs = zip(leaves, epochs or [0] * len(leaves), strict=True)
    if taken := {leaf.id: epoch_of(leaf) for leaf, epoch in pairs if epoch_of(leaf) != epoch}:
        raise SequenceTaken(taken)


def epoch_of(leaf: Leaf) -> int:
    return 0 if leaf.shard is None else leaf.shard.epoch


def layout_of(leaf: Leaf) -> ShardLayout:
    return WHOLE if leaf.shard is None else leaf.shard.layout


def ranks_of(leaves: Sequence[Leaf]) -> tuple[Int64, Int64]:
    """Rank and number of ranks of each, int64 [B]."""
    pairs = np.array([(layout.rank, layout.ranks) for layout in map(layout_of, leaves)], np.int64)
    rank, ranks = pairs.reshape(-1, 2).T
    return rank, ranks


def whole_lengths(tree: PrefixTree, layer: int, ids: Ids, offsets: Int32 | None) -> Int32:
    """Checks `offsets` [B], kv_len of the whole sequences, against this engine's tokens.

    Raises `InvalidRequest` if they are missing, `LengthMismatch` with the lengths held here.
    """
    lengths, leaves = tree.read(ids, layer)
    if offsets is None:
        name, layout = next((leaf.id, leaf.shard.layout) for leaf in leaves if leaf.shard)
        which = f"this engine holds rank {layout.rank} of {layout.ranks} of sequence {name}"
        raise InvalidRequest("offsets", None, f"must be given: {which}, not all of its tokens")
    rank, ranks = ranks_of(leaves)
    is_same = np.array_equal(held(offsets, rank, ranks, tree.page_size), lengths)
    for leaf, offset in zip(leaves, offsets.tolist(), strict=True):
        if leaf.shard is not None and leaf.shard.epoch:
            is_same = is_same and int(leaf.shard.lengths[layer]) == offset
    if not is_same:
        raise LengthMismatch(dict(zip((leaf.id for leaf in leaves), lengths.tolist(), strict=True)))
    return offsets


def grown(before: Int32, counts: Int32) -> Int32:
    """kv_len of sequences that get `counts` more tokens. Raises `InvalidRequest` beyond int32."""
    after = before + counts.astype(np.int64)
    if after.size and int(after.max()) > np.iinfo(np.int32).max:
        raise InvalidRequest(
            "offsets", int(before.max()), "a sequence has at most 2**31 - 1 tokens"
        )
    return after.astype(np.int32)


def extend_layers(
    tree: PrefixTree, layers: Sequence[int], ids: Ids, counts: Int32, offsets: Int32 | None = None
) -> Extension:
    """`PrefixTree.extend_layers`, with `counts` and `offsets` [B] of the whole sequences.

    The extension has a slot for every row, `ELSEWHERE` for rows that other ranks store. Its lengths
    count this engine's tokens.
    """
    before = whole_lengths(tree, layers[0], ids, offsets)
    after, size = grown(before, counts), tree.page_size
    rank, ranks = ranks_of(leaves_of(tree, ids))
    added = held(after, rank, ranks, size) - held(before, rank, ranks, size)
    extension = tree.extend_layers(layers, ids, added.astype(np.int32))
    pages = ramps(before, counts) // size
    slots = np.full(pages.size, ELSEWHERE, np.int32)
    slots[pages % np.repeat(ranks, counts) == np.repeat(rank, counts)] = extension.slots

    def set_whole_lengths(lengths: Int32) -> None:
        for leaf, length in zip(extension.leaves, lengths.tolist(), strict=True):
            if leaf.shard is not None:
                leaf.shard.lengths[list(layers)] = length

    set_whole_lengths(after)
    return replace(extension, slots=slots, after_undo=partial(set_whole_lengths, before))


def tokens_here(leaf: Leaf, length: int, size: int) -> Int64:
    """The positions of this engine's tokens among the first `length` of a sequence."""
    layout, token = layout_of(leaf), np.arange(length, dtype=np.int64)
    here: Int64 = token[token // size % layout.ranks == layout.rank]
    return here


def as_shards(tree: PrefixTree, specs: Sequence[NewSpec], epochs: Sequence[int]) -> list[NewSpec]:
    """The specs with shards for forks of shards, whose `length` then counts tokens stored here.

    `epochs` are the parents' epochs, as the caller believes. A parent may come earlier in `specs`.
    Raises `SequenceTaken`, `InvalidRequest`.
    """
    made: dict[str, NewSpec] = {}
    for spec, epoch in zip(specs, epochs, strict=True):
        made[spec.id] = spec
        if spec.parent is None or (spec.parent not in made and spec.parent not in tree.books):
            continue
        parent = made.get(spec.parent) or tree.books.leaf(spec.parent)
        shard = parent.shard
        present = 0 if shard is None else shard.epoch
        if epoch != present:
            raise SequenceTaken({spec.parent: present})
        if spec.shard is not None:
            rule = "a fork has the shard of its parent: leave it out"
            raise InvalidRequest("shard", spec.id, rule)
        if shard is not None:
            length = spec.length
            if length is not None:
                length = shard.layout.held(length, tree.page_size)
            made[spec.id] = replace(spec, shard=shard.fork(spec.length), length=length)
    return list(made.values())
