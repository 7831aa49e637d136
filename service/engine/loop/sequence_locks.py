"""Locks on the sequences that long work reads or writes: many readers or one writer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from service.engine.handlers.table import HANDLERS
from service.engine.loop.request import Request


class SequenceLocks:
    """Locked sequences; `count` is the number of requests that hold locks."""

    def __init__(self) -> None:
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._prefixes: Counter[str] = Counter()
        """Beginnings of ids: every sequence whose id has one is written."""
        self.count = 0

    def __contains__(self, name: str) -> bool:
        return name in self._read or name in self._written or self._has_prefix((name,))

    def take(self, request: Request, made: Sequence[str] = ()) -> None:
        """Lock a request's sequences, and those `made` for it under ids that it does not name."""
        handler = HANDLERS[request.operation.name]
        self.count += 1
        self._read.update(handler.reads(request))
        self._written.update(handler.writes(request))
        self._written.update(made)
        if (prefix := handler.sweeps(request)) is not None:
            self._prefixes[prefix] += 1

    def release(self, request: Request, made: Sequence[str] = ()) -> None:
        handler = HANDLERS[request.operation.name]
        self.count -= 1
        decrement(self._read, handler.reads(request))
        decrement(self._written, handler.writes(request))
        decrement(self._written, made)
        if (prefix := handler.sweeps(request)) is not None:
            decrement(self._prefixes, (prefix,))

    def blocks(self, request: Request) -> bool:
        """Whether a request has to wait: it writes a locked sequence, or reads a written one."""
        handler = HANDLERS[request.operation.name]
        if self._written and not self._written.keys().isdisjoint(handler.reads(request)):
            return True
        writes = set(handler.writes(request))
        if not (writes.isdisjoint(self._read) and writes.isdisjoint(self._written)):
            return True
        if self._prefixes and self._has_prefix((*writes, *handler.reads(request))):
            return True
        prefix = handler.sweeps(request)
        if prefix is None:
            return False
        locked = (*self._read, *self._written)
        return bool(self._prefixes) or any(name.startswith(prefix) for name in locked)

    def _has_prefix(self, names: Iterable[str]) -> bool:
        return any(name.startswith(prefix) for prefix in self._prefixes for name in names)


def decrement(counts: Counter[str], names: Iterable[str]) -> None:
    """Count each name once less, and remove those at 0."""
    for name in names:
        counts[name] -= 1
        if counts[name] <= 0:
            del counts[name]
