"""Sequences that are moved to another engine: calls for them are refused until they have gone, or
stay after all."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from service.core.tree import PrefixTree
from service.engine.request import Request
from service.errors import SequenceMoving


@dataclass(slots=True)
class Mark:
    """For how long nobody has to say what becomes of the sequence, and until when that is, by
    `time.monotonic()`; whether it is another engine's by then (`is_handed`), or else this one's
    again."""

    for_s: float
    is_handed: bool = False
    ends: float = 0.0

    def __post_init__(self) -> None:
        self.prolong()

    def prolong(self) -> None:
        """Somebody is at work."""
        self.ends = time.monotonic() + self.for_s


class Leaving:
    """The sequences, by their names in the tree; false where there are none, as nearly always."""

    __slots__ = ("marks", "tree")

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.marks: dict[str, Mark] = {}

    def __bool__(self) -> bool:
        return bool(self.marks)

    def check(self, names: Iterable[str], prefix: str | None, request: Request) -> None:
        """Raises SequenceMoving where one of the names is leaving, or one that begins like this."""
        self.expire()
        found = [name for name in names if name in self.marks]
        if prefix is not None:
            found += [name for name in self.marks if name.startswith(prefix)]
        if found:
            raise SequenceMoving([request.tenant.shown(name) for name in found])

    def expire(self) -> None:
        """What nobody came back for in time stays, or is gone where it was handed over."""
        now = time.monotonic()
        for name in [name for name, mark in self.marks.items() if mark.ends <= now]:
            self.end(name)

    def end(self, name: str) -> None:
        mark = self.marks.pop(name)
        if mark.is_handed and name in self.tree.books:
            self.tree.free((name,))
