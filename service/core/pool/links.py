"""Links between nodes and leaves: splits and merges.

Nothing here allocates pages: a split or merge moves pages between nodes, never in or out.
"""

from __future__ import annotations

import numpy as np

from service.core.nodes import Int32, Leaf, Node, compact
from service.core.pool.named_pages import NamedPages


class Links:
    """Links between nodes and leaves; `count` is the number of nodes, `named` has their names."""

    def __init__(self, named: NamedPages) -> None:
        self.count = 0
        self.named = named

    def node_ending_at(self, leaf: Leaf, end: int) -> Node | None:
        """The node of `leaf`'s path whose last page is the path's `end`-th; None for `end = 0`.

        If none ends there, a node or the leaf is split. The new node has one child, so the caller
        must attach another or name the node. The lower part of a split node stays the same object.
        `end` counts full pages of the path.
        """
        if end == 0:
            return None
        if end > leaf.start:
            return self.split_off(leaf, leaf.table.read(leaf.start, end).copy())
        node = leaf.parent
        while node is not None and node.start >= end:
            node = node.parent
        return node if node is None or node.end == end else self.split(node, end)

    def split(self, node: Node, end: int) -> Node:
        """Split a node; returns the upper part, whose last page is the path's `end`-th."""
        size = end - node.start
        if node.name is not None:
            self.named.count(node.pages, node.name, -1)
        upper = self.split_off(node, compact(node.pages[:size]))
        node.pages = compact(node.pages[size:])
        if node.name is not None:
            self.named.split(upper, node, node.name)
        return upper

    def split_off(self, lower: Node | Leaf, pages: Int32) -> Node:
        """Move `pages` from the front of `lower` to a new node above it."""
        upper = Node(lower.parent, lower.start, pages, {lower})
        if lower.parent is not None:
            lower.parent.children.remove(lower)
            lower.parent.children.add(upper)
        lower.parent = upper
        lower.start += pages.size
        self.count += 1
        self.named.num_changes += 1
        return upper

    def attach(self, leaf: Leaf, node: Node | None) -> None:
        """Make `leaf` a child of `node` (None: it shares nothing)."""
        self.named.num_changes += 1
        leaf.parent = node
        leaf.start = 0 if node is None else node.end
        if node is not None:
            node.children.add(leaf)
            if node.name is not None:
                self.named.hold(node)

    def detach(self, leaf: Leaf, node: Node | None) -> None:
        """Remove `leaf` from `node`; an unnamed node merges with its last child."""
        if node is None:
            return
        node.children.remove(leaf)
        if node.name is not None:
            self.release(node)
        elif len(node.children) == 1:
            (child,) = node.children
            self.merge(node, child)

    def release(self, node: Node | None) -> None:
        """Remove a holder from a named node; nodes without holders become cached.

        Nodes that become cached together are merged.
        """
        while node is not None and self.named.unhold(node):
            parent = node.parent
            while parent is not None and self.named.is_last_holder(parent, node):
                self.merge(parent, node)
                parent = node.parent
            node = parent

    def merge_up(self, node: Node) -> None:
        """Merge a named node with its parent if both have the same holders and retention."""
        parent = node.parent
        if parent is not None and self.named.are_alike(parent, node):
            self.merge(parent, node)

    def remove(self, node: Node) -> None:
        """Unlink a node without children."""
        self.count -= 1
        self.named.num_changes += 1
        if node.parent is not None:
            node.parent.children.remove(node)

    def merge(self, node: Node, child: Node | Leaf) -> None:
        """Move the pages of `node` to its only child, which replaces it."""
        self.count -= 1
        self.named.num_changes += 1
        if node.name is not None and isinstance(child, Node):
            self.named.absorb(node, child)
        child.parent = node.parent
        child.start = node.start
        if isinstance(child, Node):
            child.pages = np.concatenate((node.pages, child.pages))
            if child.name is not None:
                self.named.count(child.pages, child.name, 1)
        else:
            child.seen, child.due = min(child.seen, node.start), 0
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.add(child)
