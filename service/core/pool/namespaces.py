"""Namespaces: the pages, sequences and leases of each, and its quota."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.core.pool.eviction_order import EvictionOrder
from service.core.prefix.keys import root_key
from service.core.prefix.nodes import Leaf, Node

if TYPE_CHECKING:
    from service.core.prefix.leases import Lease


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
    def held_nodes(self) -> list[Node]:
        """The node of each lease and hard pin."""
        return [*(lease.node for lease in self.leases.values()), *self.pins.values()]

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
