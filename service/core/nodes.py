"""The types of the prefix tree: its nodes and leaves, and the namespaces that own them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.core.errors import IntegrityError, InvalidRequest
from service.core.keys import Extra, root_key
from service.core.page_table import NO_PAGES, PageTable
from service.core.timers import Timers

Int32 = NDArray[np.int32]

DEFAULT_PRIORITY: Final = 35
FOREVER: Final = math.inf
MAX_WALKED: Final = 65536
"""Maximum nodes that one turn visits for a batch: some milliseconds."""
REFERENCED: Final = 1
PINNED: Final = 2
CACHED: Final = 3
"""States of a named node: held by sequences or leases, by hard pins alone, or not held."""
OUT: Final = 0
QUEUED: Final = 1
ASIDE: Final = 2
WAITING: Final = 3
"""A node's place: not in the order; in its rank's queue; in the rank's heap; waiting until its
children are evicted."""


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
class Chain:
    """How the pages of a sequence get their names by themselves: the ids of its first `known`
    tokens are known. `extra` is key material beside the ids, by page. `is_stuck`: an equal page
    is cached, or its name contradicts, so that this one and those behind it stay without names.
    """

    cache_salt: str
    extra: Extra | None
    known: int = 0
    is_stuck: bool = False


@dataclass(slots=True, eq=False)
class Leaf:
    """The private end of one sequence's path: the only part that is written.

    `table` is the sequence's whole page table, shared pages first; its first `num_pages` entries
    (in the books) are valid. Pages from `start` on are the leaf's own. `index` is the sequence's
    column in the books; `origin` the id it was forked from; `owner` the namespace its pages count
    for. `reserve` are its pages behind the table, for growth to `reserved_len` tokens.
    `chain` None: its pages get names by commits only. In pools with windows, own pages before
    `seen` have no satellites that can be returned, and from `due` tokens on others have.
    """

    id: str
    index: int
    origin: str | None
    owner: Namespace
    parent: Node | None
    start: int
    table: PageTable
    reserve: Int32 = field(default_factory=NO_PAGES.copy)
    reserved_len: int = 0
    chain: Chain | None = None
    seen: int = 0
    due: int = 0


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
    alone, and the rest, held by leases and sequences, with the `reserved` ones of these. It has at
    most `max_pages` (None: no limit); `reserved_pages` are never allocated to others. `middles`:
    names of nodes with pages that can be evicted from their middle, least recently used first.
    `leases` by id, `pins`: the nodes of its hard pins by root and page key, `leaves`: its
    sequences.
    """

    name: str
    max_pages: int | None = None
    reserved_pages: int = 0
    used: int = 0
    cached: int = 0
    pinned: int = 0
    reserved: int = 0
    num_nodes: int = 0
    order: EvictionOrder = field(default_factory=EvictionOrder)
    middles: dict[Name, None] = field(default_factory=dict)
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


@dataclass(slots=True, eq=False)
class Lease:
    """Holds `node` and all above it until its time in `PrefixCache.ends`."""

    id: str
    namespace: Namespace
    node: Node
