"""Who may take how many pages: allocation within quotas, with eviction before refusal."""

from __future__ import annotations

from typing import Final

from service.core.errors import InvalidRequest, OutOfPages
from service.core.pool.allocator import PageAllocator
from service.core.pool.namespaces import Namespace
from service.core.prefix.named_pages import NamedPages
from service.core.prefix.nodes import Int32, Links, Node, named

NO_LIMIT: Final = 2**63


class EvictionPaused(Exception):
    """So many pages were evicted as one turn may evict, and more have to be; ask again."""


class Budget:
    """Gives pages to namespaces, out of the free ones first, then out of those that are cached."""

    __slots__ = ("_links", "_named", "allocator", "most_evicted", "namespaces", "num_evicted")

    def __init__(self, allocator: PageAllocator, named: NamedPages, links: Links) -> None:
        self.allocator = allocator
        self.namespaces: dict[str, Namespace] = {}
        self.num_evicted = 0
        self.most_evicted = NO_LIMIT
        """What one `take` evicts before it raises `EvictionPaused`, with nothing else changed."""
        self._named = named
        self._links = links

    def namespace(self, name: str) -> Namespace:
        """The books of a namespace, opened when it is met for the first time."""
        found = self.namespaces.get(name)
        if found is None:
            for idle in [one for one in self.namespaces.values() if one.is_idle]:
                del self.namespaces[idle.name]
            found = self.namespaces[name] = Namespace(name)
        return found

    def set_quota(self, name: str, max_pages: int | None, reserved_pages: int) -> Namespace:
        """At most `max_pages` (None: no limit) for a namespace, `reserved_pages` kept for it.

        What it has beyond that already stays. Raises `InvalidRequest` where reservations pass the
        pool, or the namespace's own limit.
        """
        if max_pages is not None and reserved_pages > max_pages:
            raise InvalidRequest("reserved_pages", reserved_pages, f"at most max_pages {max_pages}")
        others = sum(one.reserved_pages for one in self.namespaces.values() if one.name != name)
        if others + reserved_pages > self.allocator.num_pages:
            rule = f"{others} of {self.allocator.num_pages} are reserved for others"
            raise InvalidRequest("reserved_pages", reserved_pages, rule)
        namespace = self.namespace(name)
        namespace.max_pages, namespace.reserved_pages = max_pages, reserved_pages
        return namespace

    def take(self, owner: Namespace, count: int) -> Int32:
        """`count` pages for a namespace, int32 [count], evicting what must go; all or none.

        Raises `OutOfPages` with what the namespace holds.
        """
        if count and count > self.available(owner):
            self._make_room(owner, count)
        pages = self.allocator.allocate(count)
        owner.used += count
        return pages

    def give_back(self, owner: Namespace, pages: Int32) -> None:
        """Pages that nothing holds any more."""
        self.allocator.release(pages)
        owner.used -= pages.size

    def available(self, owner: Namespace) -> int:
        """Pages that the namespace can have without an eviction; may be negative."""
        free = self.allocator.num_free
        if len(self.namespaces) > 1 or owner.name not in self.namespaces:
            free -= sum(one.unfilled for one in self.namespaces.values() if one is not owner)
        return free if owner.max_pages is None else min(free, owner.max_pages - owner.used)

    def obtainable(self, owner: Namespace) -> int:
        """Pages that the namespace could have now: free ones, and those that would be evicted for
        it, within its quota."""
        others = [one for one in self.namespaces.values() if one is not owner]
        kept = sum(one.unfilled for one in others)
        spare = sum(self._spare(one, owner) for one in others)
        most = self.allocator.num_free - kept + owner.cached + spare
        if owner.max_pages is not None:
            most = min(most, owner.max_pages - owner.used + owner.cached)
        return max(0, most)

    def evict(self, namespace: Namespace, count: int) -> int:
        """Evict up to `count` of a namespace's pages; how many were."""
        evicted = 0
        while evicted < count and (node := namespace.order.first()) is not None:
            size = min(node.pages.size, count - evicted)
            is_whole = size == node.pages.size
            gone = self._named.shorten(node, size)
            if is_whole:
                self._remove(namespace, node)
            self.give_back(namespace, gone)
            evicted += size
        self.num_evicted += evicted
        return evicted

    def evict_ahead(self, count: int) -> int:
        """Evict up to `count` pages of whoever has the most beyond its share."""
        evicted = 0
        while evicted < count and (victim := self._victim(None)) is not None:
            evicted += self.evict(victim, min(count - evicted, self._spare(victim, None)))
        return evicted

    def _remove(self, namespace: Namespace, node: Node) -> None:
        """Unlink a node whose pages are all gone."""
        self._links.remove(node)
        parent = node.parent
        if parent is None:
            namespace.drop_root(named(node).root)
        elif parent.name is not None:
            namespace.order.lost_a_child(parent, parent.name)

    def _make_room(self, owner: Namespace, count: int) -> None:
        """Evict until `count` pages are available, or refuse before anything is evicted.

        Raises `EvictionPaused` once `most_evicted` are gone and more have to be.
        """
        own = 0 if owner.max_pages is None else owner.used + count - owner.max_pages
        if count > self.obtainable(owner):
            raise self._refusal(owner, count)
        left = self.most_evicted
        if own > 0:
            left -= self.evict(owner, min(own, left))
        while (missing := count - self.available(owner)) > 0:
            if left <= 0:
                raise EvictionPaused
            victim = self._victim(owner)
            if victim is None:
                raise self._refusal(owner, count)
            left -= self.evict(victim, min(missing, self._spare(victim, owner), left))

    def _spare(self, victim: Namespace, taker: Namespace | None) -> int:
        """Cached pages of `victim` that may go for `taker`: not those reserved for it, but its own
        always."""
        if victim is taker:
            return victim.cached
        return min(victim.cached, max(0, victim.used - victim.reserved_pages))

    def _victim(self, taker: Namespace | None) -> Namespace | None:
        """Who loses pages for `taker`: itself when over its share, else who is furthest over."""
        able = [one for one in self.namespaces.values() if self._spare(one, taker) > 0]
        if not able:
            return None
        if len(able) == 1:
            return able[0]
        share = self._equal_share()
        if taker in able and taker is not None and taker.used > share + taker.reserved_pages:
            return taker
        return max(able, key=lambda one: one.used - one.reserved_pages)

    def _equal_share(self) -> int:
        """An equal part for everyone of what is reserved for nobody."""
        users = [one for one in self.namespaces.values() if one.used or one.reserved_pages]
        reserved = sum(one.reserved_pages for one in users)
        return (self.allocator.num_pages - reserved) // max(1, len(users))

    def _refusal(self, owner: Namespace, needed: int) -> OutOfPages:
        total = self.allocator.num_pages if owner.max_pages is None else owner.max_pages
        free = max(0, self.available(owner))
        return OutOfPages(needed, free, total, self.obtainable(owner), owner.held)
