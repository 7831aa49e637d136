"""The prefix cache: finds, retains, holds and evicts committed pages by their names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.core.errors import InvalidRequest, UnknownPage
from service.core.pool.budget import Budget
from service.core.prefix.commits import DEFAULT, Commits, keep_path
from service.core.prefix.keys import Prefix, root_key
from service.core.prefix.leases import Hold, Leases
from service.core.prefix.matching import MOST_MATCHED, Match, named_path, walk
from service.core.prefix.named_pages import Cleared
from service.core.prefix.nodes import FOREVER, Links, Node, Retention, named
from service.core.sequences.books import SequenceBooks


class PrefixCache:
    """Finds, commits and evicts named pages; shares the tree's books, links and pages."""

    __slots__ = ("_budget", "_commits", "_links", "leases", "named")

    def __init__(self, books: SequenceBooks, links: Links, budget: Budget) -> None:
        self._commits = Commits(books, links, budget)
        self._links = links
        self._budget = budget
        self.named = links.named
        self.leases = Leases(links, links.named)

    # Lookup and leases.

    def match(self, namespace: str, prefix: Prefix) -> Match:
        """The longest beginning of `prefix` that is cached in the namespace."""
        held = self._budget.namespaces.get(namespace)
        root = None if held is None else held.roots.get(prefix.cache_salt)
        if root is None:
            return Match(None, 0)
        return walk(self.named, root, None, prefix, prefix.num_pages(self.named.page_size))

    def lease(self, namespace: str, prefix: Prefix, lease_id: str, lease_s: float) -> int:
        """Hold the longest cached beginning of `prefix` for `lease_s`; returns its pages.

        With 0 pages there is no lease.
        """
        found = self.match(namespace, prefix)
        node = found.cut(self._links)
        if node is not None:
            owner = named(node).root.namespace
            self.leases.open(lease_id, owner, node, self.named.retention.now + lease_s)
        return found.num_pages

    def reopen(
        self, namespace: str, lease_id: str, key: bytes, cache_salt: str, lease_s: float
    ) -> None:
        """Open a lease under another pool's id, on a page and all before it.

        Raises `UnknownPage`.
        """
        node = self._page(namespace, key, cache_salt)
        ends = self.named.retention.now + lease_s
        self.leases.open(lease_id, named(node).root.namespace, node, ends)

    def renew_lease(self, namespace: str, lease_id: str, ends: float) -> None:
        """Change the end of one of the namespace's leases. Raises `UnknownLease`."""
        self.leases.renew(lease_id, self._budget.namespaces.get(namespace), ends)

    def close_lease(self, namespace: str, lease_id: str) -> None:
        """End one of the namespace's leases now. Raises `UnknownLease`."""
        self.leases.close(lease_id, self._budget.namespaces.get(namespace))

    def has_lease(self, namespace: str, lease_id: str) -> bool:
        held = self._budget.namespaces.get(namespace)
        return held is not None and lease_id in held.leases

    def holds(self, namespace: str, most: int) -> list[Hold]:
        """A namespace's hard pins and leases, at most `most` together."""
        held = self._budget.namespaces.get(namespace)
        return [] if held is None else self.leases.of(held, most)

    def chain(self, namespace: str, key: bytes, cache_salt: str) -> Prefix:
        """The keys of a page and of all before it. Raises `UnknownPage`."""
        path = named_path(self._page(namespace, key, cache_salt))
        pages = np.concatenate([node.pages for node in path])
        return Prefix(None, self.named.keys[pages], cache_salt)

    def use(self, namespace: str, prefix: Prefix) -> int:
        """Mark the longest cached beginning of `prefix` as used now; returns its pages."""
        found = self.match(namespace, prefix)
        node = found.cut(self._links)
        if node is not None:
            self.named.hold(node)
            self._links.release(node)
        return found.num_pages

    # Commits and pins.

    def commit(self, name: str, prefix: Prefix, keep: Retention = DEFAULT) -> int:
        """Commit a sequence's full pages under the names of `prefix`; see `Commits.commit`."""
        return self._commits.commit(name, prefix, keep)

    def commit_all(
        self, names: Sequence[str], prefixes: Sequence[Prefix], keep: Retention = DEFAULT
    ) -> list[int]:
        """`commit` for many sequences; all or none."""
        return self._commits.commit_all(names, prefixes, keep)

    def committed(self, name: str, prefix: Prefix) -> tuple[int, bytes]:
        """Number of a sequence's committed pages, and the last one's key (of the prefix's root, if
        there are none). Raises `UnknownSequence`."""
        leaf = self._commits.leaf(name)
        node = leaf.parent
        while node is not None and node.name is None:
            node = node.parent
        if node is None:
            return 0, root_key(leaf.owner.name, prefix.cache_salt)
        return node.end, self.named.last_key(node)

    def pin(self, namespace: str, key: bytes, cache_salt: str, soft_ttl_s: float | None) -> int:
        """Pin a page and all before it, softly for `soft_ttl_s` or hard (None); returns the number
        of pages.

        Raises `UnknownPage`.
        """
        node = self._page(namespace, key, cache_salt)
        if soft_ttl_s is None:
            self.leases.pin(named(node).root, key, node)
        else:
            keep_path(
                self._links, node, Retention(0, -FOREVER, self.named.retention.now + soft_ttl_s)
            )
        return node.end

    def unpin(self, namespace: str, key: bytes, cache_salt: str) -> None:
        """Remove a page's hard and soft pins. Raises `UnknownPage` if it has none."""
        node = self._page(namespace, key, cache_salt)
        was_hard = self.leases.unpin(named(node).root, key)
        ends = named(node).keep.soft_ends
        if not was_hard and ends == -FOREVER:
            raise UnknownPage(key.hex())
        # The pages before it are evicted after it in any case.
        for above in named_path(node):
            if named(above).keep.soft_ends <= ends:
                self.named.retention.unpin(above)

    def _page(self, namespace: str, key: bytes, cache_salt: str) -> Node:
        """The node that ends with the page of `key`, split if needed."""
        held = self._budget.namespaces.get(namespace)
        root = None if held is None else held.roots.get(cache_salt)
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

    # Eviction and time.

    def evict(self, namespace: str, count: int) -> int:
        """Evict up to `count` cached pages of a namespace; returns how many."""
        held = self._budget.namespaces.get(namespace)
        return 0 if held is None else self._budget.evict(held, count)

    def cleared(self, namespace: str) -> None:
        """Report to the listener that all evictable pages were evicted."""
        if self.named.listener is not None:
            self.named.listener(Cleared(namespace))

    def tick(self, now: float) -> None:
        """Advance the time to `now`: end expired leases, priorities and soft pins."""
        self.named.retention.now = now
        self.leases.expire(now)
        self.named.retention.expire()

    @property
    def next_end(self) -> float:
        """Time of the next expiry."""
        return min(self.leases.next_end, self.named.retention.next_end)
