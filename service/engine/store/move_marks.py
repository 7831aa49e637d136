"""Marks on sequences that move to another engine: calls for them are refused until they are there,
or the mark expires."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from service.core.timers import Timers
from service.core.tree import PrefixTree
from service.engine.loop.request import Request
from service.errors import SequenceMoving

ENDED_AT_ONCE: Final = 64
"""Maximum marks that expire in one round: about a millisecond of work."""


@dataclass(slots=True)
class Mark:
    """Seconds until a mark expires; the sequence then belongs to this engine again, or is deleted
    here if its ownership was transferred (`is_handed`)."""

    for_s: float
    is_handed: bool = False


class MoveMarks:
    """The marks, by the sequences' names in the tree; nearly always there are none."""

    __slots__ = ("_tree", "ends", "marks")

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.ends: Timers[str] = Timers()
        """When marks expire, by `time.monotonic()`."""
        self.marks: dict[str, Mark] = {}

    def check(self, names: Iterable[str], request: Request) -> None:
        """Raises SequenceMoving where one of the names is marked."""
        found = [name for name in names if name in self.marks]
        if found:
            shown = request.tenant.shown
            handed = [shown(name) for name in found if self.marks[name].is_handed]
            raise SequenceMoving([shown(name) for name in found], handed)

    def put(self, name: str, mark: Mark) -> None:
        """Mark a sequence, or replace its mark."""
        self.marks[name] = mark
        self.prolong(name)

    def prolong(self, name: str) -> None:
        """Restart the time of a sequence's mark, if it has one: it is in use."""
        if (mark := self.marks.get(name)) is not None:
            self.ends.set(name, time.monotonic() + mark.for_s)

    def end(self, name: str) -> None:
        """Remove a mark; a sequence whose ownership was transferred is deleted."""
        mark = self.marks.pop(name)
        self.ends.cancel(name)
        if mark.is_handed and name in self._tree.books:
            self._tree.free((name,))

    def expire(self, now: float, is_held: Callable[[str], bool]) -> None:
        """Remove expired marks: the sequence stays, or is deleted if ownership was transferred. The
        mark of a sequence in use starts again."""
        for name in self.ends.take_due(now, ENDED_AT_ONCE):
            if is_held(name):
                self.prolong(name)
            else:
                self.end(name)
