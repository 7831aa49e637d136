"""The order in which a namespace's cached nodes are evicted: by rank, then by last use."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import Final

from service.core.prefix.nodes import Name, Node

OUT: Final = 0
QUEUED: Final = 1
ASIDE: Final = 2
WAITING: Final = 3
"""Where a node stands: nowhere; in its rank's queue; in the heap beside it; behind its children."""
LEAST_ENTRIES: Final = 1024
"""Entries that hold no more are not looked for among fewer."""

Entry = tuple[int, int, Node, Name]
"""Of a heap: the node's stamp, a number of its own, the node."""


class EvictionOrder:
    """Cached nodes, lowest rank first, then least recently used; those with children not yet.

    A node that is used goes to the end of its rank's queue, children before parents, so the first
    of a queue has no children as long as ranks agree. Where a child ranks above its parent,
    the parent waits behind it and then comes back through a small heap, by its stamp. Constant time
    a node.
    """

    __slots__ = ("_aside", "_num_aside", "_num_entries", "_put_aside", "_queues", "_stamp")

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[Node, Name]] = {}
        self._aside: dict[int, list[Entry]] = {}
        self._stamp = self._put_aside = self._num_aside = self._num_entries = 0

    def use(self, node: Node, name: Name, rank: int) -> None:
        """The node was used last of all."""
        self._stamp += 1
        name.stamp, name.rank, name.place = self._stamp, rank, QUEUED
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = OrderedDict()
        queue[node] = name

    def take_out(self, node: Node, name: Name) -> None:
        """The node is held from now on, or gone."""
        if name.place == QUEUED:
            queue = self._queues[name.rank]
            del queue[node]
            if not queue:
                del self._queues[name.rank]
        elif name.place == ASIDE:
            self._num_aside -= 1
        name.place = OUT

    def rank_again(self, node: Node, name: Name, rank: int) -> None:
        """Another rank for a node in the order, which keeps its last use."""
        self.take_out(node, name)
        name.rank = rank
        self._set_aside(node, name)

    def lost_a_child(self, node: Node, name: Name) -> None:
        """A node that waited may have nothing to wait for any more."""
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

    def _set_aside(self, node: Node, name: Name) -> None:
        name.place = ASIDE
        self._num_aside += 1
        self._num_entries += 1
        self._put_aside += 1  # no two entries are equal, so nodes are never compared
        heap = self._aside.setdefault(name.rank, [])
        heappush(heap, (name.stamp, self._put_aside, node, name))
        if self._num_entries > LEAST_ENTRIES + 2 * self._num_aside:
            self._clean()

    def _clean(self) -> None:
        """Drop entries of nodes that are not aside any more, or have been used since."""
        for rank, heap in list(self._aside.items()):
            kept = {one[3].number: one for one in heap if is_aside(one, rank)}
            self._aside[rank] = sorted(kept.values(), key=lambda one: one[:2])
        self._num_entries = sum(map(len, self._aside.values()))

    def _first_of(self, rank: int) -> Node | None:
        queued, aside = self._first_queued(rank), self._first_aside(rank)
        if queued is None or aside is None:
            return aside[0] if queued is None and aside is not None else queued and queued[0]
        return queued[0] if queued[1].stamp < aside[1].stamp else aside[0]

    def _first_queued(self, rank: int) -> tuple[Node, Name] | None:
        queue = self._queues.get(rank)
        while queue:
            node, name = next(iter(queue.items()))
            if not node.children:
                return node, name
            self.take_out(node, name)
            name.place = WAITING
        return None

    def _first_aside(self, rank: int) -> tuple[Node, Name] | None:
        heap = self._aside.get(rank)
        while heap:
            _, _, node, name = heap[0]
            if is_aside(heap[0], rank):
                if not node.children:
                    return node, name
                self.take_out(node, name)
                name.place = WAITING
            heappop(heap)
            self._num_entries -= 1
        self._aside.pop(rank, None)
        return None


def is_aside(entry: Entry, rank: int) -> bool:
    """Whether an entry of a rank's heap still says where its node stands."""
    stamp, _, _, name = entry
    return (name.place, name.rank, name.stamp) == (ASIDE, rank, stamp)
