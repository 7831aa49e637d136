"""Attention, append and gather over batches with shards."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kernels.backend import Array, Int32, Mask
from kernels.masks import make_mask
from service.core import shards as core
from service.core.errors import InvalidRequest
from service.core.plans.ragged import lens_of
from service.core.sequences.books import Ids
from service.core.shards import (
    ShardView,
    check_epochs,
    grown,
    has_shards,
    held,
    leaves_of,
    tokens_here,
    whole_lengths,
)
from service.core.tree import PrefixTree
from service.engine.handlers import attention, rows, steps
from service.engine.loop.job import OpenedStep, Seconds, Work
from service.engine.loop.request import Request
from service.engine.store.plan_cache import Planned
from service.engine.store.store import Store
from service.operations.schema.fields import check_mask_length

MOST_BYTES: Final = 256 * 2**20


def window_mask(tree: PrefixTree, ids: Ids, layer: int, qo_indptr: Int32, view: ShardView) -> Mask:
    """The tokens in each causal row's window, in the order of the request's rows.

    Bits begin with the first page that any row's window can reach. Raises `InvalidRequest` for more
    than `MOST_BYTES`.
    """
    leaves, qo_lens, size = tree.read(ids, layer)[1], lens_of(qo_indptr), tree.page_size
    last = view.positions(leaves, qo_lens, size, hides=True).astype(np.int64)
    base = max(int(last.min(initial=0)) - view.window_left, 0) // size * size
    width = max(1, -(-(int(last.max(initial=0)) + 1 - base) // 8))
    if last.size * width > MOST_BYTES:
        rule = f"over shards takes a mask of {last.size * width} bytes, {MOST_BYTES} at most"
        raise InvalidRequest("window_left", view.window_left, f"{rule}: send fewer rows at once")
    bits = np.full((last.size, width), 0xFF, np.uint8)
    hidden = np.maximum(view.first_seen(leaves, qo_lens, size) - base, 0)
    for row, (full, rest) in enumerate(zip(*np.divmod(hidden, 8), strict=True)):
        bits[row, :full] = 0
        bits[row, full : full + 1] = 0xFF << int(rest) & 0xFF
    return Mask(bits.reshape(-1), np.arange(last.size, dtype=np.int64) * 8 * width - base)


def own_mask(
    tree: PrefixTree, ids: Ids, layer: int, qo_indptr: Int32, view: ShardView, given: Array
) -> Mask:
    """This engine's columns of a caller's mask over whole sequences, within the window.

    `given` is BOOL or, as UINT8, its bits. Raises `InvalidRequest` for a mask of another length.
    """
    kv_lens, leaves = tree.read(ids, layer)
    qo_lens, packed = lens_of(qo_indptr), given.dtype == np.uint8
    check_mask_length(given.size, packed, qo_lens, view.lengths)
    first, row, begin = view.first_seen(leaves, qo_lens, tree.page_size), 0, 0
    parts = [np.zeros(0, np.bool_)]
    for leaf, count, length in zip(leaves, qo_lens.tolist(), view.lengths.tolist(), strict=True):
        area = count * length
        end = begin + (-(-area // 8) if packed else area)
        part = given.reshape(-1)[begin:end]
        if packed:
            part = np.unpackbits(part, count=area, bitorder="little").view(np.bool_)
        own = part.reshape(count, length)[:, tokens_here(leaf, length, tree.page_size)]
        own = own & (np.arange(own.shape[1]) >= first[row : row + count, None])
        parts.append(own.reshape(-1))
        row, begin = row + count, end
    return make_mask(np.concatenate(parts), qo_lens, kv_lens)


class ShardBatch:
    """The sequences of one request, of which some are shards.

    `view` is the input of plans, appended tokens included; None for operations without a plan.
    """

    extend_layers = staticmethod(core.extend_layers)

    def __init__(self, store: Store, request: Request, view: ShardView | None = None) -> None:
        self.view = view
        self._store, self._request = store, request

    def mask(self, planned: Planned) -> Mask | None:
        """The request's mask and window over this engine's tokens, for the plan's rows."""
        tensors, fields = self._request.tensors, self._request.fields
        given = tensors.get("packed_mask", tensors.get("mask"))
        if self.view is None:
            raise RuntimeError("a mask over shards without a view: this is a bug")
        ids, order = self._store.look_up(self._request), planned.plan.order
        at = (self._store.tree, ids, fields.layer, fields.qo_indptr_array, self.view)
        hides = getattr(fields, "causal", False) and (lens_of(fields.qo_indptr_array) > 1).any()
        mask = None
        if given is not None:
            mask = own_mask(*at, given)
        elif hides and self.view.window_left >= 0:
            mask = window_mask(*at)
        if mask is None or order is None:
            return mask
        return Mask(mask.bits, mask.row_offsets[order])

    def held_span(self) -> tuple[Any, Any]:
        """`start` and `stop` of a gather among this engine's tokens, int64 [B] or None."""
        fields, size = self._request.fields, self._store.geometry.page_size
        rank, ranks = core.ranks_of(leaves_of(self._store.tree, fields.ids))
        stop = None if fields.stop is None else held(fields.stop, rank, ranks, size)
        return held(fields.start, rank, ranks, size), stop


