"""A line for each namespace, and one turn for each of them in its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of one namespace keep their order; whoever has few does not wait for one with many."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}
        self._order: deque[str] = deque()
        """The namespaces with a line, in the order of their turns."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for item in line)

    def depth(self, namespace: str) -> int:
        """How many items of a namespace wait."""
        return len(self._lines.get(namespace, ()))

    def append(self, namespace: str, item: T) -> None:
        """To the end of its namespace's line."""
        self._line(namespace).append(item)
        self._count += 1

    def first(self) -> T:
        """Whose turn it is. Raises IndexError when nobody waits."""
        return self._lines[self._order[0]][0]

    def pop(self) -> T:
        """Take the first; the next turn is another namespace's, if one waits."""
        order = self._order
        namespace = order[0]
        line = self._lines[namespace]
        item = line.popleft()
        self._count -= 1
        if not line:
            del self._lines[namespace]
            order.popleft()
        elif len(order) > 1:
            order.rotate(-1)
        return item

    def put_back(self, namespace: str, item: T) -> None:
        """An item that was taken and cannot go on: to the front of its line."""
        self._line(namespace).appendleft(item)
        self._count += 1

    def remove(self, namespace: str, item: T) -> bool:
        """Take an item out; whether it was there."""
        line = self._lines.get(namespace)
        if line is None or item not in line:
            return False
        line.remove(item)
        self._count -= 1
        if not line:
            del self._lines[namespace]
            self._order.remove(namespace)
        return True

    def _line(self, namespace: str) -> deque[T]:
        line = self._lines.get(namespace)
        if line is None:
            line = self._lines[namespace] = deque()
            self._order.append(namespace)
        return line
