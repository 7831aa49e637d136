"""Shards whose sequence has one writer at a time: claimed by epochs, cut by them."""

from __future__ import annotations

from typing import Any, Final

from service.core.errors import InvalidRequest, SequenceTaken
from service.core.prefix.nodes import Leaf
from service.core.shards.rows import claim, epoch_of
from service.engine.handlers.rows import NUMBER_BYTES
from service.engine.loop.job import Answered, Seconds, Work
from service.engine.loop.request import Request
from service.engine.store.store import Store

EPOCH_BYTES: Final = 64
"""Room for an epoch in an answer."""


def held_after(store: Store, leaf: Leaf, fields: Any) -> int:
    """How many tokens are to be kept here. Raises `SequenceTaken`, and `InvalidRequest` beyond the
    whole sequence's length."""
    length: int = fields.length
    epoch = fields.epoch or 0
    if epoch < epoch_of(leaf) or (epoch and leaf.whole is None):
        raise SequenceTaken({leaf.id: epoch_of(leaf)})
    if leaf.whole is None:
        return length
    known = leaf.whole.lengths
    longest = int(known.min() if fields.layer is None else known[fields.layer])
    if not 0 <= length <= longest:
        raise InvalidRequest("length", length, f"0 to {longest}, the sequence's length")
    return leaf.shard.held(length, store.geometry.page_size)


def cut_whole(leaf: Leaf, fields: Any) -> None:
    """What a shard knows of its sequence, once that was cut."""
    if leaf.whole is not None:
        leaf.whole.epoch = fields.epoch or 0
        leaf.whole.lengths[slice(None) if fields.layer is None else fields.layer] = fields.length


def claim_shard(store: Store, request: Request, _: Seconds) -> Work:
    fields = request.fields
    request.place.require(EPOCH_BYTES + NUMBER_BYTES * store.geometry.num_layers)
    leaf = store.tree.books.leaf(fields.id)
    before = claim(leaf, fields.epoch)
    lengths = [] if leaf.whole is None else leaf.whole.lengths.tolist()
    request.place.lay({"epoch": before, "lengths": lengths})
    return Answered()
