"""Shards move between engines: exports, imports, and transfers of ownership."""

from __future__ import annotations

import numpy as np

from service.core.errors import InvalidRequest
from service.core.shards.layout import Shard, ShardLayout
from service.core.shards.rows import WHOLE, check_epochs, layout_of
from service.engine.handlers import exports, imports
from service.engine.handlers.shards.batch import refuse_shards
from service.engine.loop.job import Seconds, Work
from service.engine.loop.request import Request
from service.engine.store.store import Store
from service.operations.sequences import ShardAnswer
from service.operations.transfer import Header


def export_sequence(store: Store, request: Request, seconds: Seconds) -> Work:
    fields = request.fields
    if fields.shard is None:
        refuse_shards(store, request, (fields.id,), "an export without its shard", "id")
        return exports.export_sequence(store, request, seconds)
    layout = ShardLayout(fields.shard.rank, fields.shard.ranks)
    if store.tree.books.leaf(fields.id).shard is None:
        return exports.export_sequence(store, request, seconds, layout)
    check_layout(store, request, fields.id, layout)
    return exports.export_sequence(store, request, seconds)


def import_sequence(store: Store, request: Request, seconds: Seconds) -> Work:
    """The new shard gets its epoch and the whole lengths when the import begins."""
    fields, shard = request.fields, None
    if fields.header is not None:
        if fields.shard is not None:
            shard = shard_of(fields.shard, fields.header)
            store.has_shards = True
        if fields.base is not None:
            layout = WHOLE if shard is None else shard.layout
            check_layout(store, request, fields.base, layout, "base")
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
        check_layout(store, request, fields.id, layout)
        if fields.shard is not None:
            check_epochs(store.tree, (fields.id,), [fields.epoch])


def check_layout(
    store: Store, request: Request, name: str, layout: ShardLayout, field: str = "id"
) -> None:
    """Raises `UnknownSequence`, and `InvalidRequest` where other pages of a sequence are here."""
    here = layout_of(store.tree.books.leaf(name))
    if here != layout:
        rule = f"this engine holds rank {here.rank} of {here.ranks}, expected {layout.rank} of "
        raise InvalidRequest(field, request.tenant.shown(name), f"{rule}{layout.ranks}")
