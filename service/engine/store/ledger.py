"""What calls leave behind after their replies: counted by namespace, worked off in fair turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from service.engine.work.fair import FairQueue
from service.errors import Overloaded

T = TypeVar("T")
RETRY_S: Final = 1.0
"""Seconds until a retry where a share is used up: there is no estimate of when it is freed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Things that calls leave behind.

    `name`: their plural, for messages. `most`: maximum of all namespaces together. `remedy`: how a
    caller gets rid of some. `count` reads the number of a namespace, or of all (None), where the
    ledger does not count itself.
    """

    name: str
    most: int
    remedy: str
    count: Callable[[str | None], int] | None = None


class Ledger:
    """Counts the things of each kind that a namespace's calls have left behind.

    A namespace can have its `share` of a kind's maximum.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._counts: Counter[tuple[str, str]] = Counter()
        self._totals: Counter[str] = Counter()

    def count(self, kind: Kind, namespace: str | None) -> int:
        """How many a namespace has left behind, or all have (None)."""
        if kind.count is not None:
            return kind.count(namespace)
        if namespace is None:
            return self._totals[kind.name]
        return self._counts[kind.name, namespace]

    def add(self, kind: Kind, namespace: str, number: int = 1) -> None:
        """Count more things of a namespace, or with a negative `number` fewer."""
        self._totals[kind.name] += number
        self._counts[kind.name, namespace] += number
        if not self._counts[kind.name, namespace]:
            del self._counts[kind.name, namespace]

    def room(self, kind: Kind, namespace: str, among: int = 1) -> int:
        """How many more a namespace can leave behind; at most an equal part `among` several."""
        left = min(
            self.part(kind, among) - self.count(kind, namespace),
            kind.most - self.count(kind, None),
        )
        return max(0, left)

    def part(self, kind: Kind, among: int = 1) -> int:
        """How many a namespace can have left behind, as one of `among` equal ones."""
        return max(1, int(kind.most * min(self._share, 1.0 / among)))

    def refuse(self, kind: Kind, namespace: str, number: int = 1) -> None:
        """Raises Overloaded where a namespace cannot leave `number` more behind."""
        if number > self.room(kind, namespace):
            own, held = self.count(kind, namespace), self.count(kind, None)
            whose = f"{own} {kind.name} of this namespace with {number} more exceed its share"
            if number <= self.part(kind) - own:
                whose = f"{held} {kind.name} of all namespaces with {number} more exceed the limit"
            raise Overloaded(f"{whose} of {kind.most}: {kind.remedy}", retry_after_s=RETRY_S)


class Backlog(Generic[T]):
    """Work that calls leave behind: the newest item of each name only, in fair turns.

    A name is one thing's, for all namespaces: an item of the same name takes the place of
    the one that waits, and counts for the namespace that left that one. The items that wait are
    counted in a ledger; callers ask `refuse` before they change anything.
    """

    def __init__(self, ledger: Ledger, kind: Kind) -> None:
        self._ledger, self._kind = ledger, kind
        self._turns: FairQueue[tuple[str, Hashable]] = FairQueue()
        self._items: dict[Hashable, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def refuse(self, namespace: str, name: Hashable) -> None:
        """Raises Overloaded where a namespace cannot leave an item of a name behind."""
        if name not in self._items:
            self._ledger.refuse(self._kind, namespace)

    def put(self, namespace: str, name: Hashable, item: T) -> None:
        """Add an item, or replace the one of its name, which keeps its place."""
        if name not in self._items:
            self._ledger.add(self._kind, namespace)
            self._turns.append(namespace, (namespace, name))
        self._items[name] = item

    def take(
        self, most: int, weigh: Callable[[T], int] = lambda _: 1
    ) -> list[tuple[str, Hashable, T]]:
        """Take items up to the weight `most`, and one at least: namespace, name and item; turns go
        to the namespace that has used the least weight."""
        taken: list[tuple[str, Hashable, T]] = []
        while self._turns.count and most > 0:
            namespace, name = self._turns.pop()
            item = self._items.pop(name)
            weight = weigh(item)
            self._turns.charge(namespace, float(weight))
            self._ledger.add(self._kind, namespace, -1)
            most -= weight
            taken.append((namespace, name, item))
        return taken
