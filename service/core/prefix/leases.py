"""Leases and hard pins: they hold cached pages without a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final

from service.core.errors import UnknownLease
from service.core.pool.namespaces import Namespace, Root
from service.core.prefix.named_pages import NamedPages
from service.core.prefix.nodes import FOREVER, Links, Node, named
from service.core.timers import Timers

ENDED_AT_ONCE: Final = 256
"""Maximum leases that end in one tick: a millisecond or two. The next tick ends the rest."""


@dataclass(slots=True, eq=False)
class Lease:
    """Holds `node` and all above it until `ends`, by the tree's clock."""

    id: str
    namespace: Namespace
    node: Node
    ends: float


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """A lease (until `ends`, by the tree's clock) or a hard pin (`lease_id` None), which holds the
    page of `key` and all before it."""

    lease_id: str | None
    root: Root
    key: bytes
    num_pages: int
    ends: float = FOREVER


class Leases:
    """Opens and ends leases and hard pins; each `Namespace` lists its own."""

    __slots__ = ("_ends", "_links", "_named")

    def __init__(self, links: Links, named: NamedPages) -> None:
        self._links = links
        self._named = named
        self._ends: Timers[Lease] = Timers()

    def __len__(self) -> int:
        return len(self._ends)

    def open(self, lease_id: str, namespace: Namespace, node: Node, ends: float) -> None:
        """Hold `node` until `ends` or until the lease is closed."""
        lease = namespace.leases[lease_id] = Lease(lease_id, namespace, node, ends)
        named(node).own += 1
        self._named.num_changes += 1
        self._named.hold(node)
        self._ends.set(lease, ends)

    def renew(self, lease_id: str, namespace: Namespace | None, ends: float) -> None:
        """Change the end of a lease. Raises `UnknownLease`."""
        lease = find(namespace, lease_id)
        lease.ends = ends
        self._ends.set(lease, ends)

    def close(self, lease_id: str, namespace: Namespace | None) -> None:
        """End a lease now. Raises `UnknownLease`."""
        self._end(find(namespace, lease_id))

    def expire(self, now: float) -> None:
        """End expired leases, at most `ENDED_AT_ONCE`."""
        if self._ends.next_due <= now:
            for lease in self._ends.take_due(now, ENDED_AT_ONCE):
                self._end(lease)

    @property
    def next_end(self) -> float:
        return self._ends.next_due

    def pin(self, root: Root, key: bytes, node: Node) -> None:
        """Hard-pin the node that ends with the page of `key`; repeating a pin has no effect."""
        pins = root.namespace.pins
        if (root, key) not in pins:
            pins[root, key] = node
            named(node).own += 1
            self._named.num_changes += 1
            self._named.pin(node, 1)

    def unpin(self, root: Root, key: bytes) -> bool:
        """Remove a hard pin; returns False if there is none."""
        node = root.namespace.pins.pop((root, key), None)
        if node is None:
            return False
        named(node).own -= 1
        self._named.num_changes += 1
        self._named.pin(node, -1)
        return True

    def of(self, namespace: Namespace, most: int) -> list[Hold]:
        """A namespace's hard pins and leases, at most `most` together."""
        pins = islice(namespace.pins.items(), most)
        holds = [Hold(None, root, key, node.end) for (root, key), node in pins]
        for one in islice(namespace.leases.values(), most - len(holds)):
            key = self._named.last_key(one.node)
            holds.append(Hold(one.id, named(one.node).root, key, one.node.end, one.ends))
        return holds

    def _end(self, lease: Lease) -> None:
        del lease.namespace.leases[lease.id]
        self._ends.cancel(lease)
        named(lease.node).own -= 1
        self._named.num_changes += 1
        self._links.release(lease.node)


def find(namespace: Namespace | None, lease_id: str) -> Lease:
    """A namespace's lease. Raises `UnknownLease`."""
    lease = None if namespace is None else namespace.leases.get(lease_id)
    if lease is None:
        raise UnknownLease(lease_id)
    return lease
