"""Sequences on their way: unfinished imports, and marks of migrating and of new ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from service.core.errors import SequenceExists
from service.core.sequences.books import SequenceBooks
from service.core.timers import Timers
from service.core.tree import PrefixTree
from service.errors import SequenceMoving, UnknownImport
from service.operations.transfer import Header

HIDDEN: Final = "~"
"""First character of the names of sequences that are being imported; callers cannot use it, and all
other names sort before it."""


MAX_FINISHED: Final = 4096


@dataclass(slots=True, eq=False)
class UnfinishedImport:
    """An import of `header` that will be called `name`, and is called `hidden` until then.

    `begun` is the digest that it was begun with, `latest` that of the last part that has come: None
    while that is a part that was passed over. `next_part` is wanted next, `first_page` the first
    page whose rows are wanted. `expires_at` is seconds since 1970.
    """

    name: str
    namespace: str
    header: Header
    begun: bytes
    latest: bytes | None
    next_part: int
    first_page: int
    idle_s: float
    expires_at: float

    @property
    def hidden(self) -> str:
        return HIDDEN + self.name


class UnfinishedImports:
    """Unfinished imports, by the names that the sequences will have. An import lives as long as its
    hidden sequence."""

    def __init__(self, books: SequenceBooks) -> None:
        self._books = books
        self._by_name: dict[str, UnfinishedImport] = {}
        self._counts: Counter[str] = Counter()
        self.finished: dict[tuple[str, str], None] = {}
        """Name and generation of the latest imports that were finished, deleted sequences too."""

    def add(self, begun: UnfinishedImport) -> None:
        self._by_name[begun.name] = begun
        self._counts[begun.namespace] += 1

    def find(self, name: str) -> UnfinishedImport | None:
        found = self._by_name.get(name)
        if found is not None and found.hidden not in self._books:
            self.remove(found)
            return None
        return found

    def get(self, name: str) -> UnfinishedImport:
        """Raises `UnknownImport`."""
        found = self.find(name)
        if found is None:
            raise UnknownImport(name)
        return found

    def finish(self, ended: UnfinishedImport) -> None:
        self.remove(ended)
        self.finished[ended.name, ended.header.generation] = None
        if len(self.finished) > MAX_FINISHED:
            del self.finished[next(iter(self.finished))]

    def remove(self, ended: UnfinishedImport) -> None:
        del self._by_name[ended.name]
        self._counts[ended.namespace] -= 1
        if not self._counts[ended.namespace]:
            del self._counts[ended.namespace]

    def forget(self, hidden: Iterable[str]) -> None:
        """Forget the imports whose hidden sequences, among these names, were deleted."""
        for name in hidden:
            if name.startswith(HIDDEN) and name.removeprefix(HIDDEN) in self._by_name:
                self.remove(self._by_name[name.removeprefix(HIDDEN)])

    def refuse_taken(self, names: Iterable[str]) -> None:
        """Raises `SequenceExists` for names that are taken by imports."""
        if self._by_name and (taken := [name for name in names if self.find(name) is not None]):
            raise SequenceExists(taken)

    def count(self, namespace: str | None) -> int:
        return len(self._by_name) if namespace is None else self._counts.get(namespace, 0)


ENDED_AT_ONCE: Final = 64
"""Maximum marks that expire in one round: about a millisecond of work."""


@dataclass(slots=True)
class Mark:
    """Seconds until a mark expires; the sequence then belongs to this engine again, or is deleted
    here if its ownership was transferred (`is_handed`), or if it is new and was not confirmed."""

    for_s: float
    is_handed: bool = False
    is_new: bool = False


class MoveMarks:
    """The marks, by the sequences' names in the tree; nearly always there are none."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.ends: Timers[str] = Timers()
        """When marks expire, by `time.monotonic()`."""
        self.marks: dict[str, Mark] = {}

    def check(self, names: Iterable[str]) -> None:
        """Raises SequenceMoving where one of the names is marked."""
        found = [name for name in names if name in self.marks]
        if found:
            raise SequenceMoving(found, [name for name in found if self.marks[name].is_handed])

    def put(self, name: str, mark: Mark) -> None:
        """Mark a sequence, or replace its mark."""
        self.marks[name] = mark
        self.prolong(name)

    def prolong(self, name: str) -> None:
        """Restart the time of a sequence's mark, if it has one: it is in use."""
        if (mark := self.marks.get(name)) is not None:
            self.ends.set(name, time.monotonic() + mark.for_s)

    def put_new(self, names: Iterable[str], for_s: float | None) -> None:
        """Mark new sequences, to be confirmed within `for_s` seconds; None: they need not be."""
        if for_s is not None:
            for name in names:
                self.put(name, Mark(for_s, is_new=True))

    def end(self, name: str, *, deletes: bool) -> None:
        """Remove a mark, or delete the sequence with it."""
        del self.marks[name]
        self.ends.cancel(name)
        if deletes and name in self._tree.books:
            self._tree.free((name,))

    def expire(self, now: float, is_held: Callable[[str], bool]) -> None:
        """Remove expired marks: the sequence stays, or is deleted, see `Mark`. The mark of a
        sequence in use starts again."""
        for name in self.ends.take_due(now, ENDED_AT_ONCE):
            if is_held(name):
                self.prolong(name)
            else:
                mark = self.marks[name]
                self.end(name, deletes=mark.is_handed or mark.is_new)
