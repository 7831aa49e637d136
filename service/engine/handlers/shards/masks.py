"""Masks over shards: from the caller's mask, and for windows of causal rows.

A row's window in the whole sequence is one stretch of the tokens held here, but its length differs
from row to row. Kernels have one window length, so they get a mask.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kernels.backend import Array, Int32, Mask
from kernels.masks import make_mask
from service.core.errors import InvalidRequest
from service.core.plans.ragged import lens_of
from service.core.sequences.books import Ids
from service.core.shards.rows import ShardView, tokens_here
from service.core.tree import PrefixTree
from service.operations.schema.fields import check_mask_length

MOST_BYTES: Final = 256 * 2**20


def shard_mask(
    tree: PrefixTree, fields: Any, ids: Ids, view: ShardView, given: Array | None
) -> Mask | None:
    """The mask that a decode or prefill over shards needs, if any, for the request's rows."""
    at = (tree, ids, fields.layer, fields.qo_indptr_array, view)
    if given is not None:
        return own_mask(*at, given)
    hides = getattr(fields, "causal", False) and bool((lens_of(fields.qo_indptr_array) > 1).any())
    return window_mask(*at) if hides and view.window_left >= 0 else None


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
    tree: PrefixTree,
    ids: Ids,
    layer: int,
    qo_indptr: Int32,
    view: ShardView,
    given: Array,
) -> Mask:
    """This engine's columns of a caller's mask over whole sequences, within the window.

    `given` is BOOL or, as UINT8, its bits. Raises `InvalidRequest` for a mask of another length.
    """
    kv_lens, leaves = tree.read(ids, layer)
    qo_lens, packed = lens_of(qo_indptr), given.dtype == np.uint8
    check_mask_length(given.size, packed, qo_lens, view.lengths)
    first, row, begin = view.first_seen(leaves, qo_lens, tree.page_size), 0, 0
    parts = [np.zeros(0, np.bool_)]
    for leaf, rows, length in zip(leaves, qo_lens.tolist(), view.lengths.tolist(), strict=True):
        area = rows * length
        end = begin + (-(-area // 8) if packed else area)
        part = given.reshape(-1)[begin:end]
        if packed:
            part = np.unpackbits(part, count=area, bitorder="little").view(np.bool_)
        own = part.reshape(rows, length)[:, tokens_here(leaf, length, tree.page_size)]
        own = own & (np.arange(own.shape[1]) >= first[row : row + rows, None])
        parts.append(own.reshape(-1))
        row, begin = row + rows, end
    return make_mask(np.concatenate(parts), qo_lens, kv_lens)
