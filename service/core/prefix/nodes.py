"""The links of the prefix tree: nodes of whole pages, private leaves, and how they split and merge.

Nothing here allocates pages; a split or a merge moves pages between holders, never in or out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from service.core.errors import InvalidRequest

if TYPE_CHECKING:
    from service.core.pool.namespaces import Namespace, Root
    from service.core.prefix.named_pages import NamedPages
    from service.core.shards.layout import Shard

Int32 = NDArray[np.int32]

DEFAULT_PRIORITY: Final = 35
FOREVER: Final = math.inf
MAX_WALKED: Final = 65536
"""Nodes that one turn looks at for a batch: some milliseconds."""
REFERENCED: Final = 1
PINNED: Final = 2
CACHED: Final = 3
"""The states of a named node: held by sequences or leases, by hard pins alone, by nothing."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long pages are kept: by `priority` until `priority_ends`, then by `fallback`.

    Until `soft_ends` they are evicted after all that is not pinned. Ends are the tree's clock.
    `fallback` is the priority after `priority_ends`; None: the default one.
    """

    priority: int = DEFAULT_PRIORITY
    priority_ends: float = FOREVER
    soft_ends: float = -FOREVER
    fallback: int | None = None

    @property
    def lasting_priority(self) -> int | None:
        """The best priority without an end, if one was given."""
        return self.priority if self.priority_ends == FOREVER else self.fallback


@dataclass(slots=True, eq=False)
class Name:
    """What a node has once its pages are committed: they can be found by their keys.

    `number` is the node's in the books of pages. `kids` are the named nodes below by the key of
    their first page, once there is one. `refs` counts the children that sequences or leases hold
    and the leases on this very node, `pins` likewise for hard pins; `own` counts the leases and
    pins on it. `with_ids`: the pages' token ids are known. `stamp` orders nodes by their last use;
    `place` and `rank` say where in the order of eviction the node stands, `used` when its state
    changed last, by the tree's clock.
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
    """Full pages seen by every sequence below it, and never written again.

    `start` counts the pages before it on the path. A node has at least one page. Without a `name`
    it is there because sequences share it, and has, between operations, at least two children; with
    one it stays until it is evicted, and all nodes above it have a name too.
    """

    parent: Node | None
    start: int
    pages: Int32
    children: set[Node | Leaf]
    name: Name | None = None

    @property
    def end(self) -> int:
        """Pages of the path up to and with this node."""
        return self.start + self.pages.size


@dataclass(slots=True, eq=False)
class Leaf:
    """The private end of one sequence's path: the only part that is ever written.

    `table` is the sequence's whole page table, shared pages first, in a buffer that grows by
    doubling; what is valid of it is `num_pages` in the sequence's books. Pages from `start` on are
    the leaf's own. `index` is the sequence's place in the books; `origin` the id it was forked off;
    `owner` the namespace that its pages count for; `shard` which of the sequence's pages are here
    (None: all).
    """

    id: str
    index: int
    origin: str | None
    owner: Namespace
    parent: Node | None
    start: int
    table: Int32
    shard: Shard | None = None

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


def named(node: Node) -> Name:
    """The name of a node that must have one."""
    if node.name is None:
        raise RuntimeError("a node without a name among named ones: this is a bug")
    return node.name


def check_depth(leaves: Iterable[Leaf]) -> None:
    """Raises `InvalidRequest` where paths to the root are together longer than one turn walks."""
    count = 0
    for leaf in leaves:
        node = leaf.parent
        while node is not None and count < MAX_WALKED:
            count, node = count + 1, node.parent
        if count == MAX_WALKED:
            rule = f"lie in {MAX_WALKED} nodes of the prefix tree or more: fewer in a call"
            raise InvalidRequest("sequences", "their pages", rule)


class Links:
    """How nodes and leaves hang together; `count` is the number of nodes.

    `named` keeps the books of nodes that have a name.
    """

    __slots__ = ("count", "named")

    def __init__(self, named: NamedPages) -> None:
        self.count = 0
        self.named = named

    def node_ending_at(self, leaf: Leaf, end: int) -> Node | None:
        """The node of `leaf`'s path whose last page is the path's `end`-th; None for `end = 0`.

        Splits a node, or the front off the leaf, where none ends there; a node made that way has
        one child, so the caller must hang another under it, or name it. The part of a split node
        that is further from the root stays the same object. `end` counts full pages of the path.
        """
        if end == 0:
            return None
        if end > leaf.start:
            return self.split_off(leaf, leaf.table[leaf.start : end].copy())
        node = leaf.parent
        while node is not None and node.start >= end:
            node = node.parent
        return node if node is None or node.end == end else self.split(node, end)

    def split(self, node: Node, end: int) -> Node:
        """The upper part of a node, whose last page is the path's `end`-th."""
        size = end - node.start
        upper = self.split_off(node, node.pages[:size])
        node.pages = node.pages[size:]
        if node.name is not None:
            self.named.split(upper, node, node.name)
        return upper

    def split_off(self, lower: Node | Leaf, pages: Int32) -> Node:
        """A new node that takes `pages` off the front of `lower` and stands above it."""
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
        """Hang `leaf` under `node` (None: it shares nothing)."""
        self.named.num_changes += 1
        leaf.parent = node
        leaf.start = 0 if node is None else node.end
        if node is not None:
            node.children.add(leaf)
            if node.name is not None:
                self.named.hold(node)

    def detach(self, leaf: Leaf, node: Node | None) -> None:
        """Take `leaf` from under `node`; a node without a name that has one child left merges."""
        if node is None:
            return
        node.children.remove(leaf)
        if node.name is not None:
            self.release(node)
        elif len(node.children) == 1:
            (child,) = node.children
            self.merge(node, child)

    def release(self, node: Node | None) -> None:
        """One holder less for a named node; what nothing holds any more is cached from now on.

        Nodes that are used last at the same moment become one.
        """
        while node is not None and self.named.let_go(node):
            parent = node.parent
            while parent is not None and self.named.is_last_holder(parent, node):
                self.named.absorb(parent, node)
                self.merge(parent, node)
                parent = node.parent
            node = parent

    def grow_together(self, node: Node) -> None:
        """Make one of a named node and the one above it where nothing tells them apart."""
        parent = node.parent
        if parent is not None and self.named.are_alike(parent, node):
            self.named.absorb(parent, node)
            self.merge(parent, node)

    def remove(self, node: Node) -> None:
        """Forget a node without children."""
        self.count -= 1
        self.named.num_changes += 1
        if node.parent is not None:
            node.parent.children.remove(node)

    def merge(self, node: Node, child: Node | Leaf) -> None:
        """Give the pages of `node` to its only child, which takes its place."""
        self.count -= 1
        self.named.num_changes += 1
        child.parent = node.parent
        child.start = node.start
        if isinstance(child, Node):
            child.pages = np.concatenate((node.pages, child.pages))
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.add(child)
