"""Arena room of request bodies that have not come whole: how much of it one caller may have.

A head declares a length and costs nothing. So most room follows the bytes that arrive, and only a
part of the arena is given for declarations alone.
"""

from __future__ import annotations

from typing import Final

from service.errors import AttndError, Overloaded

FIRST_BYTES: Final = 64 * 2**10
"""Room that every body may have at once."""
GROWTH: Final = 8
"""A body that has filled its room gets this many times as much."""
DECLARED: Final = 4
"""All bodies together get 1/4 of the arena for declared lengths. Those of one caller get 1/8, but
a body that is alone may have any room."""
OF_ONE: Final = 2
"""The bodies of one caller, as far as they have grown, get half of the arena."""


class Underway:
    """Of one door. Callers are namespaces, or addresses where there are no keys."""

    __slots__ = ("by_caller", "limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.by_caller: dict[str, int] = {}

    def first_room(self, caller: str, declared: int) -> int:
        """Room that a body gets before any of it has come."""
        fits = self.total + declared <= self.limit // DECLARED
        mine = self.by_caller.get(caller, 0) + declared
        if not self.total or (fits and mine <= self.limit // (2 * DECLARED)):
            return declared
        return min(declared, FIRST_BYTES)

    def change(self, caller: str, before: int, after: int) -> None:
        """A body's room of `before` bytes is now `after`. Raises Overloaded; then nothing changes.

        A caller's only large body may have any room, and small ones count for nothing.
        """
        before = before if before > FIRST_BYTES else 0
        after = after if after > FIRST_BYTES else 0
        others = self.by_caller.get(caller, 0) - before
        if after > before and others and others + after > self.limit // OF_ONE:
            raise self.too_much(others)
        self.total += after - before
        if others + after:
            self.by_caller[caller] = others + after
        else:
            self.by_caller.pop(caller, None)

    def too_much(self, others: int) -> AttndError:
        told = (
            f"{others} bytes are held for this caller's other requests that are being received, at "
            f"most {self.limit // OF_ONE} may be: send fewer large bodies at once, or raise "
            "server.max_inflight_bytes"
        )
        return Overloaded(told, retry_after_s=1.0)
