"""Steps: extends sequences at many layers at once, and rolls such an extension back."""

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
    """`first` is the extension of the first layer; at the other `layers` only lengths changed.

    All layers share one page table, so the slots and pages are the first layer's.
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
    """`PrefixTree.extend` at each of `layers`; all or none.

    Raises `InvalidRequest` if a sequence's lengths differ between the layers, and as `extend`.
    """
    check_level(tree, layers, ids)
    first = tree.extend(layers[0], ids, counts, offsets)
    others = np.array(layers[1:], np.intp)
    if others.size:
        tree.books.lengths[np.ix_(others, columns(first))] = first.lengths
    return StepExtension(first, others)


def check_level(tree: PrefixTree, layers: Sequence[int], ids: Ids) -> None:
    """Raises `InvalidRequest` unless each sequence has one length at all the layers, so that one
    plan serves them."""
    if not 0 <= min(layers) <= max(layers) < tree.num_layers:
        raise InvalidRequest("layers", list(layers), f"0 to {tree.num_layers - 1}")
    batch = tree.books.look_up_distinct(ids)
    lengths = tree.books.lengths[np.ix_(np.array(layers, np.intp), batch.indices)]
    uneven = (lengths != lengths[0]).any(axis=0)
    if uneven.any():
        at = int(uneven.argmax())
        low, high = int(lengths[:, at].min()), int(lengths[:, at].max())
        rule = f"has {low} to {high} tokens at the step's layers: its lengths must be equal"
        raise InvalidRequest("sequences", batch.ids[at], rule)


def undo_layers(tree: PrefixTree, extension: StepExtension) -> None:
    """Roll back an extension of many layers; of several of the same sequences, the newest first.

    Raises `IntegrityError` as `PrefixTree.undo`.
    """
    first, others = extension.first, extension.layers
    if others.size:
        if not all(tree.books.holds(leaf) for leaf in first.leaves):
            raise IntegrityError("cannot roll back a step: its sequences were deleted")
        where = np.ix_(others, columns(first))
        if not (tree.books.lengths[where] == first.lengths).all():
            raise IntegrityError("cannot roll back a step: its sequences have changed since")
        tree.books.lengths[where] = first.before
    tree.undo(first)


def columns(extension: Extension) -> Indices:
    """The columns of an extension's sequences in the books."""
    return np.array([leaf.index for leaf in extension.leaves], np.intp)
