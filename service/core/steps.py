"""Steps: an extension of sequences at many layers at once, and what it takes to undo it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.core.errors import IntegrityError, InvalidRequest
from service.core.sequences.books import Ids
from service.core.tree import PrefixTree
from service.core.values import Extension, Indices, Int32


@dataclass(frozen=True, slots=True, eq=False)
class StepExtension:
    """`first` is the extension of the first layer; at the other `layers` lengths alone changed.

    The page table is that of all layers, so slots and pages are the first layer's.
    """

    first: Extension
    layers: Indices


def extend_layers(
    tree: PrefixTree,
    layers: Sequence[int],
    ids: Ids,
    counts: Int32,
    offsets: Int32 | None = None,
) -> StepExtension:
    """`PrefixTree.extend` at each of `layers`, where every sequence has one length; all or none.

    Raises `InvalidRequest` where lengths differ from layer to layer, and as `extend`.
    """
    check_level(tree, layers, ids)
    first = tree.extend(layers[0], ids, counts, offsets)
    others = np.array(layers[1:], np.intp)
    if others.size:
        tree.books.lengths[np.ix_(others, columns(first))] = first.lengths
    return StepExtension(first, others)


def check_level(tree: PrefixTree, layers: Sequence[int], ids: Ids) -> None:
    """Every sequence has the same length at each of the layers, so that one plan serves them."""
    if not 0 <= min(layers) <= max(layers) < tree.num_layers:
        raise InvalidRequest("layers", list(layers), f"0 to {tree.num_layers - 1}")
    batch = tree.books.look_up_distinct(ids)
    lengths = tree.books.lengths[np.ix_(np.array(layers, np.intp), batch.indices)]
    uneven = (lengths != lengths[0]).any(axis=0)
    if uneven.any():
        at = int(uneven.argmax())
        low, high = int(lengths[:, at].min()), int(lengths[:, at].max())
        rule = f"has {low} to {high} tokens at the step's layers: all must have as many"
        raise InvalidRequest("sequences", batch.ids[at], rule)


def undo_layers(tree: PrefixTree, extension: StepExtension) -> None:
    """Take back an extension of many layers; the latest of the same sequences first.

    Raises `IntegrityError` as `PrefixTree.undo`.
    """
    first, others = extension.first, extension.layers
    if others.size:
        if not all(tree.books.holds(leaf) for leaf in first.leaves):
            raise IntegrityError("a step was to be undone whose sequences are gone")
        where = np.ix_(others, columns(first))
        if not (tree.books.lengths[where] == first.lengths).all():
            raise IntegrityError("a step was to be undone whose sequences changed since")
        tree.books.lengths[where] = first.before
    tree.undo(first)


def columns(extension: Extension) -> Indices:
    """Where the books have the sequences of an extension."""
    return np.array([leaf.index for leaf in extension.leaves], np.intp)
