"""Unfinished imports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from service.core.errors import SequenceExists
from service.core.sequences.books import SequenceBooks
from service.errors import UnknownImport
from service.operations.transfer import Header

HIDDEN: Final = "~"
"""First character of the names of sequences that are being imported; callers cannot use it, and all
other names sort before it."""


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
