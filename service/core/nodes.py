"""The links of the prefix tree: shared nodes, private leaves, and how they split and merge.

Nothing here allocates pages; a split or a merge moves pages between holders, never in or out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Node:
    """Full pages seen by every sequence below it, and never written again.

    `start` counts the pages before it on the path. A node has at least one page and, between
    operations, at least two children.
    """

    parent: Node | None
    start: int
    pages: Int32
    children: set[Node | Leaf]

    @property
    def end(self) -> int:
        """Pages of the path up to and with this node."""
        return self.start + self.pages.size


@dataclass(slots=True, eq=False)
class Leaf:
    """The private end of one sequence's path: the only part that is ever written.

    `table` is the sequence's whole page table, shared pages first, in a buffer that grows by
    doubling; what is valid of it is `num_pages` in the sequence's books. Pages from `start` on are
    the leaf's own. `index` is the sequence's place in the books; `origin` the id it was forked off.
    """

    id: str
    index: int
    origin: str | None
    parent: Node | None
    start: int
    table: Int32

    def push(self, held: int, pages: Int32) -> None:
        """Put `pages` after the first `held` of the table."""
        end = held + pages.size
        if end > self.table.size:
            self._make_room(held, end)
        self.table[held:end] = pages

    def push_one(self, held: int, page: int) -> None:
        """As `push`, for one page: what a decode step does to every sequence now and then."""
        if held == self.table.size:
            self._make_room(held, held + 1)
        self.table[held] = page

    def _make_room(self, held: int, end: int) -> None:
        grown = np.empty(max(end, 2 * held), dtype=np.int32)
        grown[:held] = self.table[:held]
        self.table = grown


class Links:
    """How nodes and leaves hang together; `count` is the number of nodes."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def node_ending_at(self, leaf: Leaf, end: int) -> Node | None:
        """The node of `leaf`'s path whose last page is the path's `end`-th; None for `end = 0`.

        Splits a node, or the front off the leaf, where none ends there; a node made that way has
        one child, so the caller must hang another under it. The part of a split node that is
        further from the root stays the same object. `end` counts full pages of the path.
        """
        if end == 0:
            return None
        if end > leaf.start:
            return self._split_off(leaf, leaf.table[leaf.start : end].copy())
        node = leaf.parent
        while node is not None and node.start >= end:
            node = node.parent
        if node is None or node.end == end:
            return node
        size = end - node.start
        upper = self._split_off(node, node.pages[:size])
        node.pages = node.pages[size:]
        return upper

    def _split_off(self, lower: Node | Leaf, pages: Int32) -> Node:
        """A new node that takes `pages` off the front of `lower` and stands above it."""
        upper = Node(lower.parent, lower.start, pages, {lower})
        if lower.parent is not None:
            lower.parent.children.remove(lower)
            lower.parent.children.add(upper)
        lower.parent = upper
        lower.start = upper.end
        self.count += 1
        return upper

    def attach(self, leaf: Leaf, node: Node | None) -> None:
        """Hang `leaf` under `node` (None: it shares nothing)."""
        leaf.parent = node
        leaf.start = 0 if node is None else node.end
        if node is not None:
            node.children.add(leaf)

    def detach(self, leaf: Leaf, node: Node | None) -> None:
        """Take `leaf` from under `node`, and merge the node into its child if one alone is left."""
        if node is None:
            return
        node.children.remove(leaf)
        if len(node.children) > 1:
            return
        self.count -= 1
        (child,) = node.children
        child.parent = node.parent
        child.start = node.start
        if isinstance(child, Node):
            child.pages = np.concatenate((node.pages, child.pages))
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.add(child)
