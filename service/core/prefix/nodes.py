"""Nodes of the prefix tree: shared nodes of whole pages, private leaves, and their links.

Nothing here allocates pages: a split or merge moves pages between nodes, never in or out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from service.core.errors import IntegrityError, InvalidRequest
from service.core.sequences.page_table import PageTable

if TYPE_CHECKING:
    from service.core.pool.namespaces import Namespace, Root
    from service.core.prefix.named_pages import NamedPages

Int32 = NDArray[np.int32]

DEFAULT_PRIORITY: Final = 35
FOREVER: Final = math.inf
MAX_WALKED: Final = 65536
"""Maximum nodes that one turn visits for a batch: some milliseconds."""
REFERENCED: Final = 1
PINNED: Final = 2
CACHED: Final = 3
"""States of a named node: held by sequences or leases, by hard pins alone, or not held."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long pages are kept: with `priority` until `priority_ends`, then with `fallback`.

    Until `soft_ends` they are evicted after all unpinned pages. Times are by the tree's clock.
    `fallback` None: the default priority.
    """

    priority: int = DEFAULT_PRIORITY
    priority_ends: float = FOREVER
    soft_ends: float = -FOREVER
    fallback: int | None = None

    @property
    def lasting_priority(self) -> int | None:
        """The highest priority without an end, if one was given."""
        return self.priority if self.priority_ends == FOREVER else self.fallback


@dataclass(slots=True, eq=False)
class Name:
    """The name of a node whose pages are committed and can be found by their keys.

    `number` is the node's row in `NamedPages.nodes`. `kids`: its named child nodes by the key of
    their first page (None: it never had one). `refs` counts the children held by sequences or
    leases plus the leases on this node; `pins` likewise for hard pins; `own` counts the leases and
    pins on this node. `with_ids`: the pages' token ids are known. `stamp` orders nodes by last use;
    `place` and `rank` are its position in the eviction order; `used` is the time of its last change
    of state, by the tree's clock.
    """

    root: Root
    number: int
    with_ids: bool
    keep: Retention
    refs: int = 0
    pins: int = 0
    own: int = 0
    state: int = 0
    stamp: int = 0
    place: int = 0
    rank: int = 0
    used: float = 0.0
    kids: dict[bytes, Node] | None = None


@dataclass(slots=True, eq=False)
class Node:
    """Full pages shared by every sequence below, never written again.

    `start` counts the pages before it on the path. A node has at least one page. A node without a
    `name` exists because sequences share it: between operations it has at least two children. A
    named node stays until it is evicted, and all nodes above it have names too.
    """

    parent: Node | None
    start: int
    pages: Int32
    children: set[Node | Leaf]
    name: Name | None = None

    @property
    def end(self) -> int:
        """Pages of the path, this node's included."""
        return self.start + self.pages.size


@dataclass(slots=True, eq=False)
class Leaf:
    """The private end of one sequence's path: the only part that is written.

    `table` is the sequence's whole page table, shared pages first; its first `num_pages` entries
    (in the books) are valid. Pages from `start` on are the leaf's own. `index` is the sequence's
    column in the books; `origin` the id it was forked from; `owner` the namespace its pages count
    for.
    """

    id: str
    index: int
    origin: str | None
    owner: Namespace
    parent: Node | None
    start: int
    table: PageTable


def named(node: Node) -> Name:
    if node.name is None:
        raise RuntimeError("a named node has no name: this is a bug")
    return node.name


def owner_of(leaves: Sequence[Leaf]) -> Namespace:
    """The namespace of a batch: all its sequences have the same one."""
    owner = leaves[0].owner
    if any(leaf.owner is not owner for leaf in leaves):
        raise IntegrityError("sequences of two namespaces in one batch")
    return owner


def compact(pages: Int32) -> Int32:
    """A part of an array, copied where it would keep more than twice its own size in memory."""
    whole = pages.base
    return pages if whole is None or whole.nbytes <= 2 * pages.nbytes else pages.copy()


def check_depth(leaves: Iterable[Leaf]) -> None:
    """Raises `InvalidRequest` if the paths to the root have too many nodes for one turn."""
    count = 0
    for leaf in leaves:
        node = leaf.parent
        while node is not None and count < MAX_WALKED:
            count, node = count + 1, node.parent
        if count == MAX_WALKED:
            rule = f"are in {MAX_WALKED} nodes of the prefix tree or more: name fewer per call"
            raise InvalidRequest("sequences", "their pages", rule)


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
                self.named.absorb(parent, node)
                self.merge(parent, node)
                parent = node.parent
            node = parent

    def merge_up(self, node: Node) -> None:
        """Merge a named node with its parent if both have the same holders and retention."""
        parent = node.parent
        if parent is not None and self.named.are_alike(parent, node):
            self.named.absorb(parent, node)
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
        child.parent = node.parent
        child.start = node.start
        if isinstance(child, Node):
            child.pages = np.concatenate((node.pages, child.pages))
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.add(child)
