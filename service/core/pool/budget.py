"""Page allocation within the namespaces' quotas, evicting cached pages where none is free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol

import numpy as np

from service.core.errors import InvalidRequest, OutOfPages
from service.core.nodes import Int32, Leaf, Namespace, Node, named, owner_of
from service.core.pool.allocator import PageAllocator
from service.core.pool.links import Links
from service.core.pool.named_pages import NamedPages

NO_LIMIT: Final = 2**63


class EvictionPaused(Exception):
    """A turn's limit of evictions is reached and more are needed: retry in a later turn."""


Urgency = Literal["now", "wait", "ahead"]
"""How pages are evicted: at once; at once or in a later turn; only pages that have copies."""


class Keeper(Protocol):
    """Keeps copies of pages beyond the pool."""

    def num_ready(self, node: Node, size: int, urgency: Urgency) -> int:
        """How many of a node's last `size` pages to evict now; 0: those must be copied first."""
        ...


class Budget:
    """Allocates pages for namespaces: free pages first, then by evicting cached ones."""

    def __init__(self, allocator: PageAllocator, named: NamedPages, links: Links) -> None:
        self.allocator = allocator
        self.namespaces: dict[str, Namespace] = {}
        self.num_evicted = 0
        self.keeper: Keeper | None = None
        self._reserving: list[Namespace] = []
        """The namespaces with reserved pages."""
        self.most_evicted = NO_LIMIT
        """Maximum pages that one `take` evicts; then it raises `EvictionPaused`, without a change
        beyond the evictions."""
        self.unattached: dict[int, Namespace] = {}
        """Pages taken for a cut under way, which no sequence has yet, by number."""
        self.num_reserved = 0
        """Pages in the reserves of all sequences."""
        self._named = named
        self._links = links

    def namespace(self, name: str) -> Namespace:
        """The namespace's books, created on first use."""
        found = self.namespaces.get(name)
        if found is None:
            for idle in [one for one in self.namespaces.values() if one.is_idle]:
                del self.namespaces[idle.name]
            found = self.namespaces[name] = Namespace(name)
        return found

    def look(self, name: str) -> Namespace:
        """The namespace's books, to read: of an unknown namespace they are empty."""
        return self.namespaces.get(name) or Namespace(name)

    def set_quota(self, name: str, max_pages: int | None, reserved_pages: int) -> Namespace:
        """Limit a namespace to `max_pages` (None: no limit) and reserve `reserved_pages` for it.

        Pages above the new limit stay. Raises `InvalidRequest` when reservations exceed the pool
        or the namespace's own limit.
        """
        if max_pages is not None and reserved_pages > max_pages:
            raise InvalidRequest("reserved_pages", reserved_pages, f"at most max_pages {max_pages}")
        others = sum(one.reserved_pages for one in self.namespaces.values() if one.name != name)
        if others + reserved_pages > self.allocator.num_pages:
            rule = f"{others} of {self.allocator.num_pages} are reserved for others"
            raise InvalidRequest("reserved_pages", reserved_pages, rule)
        namespace = self.namespace(name)
        namespace.max_pages, namespace.reserved_pages = max_pages, reserved_pages
        self._reserving = [one for one in self.namespaces.values() if one.reserved_pages]
        return namespace

    def take(self, owner: Namespace, count: int) -> Int32:
        """Allocate `count` leading pages for a namespace, int32 [count], with their satellites,
        evicting as needed; all or none. Other methods count pages of all groups.

        Raises `OutOfPages`.
        """
        satellites = self._named.satellites
        num_ids = count if satellites is None else count * satellites.per_page
        if count and num_ids > self.available(owner):
            self._evict_for(owner, num_ids)
        ids = self.allocator.allocate(num_ids)
        owner.used += num_ids
        return ids if satellites is None else satellites.attach(ids, count)

    def release(self, owner: Namespace, pages: Int32) -> None:
        """Free leading pages with their satellites."""
        if self._named.satellites is not None:
            pages = self._named.satellites.detach(pages)
        self.release_ids(owner, pages)

    def release_ids(self, owner: Namespace, pages: Int32) -> None:
        """Free pages of any group."""
        self.allocator.release(pages)
        owner.used -= pages.size

    def take_for(self, leaves: Sequence[Leaf], counts: Int32) -> Int32:
        """`take` for sequences of one namespace, `counts` [B] pages each, from their reserves
        first: int32 [sum(counts)], in order."""
        if not self.num_reserved:
            return self.take(owner_of(leaves), int(counts.sum()))
        own = np.minimum(counts, [leaf.reserve.size for leaf in leaves]).tolist()
        fresh, parts, at = self.take(owner_of(leaves), int(counts.sum()) - sum(own)), [], 0
        for leaf, count, num_own in zip(leaves, counts.tolist(), own, strict=True):
            parts += [leaf.reserve[:num_own], fresh[at : (at := at + count - num_own)]]
            self.set_reserve(leaf, leaf.reserve[num_own:])
        return np.concatenate(parts)

    def set_reserve(self, leaf: Leaf, pages: Int32) -> None:
        """Make `pages`, which count for its namespace, a sequence's reserve."""
        more = pages.size - leaf.reserve.size
        if self._named.satellites is not None:  # reserves have all of theirs
            more *= self._named.satellites.per_page
        leaf.reserve = pages
        leaf.owner.reserved += more
        self.num_reserved += more
        self.allocator.num_changes += 1

    def available(self, owner: Namespace) -> int:
        """Pages the namespace can allocate without evictions; can be negative."""
        free = self.allocator.num_free - self._kept_from(owner)
        return free if owner.max_pages is None else min(free, owner.max_pages - owner.used)

    def obtainable(self, owner: Namespace, spare: int | None = None) -> int:
        """Pages the namespace can allocate within its quota, evictions included. `spare`: the sum
        of `spare` over all namespaces."""
        spare = self.spare if spare is None else spare
        others = spare - self._spare(owner, None) + owner.cached
        most = self.allocator.num_free - self._kept_from(owner) + others
        if owner.max_pages is not None:
            most = min(most, owner.max_pages - owner.used + owner.cached)
        return max(0, most)

    @property
    def spare(self) -> int:
        """Cached pages of all namespaces that can be evicted for another namespace."""
        return sum(self._spare(one, None) for one in self.namespaces.values())

    def left(self) -> dict[str, tuple[int, int]]:
        """For each namespace, the pages that are `available`, at least 0, and `obtainable`."""
        spare, every = self.spare, self.namespaces.items()
        return {
            name: (max(0, self.available(one)), self.obtainable(one, spare)) for name, one in every
        }

    def _kept_from(self, owner: Namespace) -> int:
        """Free pages that are reserved for other namespaces."""
        return sum(one.unfilled for one in self._reserving if one is not owner)

    def evict(self, namespace: Namespace, count: int, urgency: Urgency = "now") -> int:
        """Evict up to `count` of a namespace's pages; returns how many."""
        satellites, evicted = self._named.satellites, 0
        if satellites is not None:
            evicted = self._evict_middles(namespace, count)
        while evicted < count and (node := namespace.order.first()) is not None:
            size = min(node.pages.size, count - evicted)
            if satellites is not None:
                weights = satellites.weights(node.pages[: -size - 1 : -1])
                size = min(size, int(np.searchsorted(weights.cumsum(), count - evicted)) + 1)
            if self.keeper is not None:
                size = self.keeper.num_ready(node, size, urgency)
                if not size:
                    break
            is_whole = size == node.pages.size
            pages = self._named.shorten(node, size)
            if is_whole:
                self._remove(namespace, node)
            before = namespace.used
            self.release(namespace, pages)
            evicted += before - namespace.used
        self.num_evicted += evicted
        return evicted

    def _evict_middles(self, namespace: Namespace, count: int) -> int:
        """Evict about `count` pages of groups with a window from the middle of nodes, least
        recently used first; returns how many."""
        evicted = 0
        while evicted < count and namespace.middles:
            freed = self._named.take_middle(next(iter(namespace.middles)), count - evicted)
            self.release_ids(namespace, freed)
            evicted += freed.size
        return evicted

    def evict_ahead(self, count: int) -> int:
        """Evict up to `count` pages, from the namespaces furthest above their share."""
        evicted = 0
        while evicted < count and (victim := self.victim(None)) is not None:
            some = min(count - evicted, self._spare(victim, None))
            done = self.evict(victim, some, "ahead")
            evicted += done
            if done < some:
                break
        return evicted

    def _remove(self, namespace: Namespace, node: Node) -> None:
        """Unlink a node that has no pages left."""
        self._links.remove(node)
        parent = node.parent
        if parent is None:
            namespace.drop_root(named(node).root)
        elif parent.name is not None:
            namespace.order.lost_a_child(parent, parent.name)

    def _evict_for(self, owner: Namespace, count: int) -> None:
        """Evict until `count` pages are available; raises `OutOfPages` before the first eviction.

        Raises `EvictionPaused` after `most_evicted` evictions where more are needed, and, with such
        a limit, while pages are copied first.
        """
        own = 0 if owner.max_pages is None else owner.used + count - owner.max_pages
        if count > self.obtainable(owner):
            raise self.refusal(owner, count)
        left = self.most_evicted
        urgency: Urgency = "now" if left == NO_LIMIT else "wait"
        if own > 0:
            done = self.evict(owner, min(own, left), urgency)
            if self.keeper is not None and done < min(own, left):
                raise EvictionPaused
            left -= done
        while (missing := count - self.available(owner)) > 0:
            if left <= 0:
                raise EvictionPaused
            victim = self.victim(owner)
            if victim is None:
                raise self.refusal(owner, count)
            done = self.evict(victim, min(missing, self._spare(victim, owner), left), urgency)
            if self.keeper is not None and not done:
                raise EvictionPaused
            left -= done

    def _spare(self, victim: Namespace, taker: Namespace | None) -> int:
        """Cached pages of `victim` that can be evicted for `taker`: all of the taker's own, and of
        another namespace those above its reservation."""
        if victim is taker:
            return victim.cached
        return min(victim.cached, max(0, victim.used - victim.reserved_pages))

    def victim(self, taker: Namespace | None) -> Namespace | None:
        """The namespace to evict from: `taker` if above its share, else the one furthest above."""
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
        """The unreserved pages, divided equally among the namespaces in use."""
        users = [one for one in self.namespaces.values() if one.used or one.reserved_pages]
        reserved = sum(one.reserved_pages for one in users)
        return (self.allocator.num_pages - reserved) // max(1, len(users))

    def refusal(self, owner: Namespace, needed: int) -> OutOfPages:
        total = self.allocator.num_pages if owner.max_pages is None else owner.max_pages
        free = max(0, self.available(owner))
        return OutOfPages(needed, free, total, owner.held, self.obtainable(owner))
