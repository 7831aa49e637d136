"""A line for each namespace, and one turn for each of them in its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of one namespace keep their order; whoever has few does not wait for one with many.

    `count` is how many items wait in all.
    """

    __slots__ = ("_lines", "_order", "count")

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}
        """Empty ones stay: there are as many as namespaces."""
        self._order: deque[deque[T]] = deque()
        """The lines that are not empty, in the order of their turns."""
        self.count = 0

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for item in line)

    def depth(self, namespace: str) -> int:
        """How many items of a namespace wait."""
        line = self._lines.get(namespace)
        return 0 if line is None else len(line)

    def append(self, namespace: str, item: T) -> None:
        """To the end of its namespace's line."""
        self._joined(namespace).append(item)

    def put_back(self, namespace: str, item: T) -> None:
        """An item that was taken and cannot go on: to the front of its line."""
        self._joined(namespace).appendleft(item)

    def first(self) -> T:
        """Whose turn it is. Raises IndexError when nobody waits."""
        return self._order[0][0]

    def pop(self) -> T:
        """Take the first; the next turn is another namespace's, if one waits."""
        order = self._order
        line = order[0]
        item = line.popleft()
        self.count -= 1
        if not line:
            order.popleft()
        elif len(order) > 1:
            order.rotate(-1)
        return item

    def remove(self, namespace: str, item: T) -> bool:
        """Take an item out; whether it was there."""
        line = self._lines.get(namespace)
        if line is None or item not in line:
            return False
        line.remove(item)
        self.count -= 1
        if not line:
            self._order = deque(one for one in self._order if one)
        return True

    def _joined(self, namespace: str) -> deque[T]:
        """The line of a namespace, which is about to get one more."""
        line = self._lines.get(namespace)
        if line is None:
            line = self._lines[namespace] = deque()
        if not line:
            self._order.append(line)
        self.count += 1
        return line
