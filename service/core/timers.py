"""Timers: finds the items that are due without looking at the others."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

LEAST_STALE: Final = 1024
"""Superseded entries are only removed from a heap with more entries than this."""


class Timers(Generic[T]):
    """At most one due time per item, in seconds by one clock.

    A heap by time. Entries superseded by a later `set` or `cancel` stay in it, but never as its
    first: so `next_due`, which loops read in every pass, is a plain attribute.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._entry_of: dict[T, tuple[float, int]] = {}
        """Time and number of each item's valid entry."""
        self._num_made = 0
        self.next_due = math.inf
        """When the first item is due; infinity where there is none."""

    def __len__(self) -> int:
        return len(self._entry_of)

    def __bool__(self) -> bool:
        return bool(self._entry_of)

    def __iter__(self) -> Iterator[T]:
        """All items, in about the order of their times."""
        return (entry[2] for entry in self._heap if self._counts(entry))

    @property
    def first(self) -> T:
        """The item that is due first. Raises IndexError where there is none."""
        return self._heap[0][2]

    def due(self, item: T) -> float:
        """When an item is due; infinity where it has no time."""
        return self._entry_of.get(item, (math.inf,))[0]

    def set(self, item: T, due: float) -> None:
        """Make an item due at `due`, replacing an earlier time; infinity cancels."""
        if due == math.inf:
            self.cancel(item)
            return
        self._num_made += 1  # no two entries are equal, so items are never compared
        self._entry_of[item] = due, self._num_made
        heappush(self._heap, (due, self._num_made, item))
        if len(self._heap) > LEAST_STALE + 2 * len(self._entry_of):
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapify(self._heap)
        self._clean()

    def cancel(self, item: T) -> None:
        """Remove an item's due time, if it has one."""
        if self._entry_of.pop(item, None) is not None:
            self._clean()

    def take_due(self, now: float, most: int) -> Iterator[T]:
        """Remove and yield the due items, earliest first, at most `most` of them."""
        for _ in range(most):
            if self.next_due > now:
                return
            item = heappop(self._heap)[2]
            del self._entry_of[item]
            self._clean()
            yield item

    def _clean(self) -> None:
        """Drop superseded entries from the front of the heap."""
        heap = self._heap
        while heap and not self._counts(heap[0]):
            heappop(heap)
        self.next_due = heap[0][0] if heap else math.inf

    def _counts(self, entry: tuple[float, int, T]) -> bool:
        return self._entry_of.get(entry[2]) == entry[:2]