def append(store: Store, request: Request, seconds: Seconds) -> Work:
    fields, batch = request.fields, store.look_up(request)
    check_epochs(store.tree, batch, fields.epochs)
    if fields.layers is not None:
        refuse_shards(store, batch, "an append for many layers")
    if not has_shards(store.tree, batch):
        return rows.append(store, request, seconds)
    return rows.append(store, request, seconds, ShardBatch(store, request))


def gather(store: Store, request: Request, seconds: Seconds) -> Work:
    fields = request.fields
    if fields.epochs is not None or fields.stop != 0:  # a gather of no rows asks which ids exist
        check_epochs(store.tree, fields.ids, fields.epochs)
    if not has_shards(store.tree, fields.ids):
        return rows.gather(store, request, seconds)
    return rows.gather(store, request, seconds, ShardBatch(store, request))


def attend(store: Store, request: Request, seconds: Seconds) -> Work:
    return attention.attend(store, request, seconds, paged_batch(store, request))


def paged_batch(store: Store, request: Request) -> ShardBatch | None:
    """None if no sequence is a shard.

    Raises `LengthMismatch` for wrong `offsets`, and `SequenceTaken` for wrong `epochs`.
    """
    fields, tree, batch = request.fields, store.tree, store.look_up(request)
    check_epochs(tree, batch, fields.epochs)
    if not has_shards(tree, batch):
        return None
    lengths = whole_lengths(tree, fields.layer, batch, fields.offset_array)
    if "k" in request.tensors:
        lengths = grown(lengths, lens_of(fields.qo_indptr_array))
    return ShardBatch(store, request, ShardView(lengths, fields.window_left))


def check_cascade(store: Store, request: Request) -> None:
    """Raises `SequenceTaken` for claimed shards, `InvalidRequest` for causal rows over shards."""
    fields = request.fields
    names = list({name: 0 for level in fields.levels for name in level.ids})
    check_epochs(store.tree, names, None)
    if fields.causal and has_shards(store.tree, fields.levels[-1].ids):
        rule = "must be false over shards: this engine does not know the rows' positions"
        raise InvalidRequest("causal", True, rule)


def step(store: Store, request: Request, seconds: Seconds) -> OpenedStep:
    fields, tree = request.fields, store.tree
    if fields.op == "echo":
        return steps.step(store, request, seconds)
    check_epochs(tree, fields.ids, None)
    if not has_shards(tree, fields.ids):
        return steps.step(store, request, seconds)
    lengths = whole_lengths(tree, fields.layers[0], fields.ids, fields.offset_array)
    if max(fields.windows) >= 0:
        rule = "must be -1 in a step over shards: decode and prefill without a step take windows"
        raise InvalidRequest("window_left", max(fields.windows), rule)
    if fields.append:
        lengths = grown(lengths, np.asarray(fields.counts, np.int32))
    return steps.step(store, request, seconds, ShardBatch(store, request, ShardView(lengths, -1)))


def refuse_shards(store: Store, ids: Ids, operation: str, field: str = "sequences") -> None:
    """Raises `InvalidRequest` for an operation that needs whole sequences."""
    if shards := [leaf.id for leaf in leaves_of(store.tree, ids) if leaf.shard is not None]:
        rule = f"is over several engines: {operation} takes sequences that are on one"
        raise InvalidRequest(field, shards[0], rule)
