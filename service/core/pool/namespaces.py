"""Namespaces: the pages, sequences, leases and quota of each, and the order of its evictions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from service.core.prefix.keys import root_key
from service.core.prefix.nodes import Leaf, Name, Node, named
from service.core.timers import Timers

if TYPE_CHECKING:
    from service.core.prefix.cache import Lease

OUT: Final = 0
QUEUED: Final = 1
ASIDE: Final = 2
WAITING: Final = 3
"""A node's place: not in the order; in its rank's queue; in the rank's heap; waiting until its
children are evicted."""


class EvictionOrder:
    """Cached nodes by rank, lowest first, then by last use; nodes with children are not evicted.

    A used node goes to the end of its rank's queue, children before parents, so the first of a
    queue has no children while ranks agree. A parent that ranks below its child waits for the
    child's eviction and returns through a small heap ordered by stamp. Constant time per node.
    """

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[Node, Name]] = {}
        self._aside: dict[int, Timers[Node]] = {}
        """By rank; a node's time is its stamp."""
        self._stamp = 0

    def use(self, node: Node, name: Name, rank: int) -> None:
        """Make a node the most recently used one."""
        self._stamp += 1
        name.stamp, name.rank, name.place = self._stamp, rank, QUEUED
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = OrderedDict()
        queue[node] = name

    def take_out(self, node: Node, name: Name) -> None:
        """Remove a node that is held again, or deleted."""
        if name.place == QUEUED:
            queue = self._queues[name.rank]
            del queue[node]
            if not queue:
                del self._queues[name.rank]
        elif name.place == ASIDE:
            aside = self._aside[name.rank]
            aside.cancel(node)
            if not aside:
                del self._aside[name.rank]
        name.place = OUT

    def rank_again(self, node: Node, name: Name, rank: int) -> None:
        """Change a node's rank, keeping its last use."""
        self.take_out(node, name)
        name.rank = rank
        self._set_aside(node, name)

    def lost_a_child(self, node: Node, name: Name) -> None:
        """Queue a waiting node whose last child was evicted."""
        if name.place == WAITING and not node.children:
            self._set_aside(node, name)

    def first(self) -> Node | None:
        """The node to evict next; None when there is none."""
        ranks = self._queues.keys() | self._aside.keys() if self._aside else self._queues
        for rank in sorted(ranks):
            node = self._first_of(rank)
            if node is not None:
                return node
        return None

    def upcoming(self) -> Iterator[Node]:
        """All nodes, in about the order of their eviction, with or without children."""
        for rank in sorted(self._queues.keys() | self._aside.keys()):
            yield from self._aside.get(rank, ())
            yield from self._queues.get(rank, ())

    def _set_aside(self, node: Node, name: Name) -> None:
        name.place = ASIDE
        self._aside.setdefault(name.rank, Timers()).set(node, name.stamp)

    def _first_of(self, rank: int) -> Node | None:
        queued, aside = self._first_queued(rank), self._first_aside(rank)
        if queued is None or aside is None:
            return queued or aside
        return queued if named(queued).stamp < named(aside).stamp else aside

    def _first_queued(self, rank: int) -> Node | None:
        queue = self._queues.get(rank)
        while queue:
            node, name = next(iter(queue.items()))
            if not node.children:
                return node
            self._let_wait(node, name)
        return None

    def _first_aside(self, rank: int) -> Node | None:
        aside = self._aside.get(rank)
        while aside:
            node = aside.first
            if not node.children:
                return node
            self._let_wait(node, named(node))
        return None

    def _let_wait(self, node: Node, name: Name) -> None:
        """Take a node out until its children are evicted."""
        self.take_out(node, name)
        name.place = WAITING


@dataclass(slots=True, eq=False)
class Root:
    """The root of all paths of a namespace and cache salt; `key` precedes the first page's key."""

    namespace: Namespace
    cache_salt: str
    key: bytes
    kids: dict[bytes, Node] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Namespace:
    """One tenant's pages and quota.

    `used` counts its pages: `cached` ones, which can be evicted, `pinned` ones, held by hard pins
    alone, and the rest, held by sequences and leases. It has at most `max_pages` (None: no limit);
    `reserved_pages` are never allocated to others. `leases` by id, `pins`: the nodes of its hard
    pins by root and page key, `leaves`: its sequences.
    """

    name: str
    max_pages: int | None = None
    reserved_pages: int = 0
    used: int = 0
    cached: int = 0
    pinned: int = 0
    num_nodes: int = 0
    order: EvictionOrder = field(default_factory=EvictionOrder)
    roots: dict[str, Root] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    pins: dict[tuple[Root, bytes], Node] = field(default_factory=dict)
    leaves: set[Leaf] = field(default_factory=set)

    @property
    def num_sequences(self) -> int:
        return len(self.leaves)

    @property
    def num_leases(self) -> int:
        return len(self.leases)

    @property
    def referenced(self) -> int:
        """Pages that sequences or leases hold."""
        return self.used - self.cached - self.pinned

    @property
    def held(self) -> dict[str, int]:
        """Its pages by state, and its leases."""
        return {
            "referenced": self.referenced,
            "cached": self.cached,
            "pinned": self.pinned,
            "leases": self.num_leases,
        }

    @property
    def unfilled(self) -> int:
        """Reserved pages that it does not use yet."""
        return max(0, self.reserved_pages - self.used)

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing and has no quota."""
        held = self.used or self.num_sequences or self.num_leases
        return not held and not self.reserved_pages and self.max_pages is None

    def root(self, cache_salt: str) -> Root:
        """The root of a salt, created on first use."""
        root = self.roots.get(cache_salt)
        if root is None:
            root = self.roots[cache_salt] = Root(self, cache_salt, root_key(self.name, cache_salt))
        return root

    def drop_root(self, root: Root) -> None:
        """Delete a root without children: callers may invent any number of salts."""
        if not root.kids and self.roots.get(root.cache_salt) is root:
            del self.roots[root.cache_salt]
