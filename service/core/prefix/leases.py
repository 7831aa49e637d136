"""Leases and hard pins: what holds cached pages without a sequence."""

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
"""Leases that end in one tick: a millisecond or two. The next tick ends the rest."""


@dataclass(slots=True, eq=False)
class Lease:
    """Holds `node` and all above it until `ends`, by the tree's clock."""

    id: str
    namespace: Namespace
    node: Node
    ends: float


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What holds a page and all before it: a lease until `ends`, by the tree's clock, or a hard
    pin."""

    lease_id: str | None
    root: Root
    key: bytes
    num_pages: int
    ends: float = FOREVER


class Leases:
    """Leases and hard pins of every namespace, which has them in its own books."""

    __slots__ = ("_ends", "_links", "_named")

    def __init__(self, links: Links, named: NamedPages) -> None:
        self._links = links
        self._named = named
        self._ends: Timers[Lease] = Timers()

    def __len__(self) -> int:
        return len(self._ends)

    def open(self, lease_id: str, namespace: Namespace, node: Node, ends: float) -> None:
        """A lease on `node`, which stays until then or until it is closed."""
        lease = namespace.leases[lease_id] = Lease(lease_id, namespace, node, ends)
        named(node).own += 1
        self._named.num_changes += 1
        self._named.hold(node)
        self._ends.set(lease, ends)

    def renew(self, lease_id: str, namespace: Namespace | None, ends: float) -> None:
        """Let a lease end then. Raises `UnknownLease`."""
        lease = find(namespace, lease_id)
        lease.ends = ends
        self._ends.set(lease, ends)

    def close(self, lease_id: str, namespace: Namespace | None) -> None:
        """End a lease now. Raises `UnknownLease`."""
        self._end(find(namespace, lease_id))

    def expire(self, now: float) -> None:
        """End leases whose time is over, some at a time."""
        if self._ends.next_due <= now:
            for lease in self._ends.take_due(now, ENDED_AT_ONCE):
                self._end(lease)

    @property
    def next_end(self) -> float:
        return self._ends.next_due

    def pin(self, root: Root, key: bytes, node: Node) -> None:
        """Pin hard the node that ends with the page of that key, unless it is pinned already."""
        pins = root.namespace.pins
        if (root, key) not in pins:
            pins[root, key] = node
            named(node).own += 1
            self._named.num_changes += 1
            self._named.pin(node, 1)

    def unpin(self, root: Root, key: bytes) -> bool:
        """Take a hard pin away; False where there is none."""
        node = root.namespace.pins.pop((root, key), None)
        if node is None:
            return False
        named(node).own -= 1
        self._named.num_changes += 1
        self._named.pin(node, -1)
        return True

    def of(self, namespace: Namespace, most: int) -> list[Held]:
        """A namespace's hard pins, and its leases; at most `most` of both together."""
        pins = islice(namespace.pins.items(), most)
        held = [Held(None, root, key, node.end) for (root, key), node in pins]
        for one in islice(namespace.leases.values(), most - len(held)):
            key = self._named.last_key(one.node)
            held.append(Held(one.id, named(one.node).root, key, one.node.end, one.ends))
        return held

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
