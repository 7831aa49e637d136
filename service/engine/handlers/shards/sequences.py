"""Shards are made, claimed, cut, deleted, and moved between engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from service.core.errors import InvalidRequest, SequenceTaken, UnknownSequence
from service.core.shards import (
    WHOLE,
    Shard,
    ShardLayout,
    as_shards,
    check_epochs,
    epoch_of,
    layout_of,
)
from service.core.values import NewSpec
from service.engine.handlers import exports, imports, sequences, truncate
from service.engine.handlers.rows import NUMBER_BYTES
from service.engine.handlers.shards.batch import refuse_shards
from service.engine.loop.job import Answer, Completed, Seconds, Work
from service.engine.loop.request import Request
from service.engine.store.store import Store
from service.operations.sequences import ShardAnswer
from service.operations.transfer import Header

EPOCH_BYTES: Final = 64
"""Room for an epoch in an answer."""


def create_sequences(store: Store, request: Request, seconds: Seconds) -> Work:
    num_layers = store.geometry.num_layers

    def with_shards(specs: list[NewSpec], first: int) -> list[NewSpec]:
        new = request.fields.sequences[first : first + len(specs)]
        for index, one in enumerate(new):
            if one.shard is not None and one.shard.ranks > 1:
                layout = ShardLayout(one.shard.rank, one.shard.ranks)
                shard = Shard(layout, np.zeros(num_layers, np.int32), one.epoch or 0)
                specs[index] = replace(specs[index], shard=shard)
                store.has_shards = True
        return as_shards(store.tree, specs, [one.epoch or 0 for one in new])

    return sequences.create_sequences(store, request, seconds, with_shards)


def claim(store: Store, request: Request, _: Seconds) -> Work:
    """Start a new epoch; answers the one before, and the lengths of the whole sequence."""
    fields = request.fields
    request.place.require(EPOCH_BYTES + NUMBER_BYTES * store.geometry.num_layers)
    shard = store.tree.books.leaf(fields.id).shard
    if shard is None:
        raise UnknownSequence([fields.id])  # of this id there is a whole one now
    before = shard.claim(fields.id, fields.epoch)
    request.place.lay({"epoch": before, "lengths": shard.lengths.tolist()})
    return Completed()


class ShardCut:
    """A truncation of a shard's whole sequence to `fields.length`, all layers or `fields.layer`.

    `held_length`: the number of tokens that this engine keeps. Raises `SequenceTaken`, and
    `InvalidRequest` beyond the whole sequence's length.
    """

    def __init__(self, shard: Shard, name: str, fields: Any, page_size: int) -> None:
        self._shard, self._fields = shard, fields
        if (fields.epoch or 0) < shard.epoch:
            raise SequenceTaken({name: shard.epoch})
        layer = fields.layer
        self._layers = slice(None) if layer is None else slice(layer, layer + 1)
        longest = int(shard.lengths[self._layers].min())
        if not 0 <= fields.length <= longest:
            rule = f"0 to {longest}, the sequence's length"
            raise InvalidRequest("length", fields.length, rule)
        self.held_length = shard.layout.held(fields.length, page_size)

    def note(self) -> None:
        """Record the new length and epoch, once the tokens are cut."""
        self._shard.epoch = self._fields.epoch or 0
        self._shard.lengths[self._layers] = self._fields.length


def truncate_sequence(store: Store, request: Request, seconds: Seconds) -> Work:
    fields = request.fields
    shard = store.tree.books.leaf(fields.id).shard
    if shard is None:
        if fields.epoch:
            raise SequenceTaken({fields.id: 0})
        return truncate.truncate(store, request, seconds)
    cut = ShardCut(shard, fields.id, fields, store.geometry.page_size)
    if fields.keep:
        refuse_shards(store, (fields.id,), "a truncation with keep", "id")
    return truncate.truncate(store, request, seconds, cut)


def delete_sequences(store: Store, request: Request, seconds: Seconds) -> Work:
    """A sharded sequence counts once, at rank 0. `skip` skips claimed shards."""
    leaf = store.tree.books.leaf

    def count(names: Sequence[str]) -> int:
        return sum(layout_of(leaf(name)).rank == 0 for name in names)

    def claimed(names: Sequence[str]) -> list[str]:
        return [name for name in names if epoch_of(leaf(name))]

    return truncate.delete_sequences(store, request, seconds, count, claimed)


def export_sequence(store: Store, request: Request, seconds: Seconds) -> Work:
    fields = request.fields
    if fields.shard is None:
        refuse_shards(store, (fields.id,), "an export without its shard", "id")
        return exports.export_sequence(store, request, seconds)
    layout = ShardLayout(fields.shard.rank, fields.shard.ranks)
    if store.tree.books.leaf(fields.id).shard is None:
        return exports.export_sequence(store, request, seconds, layout)
    check_layout(store, fields.id, layout)
    return exports.export_sequence(store, request, seconds)


def import_sequence(store: Store, request: Request, seconds: Seconds) -> Answer:
    """The new shard gets its epoch and the whole lengths when the import begins."""
    fields, shard = request.fields, None
    if fields.header is not None:
        if fields.shard is not None:
            shard = shard_of(fields.shard, fields.header)
            store.has_shards = True
        if fields.base is not None:
            layout = WHOLE if shard is None else shard.layout
            check_layout(store, fields.base, layout, "base")
    return imports.import_sequence(store, request, seconds, shard)


def shard_of(given: ShardAnswer, header: Header) -> Shard:
    """Raises `InvalidRequest` if the header's lengths are wrong for this shard."""
    layout = ShardLayout(given.rank, given.ranks)
    here = [layout.held(length, header.page_size) for length in given.lengths]
    if header.lengths != here:
        rule = f"kv_len of the whole per layer: {here} of it would be here, not {header.lengths}"
        raise InvalidRequest("shard.lengths", given.lengths, rule)
    return Shard(layout, np.array(given.lengths, np.int32), given.epoch)


def check_mark(store: Store, request: Request) -> None:
    """Raises `InvalidRequest`, `SequenceTaken` if a sequence to be marked has changed."""
    fields = request.fields
    if fields.state == "leaving" and fields.id not in store.move_marks.marks:
        layout = WHOLE
        if fields.shard is not None:
            layout = ShardLayout(fields.shard.rank, fields.shard.ranks)
        check_layout(store, fields.id, layout)
        if fields.shard is not None:
            check_epochs(store.tree, (fields.id,), [fields.epoch])


def check_layout(store: Store, name: str, layout: ShardLayout, field: str = "id") -> None:
    """Raises `UnknownSequence`, and `InvalidRequest` where other pages of a sequence are here."""
    here = layout_of(store.tree.books.leaf(name))
    if here != layout:
        rule = f"this engine holds rank {here.rank} of {here.ranks}, expected {layout.rank} of "
        raise InvalidRequest(field, name, f"{rule}{layout.ranks}")
