"""Leases and hard pins: what holds cached pages without a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from service.core.errors import UnknownLease
from service.core.named import NamedPages
from service.core.namespaces import Namespace, Root
from service.core.nodes import FOREVER, Links, Node, named

LEAST_ENDS: Final = 1024
"""Ends of leases that are gone are not looked for among fewer."""

ENDED_AT_ONCE: Final = 1024
"""Leases that end in one tick: some milliseconds. The next tick ends the rest."""


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
    """Every lease by its id, and hard pins by root and page key."""

    __slots__ = ("_ends", "_leases", "_links", "_named", "_num_ends", "_pins")

    def __init__(self, links: Links, named: NamedPages) -> None:
        self._links = links
        self._named = named
        self._leases: dict[str, Lease] = {}
        self._ends: list[tuple[float, int, Lease]] = []
        self._num_ends = 0
        self._pins: dict[tuple[Root, bytes], Node] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def open(self, lease_id: str, namespace: Namespace, node: Node, ends: float) -> None:
        """A lease on `node`, which stays until then or until it is closed."""
        lease = self._leases[lease_id] = Lease(lease_id, namespace, node, ends)
        namespace.num_leases += 1
        named(node).own += 1
        self._named.hold(node)
        self._watch(lease)

    def renew(self, lease_id: str, namespace: str, ends: float) -> None:
        """Let a lease end then. Raises `UnknownLease`, for another namespace's too."""
        lease = self._get(lease_id, namespace)
        lease.ends = ends
        self._watch(lease)

    def close(self, lease_id: str, namespace: str) -> None:
        """End a lease now. Raises `UnknownLease`, for another namespace's too."""
        self._end(self._get(lease_id, namespace))

    def expire(self, now: float) -> None:
        """End leases whose time is over, some at a time."""
        for _ in range(ENDED_AT_ONCE):
            if not self._ends or self._ends[0][0] > now:
                return
            ends, _, lease = heappop(self._ends)
            if self._leases.get(lease.id) is lease and lease.ends == ends:
                self._end(lease)

    @property
    def next_end(self) -> float:
        return self._ends[0][0] if self._ends else FOREVER

    def pin(self, root: Root, key: bytes, node: Node) -> None:
        """Pin hard the node that ends with the page of that key, unless it is pinned already."""
        if (root, key) not in self._pins:
            self._pins[root, key] = node
            named(node).own += 1
            self._named.pin(node, 1)

    def unpin(self, root: Root, key: bytes) -> bool:
        """Take a hard pin away; False where there is none."""
        node = self._pins.pop((root, key), None)
        if node is None:
            return False
        named(node).own -= 1
        self._named.pin(node, -1)
        return True

    def of(self, namespace: str) -> list[Held]:
        """A namespace's hard pins, and its leases."""
        pins = [
            Held(None, root, key, node.end)
            for (root, key), node in self._pins.items()
            if root.namespace.name == namespace
        ]
        leases = [
            Held(
                one.id, named(one.node).root, self._named.last_key(one.node), one.node.end, one.ends
            )
            for one in self._leases.values()
            if one.namespace.name == namespace
        ]
        return pins + leases

    def held(self) -> list[Node]:
        """The node of each lease and pin."""
        return [*(lease.node for lease in self._leases.values()), *self._pins.values()]

    def _get(self, lease_id: str, namespace: str) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.namespace.name != namespace:
            raise UnknownLease(lease_id)
        return lease

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.id]
        lease.namespace.num_leases -= 1
        named(lease.node).own -= 1
        self._links.release(lease.node)

    def _watch(self, lease: Lease) -> None:
        self._num_ends += 1  # no two entries are equal, so leases are never compared
        heappush(self._ends, (lease.ends, self._num_ends, lease))
        if len(self._ends) > LEAST_ENDS + 2 * len(self._leases):
            self._ends = [
                one
                for one in self._ends
                if self._leases.get(one[2].id) is one[2] and one[2].ends == one[0]
            ]
            heapify(self._ends)
