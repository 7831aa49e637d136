"""Which sequences stand still while long work on them goes on, and who waits for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from service.engine.request import Request
from service.engine.turns import turn_of


class Holds:
    """Sequences that long work reads or writes, each counted by how many hold it."""

    def __init__(self) -> None:
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._read or self._written)

    def take(self, request: Request, made: Sequence[str] = ()) -> None:
        """Hold the request's sequences, and those `made` for it whose ids nobody gave."""
        turn = turn_of(request)
        self._read.update(turn.reads(request))
        self._written.update(turn.writes(request))
        self._written.update(made)

    def release(self, request: Request, made: Sequence[str] = ()) -> None:
        turn = turn_of(request)
        lower(self._read, turn.reads(request))
        lower(self._written, turn.writes(request))
        lower(self._written, made)

    def stop(self, request: Request) -> bool:
        """Whether the request has to wait: it writes what is held, or reads what is written."""
        turn = turn_of(request)
        if self._written and not self._written.keys().isdisjoint(turn.reads(request)):
            return True
        writes = set(turn.writes(request))
        return not (writes.isdisjoint(self._read) and writes.isdisjoint(self._written))


def lower(counts: Counter[str], names: Iterable[str]) -> None:
    """Count each name once less; what comes to 0 goes."""
    for name in names:
        counts[name] -= 1
        if counts[name] <= 0:
            del counts[name]
