"""Which sequences stand still while long work on them goes on, and who waits for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from service.engine.handlers.table import turn_of
from service.engine.loop.request import Request


class Holds:
    """Sequences that long work reads or writes, each counted by how many hold it."""

    def __init__(self) -> None:
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._swept: Counter[str] = Counter()
        """Beginnings of ids: every sequence that has one is written."""

    def __bool__(self) -> bool:
        return bool(self._read or self._written or self._swept)

    def __contains__(self, name: str) -> bool:
        return name in self._read or name in self._written or self._is_swept((name,))

    def take(self, request: Request, made: Sequence[str] = ()) -> None:
        """Hold the request's sequences, and those `made` for it whose ids nobody gave."""
        turn = turn_of(request)
        self._read.update(turn.reads(request))
        self._written.update(turn.writes(request))
        self._written.update(made)
        if (prefix := turn.sweeps(request)) is not None:
            self._swept[prefix] += 1

    def release(self, request: Request, made: Sequence[str] = ()) -> None:
        turn = turn_of(request)
        lower(self._read, turn.reads(request))
        lower(self._written, turn.writes(request))
        lower(self._written, made)
        if (prefix := turn.sweeps(request)) is not None:
            lower(self._swept, (prefix,))

    def stop(self, request: Request) -> bool:
        """Whether the request has to wait: it writes what is held, or reads what is written."""
        turn = turn_of(request)
        if self._written and not self._written.keys().isdisjoint(turn.reads(request)):
            return True
        writes = set(turn.writes(request))
        if not (writes.isdisjoint(self._read) and writes.isdisjoint(self._written)):
            return True
        if self._swept and self._is_swept((*writes, *turn.reads(request))):
            return True
        prefix = turn.sweeps(request)
        if prefix is None:
            return False
        held = (*self._read, *self._written)
        return bool(self._swept) or any(name.startswith(prefix) for name in held)

    def _is_swept(self, names: Iterable[str]) -> bool:
        return any(name.startswith(prefix) for prefix in self._swept for name in names)


def lower(counts: Counter[str], names: Iterable[str]) -> None:
    """Count each name once less; what comes to 0 goes."""
    for name in names:
        counts[name] -= 1
        if counts[name] <= 0:
            del counts[name]
