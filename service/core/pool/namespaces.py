"""Namespaces: whose pages are whose, how many of each, and how many each may have."""

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
    """Where the paths of a namespace and cache salt begin; `key` stands before the first page's."""

    namespace: Namespace
    cache_salt: str
    key: bytes
    kids: dict[bytes, Node] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Namespace:
    """The pages that one tenant holds.

    `used` of them in all: `cached` ones that can be evicted, `pinned` ones that only hard pins
    hold, and those that sequences and leases refer to. At most `max_pages` (None: no limit);
    `reserved_pages` are kept for it when it has fewer. `leases` are its leases by their ids, `pins`
    the nodes of its hard pins by root and page key, `leaves` its sequences.
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
        """Pages that are kept for it and that it does not have yet."""
        return max(0, self.reserved_pages - self.used)

    @property
    def is_idle(self) -> bool:
        """Nothing is held for it and nobody has said anything about it."""
        held = self.used or self.num_sequences or self.num_leases
        return not held and not self.reserved_pages and self.max_pages is None

    def root(self, cache_salt: str) -> Root:
        """The root of a salt, made when it is asked for the first time."""
        root = self.roots.get(cache_salt)
        if root is None:
            root = self.roots[cache_salt] = Root(self, cache_salt, root_key(self.name, cache_salt))
        return root

    def drop_root(self, root: Root) -> None:
        """Forget a root that nothing hangs under any more: salts are the caller's to invent."""
        if not root.kids and self.roots.get(root.cache_salt) is root:
            del self.roots[root.cache_salt]
