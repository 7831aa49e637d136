"""A line for each namespace; the next turn is for the namespace that has used the least time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class NamespaceLine(Generic[T]):
    """The items of one namespace, in order, and the engine's time that it has used, in seconds."""

    items: deque[T] = field(default_factory=deque)
    used: float = 0.0


class FairQueue(Generic[T]):
    """Items of one namespace keep their order; a namespace with few does not wait for one with
    many, nor one with cheap items for one with expensive ones.

    Turns go to the line that has used the least time, and round among lines that have used the
    same (start-time fair queueing, Goyal et al. 1996). A line that was empty starts with the time
    of the line that was served last, so an idle namespace saves no time up. `count` is the number
    of items in all lines.
    """

    def __init__(self) -> None:
        self._lines: dict[str, NamespaceLine[T]] = {}
        """One for each namespace; empty ones stay."""
        self._order: deque[NamespaceLine[T]] = deque()
        """The lines that are not empty, in the order of their turns."""
        self._now = 0.0
        """Time used by the line that was served last, before that turn."""
        self._is_chosen = False
        """Whether the first line has the turn; it keeps it until the turn ends, whatever is charged
        meanwhile."""
        self.count = 0

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for item in line.items)

    def depth(self, namespace: str) -> int:
        line = self._lines.get(namespace)
        return 0 if line is None else len(line.items)

    def append(self, namespace: str, item: T, *, first: bool = False) -> None:
        """Add an item at the end of its namespace's line, or as its `first`."""
        line = self._lines.get(namespace)
        if line is None:
            line = self._lines[namespace] = NamespaceLine()
        if not line.items:
            line.used = max(line.used, self._now)
            self._order.append(line)
        self.count += 1
        if first:
            line.items.appendleft(item)
        else:
            line.items.append(item)

    def charge(self, namespace: str, seconds: float) -> None:
        """Count time that the engine has spent for a namespace."""
        line = self._lines.get(namespace)
        if line is not None:
            line.used += seconds

    def first(self) -> T:
        """The item whose turn it is. Raises IndexError when the queue is empty."""
        if not self._is_chosen:
            if len(self._order) > 1:
                self._choose()
            self._is_chosen = True
        return self._order[0].items[0]

    def pop(self) -> T:
        """Take the first item; among equals the next turn is another namespace's."""
        if not self._is_chosen and len(self._order) > 1:
            self._choose()
        order = self._order
        line = order[0]
        self._now, self._is_chosen = line.used, False
        item = line.items.popleft()
        self.count -= 1
        if not line.items:
            order.popleft()
        elif len(order) > 1:
            order.rotate(-1)
        return item

    def pass_on(self) -> None:
        """End the turn of the first item, which stays the first of its line."""
        order = self._order
        self._now, self._is_chosen = order[0].used, False
        order.rotate(-1)

    def remove(self, namespace: str, item: T) -> bool:
        """Take an item out; False if it is not in the queue."""
        line = self._lines.get(namespace)
        if line is None:
            return False
        try:
            line.items.remove(item)
        except ValueError:
            return False
        self.count -= 1
        if not line.items:
            self._is_chosen = False
            self._order = deque(one for one in self._order if one.items)
        return True

    def _choose(self) -> None:
        """Bring the line that has used the least time to the front."""
        order = self._order
        least, at = order[0].used, 0
        for index, line in enumerate(order):
            if line.used < least:
                least, at = line.used, index
        if at:
            order.rotate(-at)
