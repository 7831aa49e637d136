"""Sequences that are moved to another engine: calls for them are refused until they have gone, or
stay after all."""

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
"""Marks that end in one round: about a millisecond. The next round ends the rest."""


@dataclass(slots=True)
class Mark:
    """For how many seconds nobody has to say what becomes of the sequence; whether it is another
    engine's by then (`is_handed`), or else this one's again."""

    for_s: float
    is_handed: bool = False


class MoveMarks:
    """The marks by the sequences' names in the tree; false where there are none, as nearly
    always."""

    __slots__ = ("_tree", "ends", "marks")

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.ends: Timers[str] = Timers()
        """When marks end, by `time.monotonic()`."""
        self.marks: dict[str, Mark] = {}

    def __bool__(self) -> bool:
        return bool(self.marks)

    def check(self, names: Iterable[str], request: Request) -> None:
        """Raises SequenceMoving where one of the names is leaving."""
        found = [name for name in names if name in self.marks]
        if found:
            shown = request.tenant.shown
            handed = [shown(name) for name in found if self.marks[name].is_handed]
            raise SequenceMoving([shown(name) for name in found], handed)

    def put(self, name: str, mark: Mark) -> None:
        """Mark a sequence anew."""
        self.marks[name] = mark
        self.prolong(name)

    def prolong(self, name: str) -> None:
        """Somebody is at work on a sequence: its mark, if it has one, lasts as long again."""
        if (mark := self.marks.get(name)) is not None:
            self.ends.set(name, time.monotonic() + mark.for_s)

    def end(self, name: str) -> None:
        """Take a mark away; a sequence that was handed over is deleted."""
        mark = self.marks.pop(name)
        self.ends.cancel(name)
        if mark.is_handed and name in self._tree.books:
            self._tree.free((name,))

    def expire(self, now: float, is_held: Callable[[str], bool]) -> None:
        """End the marks that nobody came back for in time: those sequences stay, or are deleted
        where they were handed over. A mark lasts as long again while its sequence is in use."""
        for name in self.ends.take_due(now, ENDED_AT_ONCE):
            if is_held(name):
                self.prolong(name)
            else:
                self.end(name)
