"""Due times: what is due by now, found without looking at what is not."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

LEAST_STALE: Final = 1024
"""Entries that no longer count are not cleaned up among fewer."""


class Timers(Generic[T]):
    """At most one due time per item, in seconds by one clock.

    A heap by time. Entries that a later `set` or `cancel` replaced stay in it, but never as its
    first: `next_due`, which loops ask for in every pass, is an attribute.
    """

    __slots__ = ("_entry_of", "_heap", "_num_made", "next_due")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._entry_of: dict[T, tuple[float, int]] = {}
        """The time and the number of the one entry of each item that counts."""
        self._num_made = 0
        self.next_due = math.inf
        """When the first item is due; infinity where there is none."""

    def __len__(self) -> int:
        return len(self._entry_of)

    def __bool__(self) -> bool:
        return bool(self._entry_of)

    def set(self, item: T, due: float) -> None:
        """Make an item due at `due`, whatever was set before; infinity cancels."""
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
        """Take an item's due time away, if it has one."""
        if self._entry_of.pop(item, None) is not None:
            self._clean()

    def due_of(self, item: T) -> float:
        """When an item is due; infinity where nothing is set."""
        entry = self._entry_of.get(item)
        return math.inf if entry is None else entry[0]

    def take_due(self, now: float, most: int) -> Iterator[T]:
        """The items that are due, the earliest first, at most `most` of them; each without a due
        time from then on."""
        for _ in range(most):
            if self.next_due > now:
                return
            item = heappop(self._heap)[2]
            del self._entry_of[item]
            self._clean()
            yield item

    def _clean(self) -> None:
        """Drop first entries that do not count."""
        heap = self._heap
        while heap and not self._counts(heap[0]):
            heappop(heap)
        self.next_due = heap[0][0] if heap else math.inf

    def _counts(self, entry: tuple[float, int, T]) -> bool:
        return self._entry_of.get(entry[2]) == entry[:2]
