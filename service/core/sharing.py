"""Measures how much sequences share, a small piece at a time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final, NamedTuple

import numpy as np

from service.core.prefix.nodes import Leaf, Node
from service.core.sequences.books import SequenceBooks

LEAVES_AT_ONCE: Final = 64


class Sharing(NamedTuple):
    """Unnamed nodes that sequences share, and tokens seen / tokens stored (1: nothing shared)."""

    num_unnamed: int = 0
    ratio: float = 1.0


def sharing_steps(
    books: SequenceBooks, leaves: Sequence[Leaf], page_size: int
) -> Generator[None, None, Sharing]:
    """Count the sequences, each by its minimum kv_len, and every node above them.

    A change between two steps may or may not be counted.
    """
    seen = shared = num_unnamed = 0
    nodes: set[Node] = set()
    for begin in range(0, len(leaves), LEAVES_AT_ONCE):
        some = [leaf for leaf in leaves[begin : begin + LEAVES_AT_ONCE] if books.holds(leaf)]
        columns = np.array([leaf.index for leaf in some], np.intp)
        seen += int(books.lengths[:, columns].min(axis=0).sum(dtype=np.int64))
        shared += sum(leaf.start for leaf in some)
        for leaf in some:
            node = leaf.parent
            while node is not None and node not in nodes:
                nodes.add(node)
                num_unnamed += node.name is None
                shared -= node.pages.size
                node = node.parent
                yield
        yield
    stored = seen - shared * page_size
    return Sharing(num_unnamed, seen / stored if stored > 0 else 1.0)
