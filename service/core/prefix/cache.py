"""The prefix cache: finds, leases, pins and evicts committed pages by their names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from service.core.errors import InvalidRequest, UnknownLease, UnknownPage
from service.core.keys import Prefix
from service.core.nodes import FOREVER, REFERENCED, Int32, Lease, Node, Retention, Root, named
from service.core.pool.budget import Budget
from service.core.pool.links import Links
from service.core.pool.named_pages import Cleared
from service.core.prefix.commits import keep_path
from service.core.prefix.matching import MOST_MATCHED, Match, named_path, walk
from service.core.timers import Timers

ENDED_AT_ONCE: Final = 256
"""Maximum leases that end in one tick: a millisecond or two. The next tick ends the rest."""


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """A lease (until `ends`, by the tree's clock) or a hard pin (`lease_id` None), which holds the
    page of `key` and all before it."""

    lease_id: str | None
    root: Root
    key: bytes
    num_pages: int
    ends: float = FOREVER


class PrefixCache:
    """Named pages, and what holds them without a sequence; shares the tree's links and pages. Each
    `Namespace` lists its own leases and hard pins."""

    def __init__(self, links: Links, budget: Budget) -> None:
        self._links = links
        self._budget = budget
        self.ends: Timers[Lease] = Timers()
        self.num_pins = 0
        """Hard pins of all namespaces."""
        self.named = links.named

    def match(self, namespace: str, prefix: Prefix) -> Match:
        """The longest beginning of `prefix` that is cached in the namespace, with all pages that a
        row behind it sees."""
        root = self._budget.look(namespace).roots.get(prefix.cache_salt)
        if root is None:
            return Match(None, 0)
        found = walk(self.named, root, None, prefix, prefix.num_pages(self.named.page_size))
        satellites = self.named.satellites
        if satellites is None or not satellites.windows or not found.num_pages:
            return found
        return shortened(found, satellites.num_usable(found.table()))

    def chain(self, namespace: str, key: bytes, cache_salt: str) -> Prefix:
        """The keys of a page and of all before it. Raises `UnknownPage`."""
        pages = self.pages(namespace, key, cache_salt)
        return Prefix(None, self.named.keys[pages], cache_salt)

    def pages(self, namespace: str, key: bytes, cache_salt: str) -> Int32:
        """A page, by its hard pin where it has one, and all before it. Raises `UnknownPage`."""
        node = self.pinned(namespace, key, cache_salt) or self._page(namespace, key, cache_salt)
        return np.concatenate([one.pages for one in named_path(node)])

    def pinned(self, namespace: str, key: bytes, cache_salt: str) -> Node | None:
        """The node of a page's hard pin, if it has one."""
        held = self._budget.look(namespace)
        root = held.roots.get(cache_salt)
        return None if root is None else held.pins.get((root, key))

    def use(self, namespace: str, prefix: Prefix) -> int:
        """Mark the longest cached beginning of `prefix` as used now; returns its pages."""
        found = self.match(namespace, prefix)
        node = found.cut(self._links)
        if node is not None:
            self.named.hold(node)
            self._links.release(node)
        return found.num_pages

    def evict(self, namespace: str, count: int) -> int:
        """Evict up to `count` cached pages of a namespace; returns how many."""
        return self._budget.evict(self._budget.look(namespace), count)

    def cleared(self, namespace: str) -> None:
        """Report to the listener that all evictable pages were evicted."""
        if self.named.listener is not None:
            has_left = self._budget.look(namespace).num_nodes > 0
            self.named.listener(Cleared(namespace, has_left))

    # Leases.

    @property
    def num_leases(self) -> int:
        return len(self.ends)

    def lease(
        self,
        namespace: str,
        prefix: Prefix,
        lease_id: str,
        lease_s: float,
        most_new: int | None = None,
    ) -> int:
        """Hold the longest cached beginning of `prefix` for `lease_s`; returns its pages.

        At most `most_new` of them are held by nothing else. With 0 pages there is no lease.
        """
        found = self.match(namespace, prefix)
        if most_new is not None:
            found = held_or_new(found, most_new)
        node = found.cut(self._links)
        if node is not None:
            self._open(lease_id, node, lease_s)
        return found.num_pages

    def renew_lease(self, namespace: str, lease_id: str, ends: float) -> None:
        """Change the end of one of the namespace's leases. Raises `UnknownLease`."""
        self.ends.set(self._lease(namespace, lease_id), ends)

    def close_lease(self, namespace: str, lease_id: str) -> None:
        """End one of the namespace's leases now. Raises `UnknownLease`."""
        self._end(self._lease(namespace, lease_id))

    def holds(self, namespace: str, most: int) -> list[Hold]:
        """A namespace's hard pins and leases, at most `most` together."""
        held = self._budget.look(namespace)
        pins = islice(held.pins.items(), most)
        holds = [Hold(None, root, key, node.end) for (root, key), node in pins]
        for one in islice(held.leases.values(), most - len(holds)):
            key = self.named.last_key(one.node)
            ends = self.ends.due(one)
            holds.append(Hold(one.id, named(one.node).root, key, one.node.end, ends))
        return holds

    def expire(self, now: float) -> None:
        """End expired leases, at most `ENDED_AT_ONCE`."""
        for lease in self.ends.take_due(now, ENDED_AT_ONCE):
            self._end(lease)

    def _open(self, lease_id: str, node: Node, lease_s: float) -> None:
        """Hold `node` for `lease_s` or until the lease is closed."""
        namespace, ends = named(node).root.namespace, self.named.retention.now + lease_s
        lease = namespace.leases[lease_id] = Lease(lease_id, namespace, node)
        self.named.count_own(node, 1)
        self.named.hold(node)
        self.ends.set(lease, ends)

    def _end(self, lease: Lease) -> None:
        del lease.namespace.leases[lease.id]
        self.ends.cancel(lease)
        self.named.count_own(lease.node, -1)
        self._links.release(lease.node)

    def _lease(self, namespace: str, lease_id: str) -> Lease:
        """Raises `UnknownLease`."""
        lease = self._budget.look(namespace).leases.get(lease_id)
        if lease is None:
            raise UnknownLease(lease_id)
        return lease

    # Pins.

    def pin(self, namespace: str, key: bytes, cache_salt: str, soft_ttl_s: float | None) -> int:
        """Pin a page and all before it, softly for `soft_ttl_s` or hard (None); returns the number
        of pages. Repeating a hard pin has no effect.

        Raises `UnknownPage`.
        """
        node = self._page(namespace, key, cache_salt)
        root = named(node).root
        if soft_ttl_s is not None:
            keep = Retention(0, -FOREVER, self.named.retention.now + soft_ttl_s)
            keep_path(self._links, node, keep)
        elif (root, key) not in root.namespace.pins:
            root.namespace.pins[root, key] = node
            self.num_pins += 1
            self.named.count_own(node, 1)
            self.named.pin(node, 1)
        return node.end

    def unpin(self, namespace: str, key: bytes, cache_salt: str) -> None:
        """Remove a page's hard and soft pins. Raises `UnknownPage` if it has none."""
        node = self._page(namespace, key, cache_salt)
        root, ends = named(node).root, named(node).keep.soft_ends
        pinned = root.namespace.pins.pop((root, key), None)
        if pinned is not None:
            self.num_pins -= 1
            self.named.count_own(pinned, -1)
            self.named.pin(pinned, -1)
        elif ends == -FOREVER:
            raise UnknownPage(key.hex())
        # The pages before it are evicted after it in any case.
        for above in named_path(node):
            if named(above).keep.soft_ends <= ends:
                self.named.retention.unpin(above)

    def _page(self, namespace: str, key: bytes, cache_salt: str) -> Node:
        """The node that ends with the page of `key`, split if needed."""
        root = self._budget.look(namespace).roots.get(cache_salt)
        found = None if root is None else self.named.find(root, key)
        if found is None:
            raise UnknownPage(key.hex())
        node, at = found
        depth, above = 0, node.parent
        while above is not None:
            depth, above = depth + 1, above.parent
        if depth >= MOST_MATCHED:
            rule = f"a page with at most {MOST_MATCHED} nodes of the tree above it, not {depth}"
            raise InvalidRequest("page_key", key.hex(), rule)
        return Match(node, node.start + at + 1).cut(self._links) or node


def held_or_new(found: Match, most_new: int) -> Match:
    """The beginning of a match with at most `most_new` pages that nothing holds yet."""
    node = found.node
    while node is not None and named(node).state != REFERENCED:
        node = node.parent
    return shortened(found, (0 if node is None else node.end) + most_new)


def shortened(found: Match, most: int) -> Match:
    """The first pages of a match, at most `most`."""
    node, num_pages = found.node, min(found.num_pages, most)
    if num_pages == found.num_pages:
        return found
    while node is not None and node.start >= num_pages:
        node = node.parent
    return Match(node, num_pages)
