"""Limits each caller's share of the arena for request bodies that are being received.

Declaring a length costs a client nothing. So most room follows the bytes that arrive, and only a
part of the arena is given for declarations alone.
"""

from __future__ import annotations

from typing import Final

from service.errors import AttndError, Overloaded

FIRST_BYTES: Final = 64 * 2**10
"""Room that every body gets at once."""
GROWTH: Final = 8
"""A body that has filled its room gets this many times as much."""
DECLARED: Final = 4
"""All bodies together get 1/4 of the arena for declared lengths; those of one caller get 1/8. A
body that is alone may have any room."""
OF_ONE: Final = 2
"""The bodies of one caller, as they grow, get at most 1/2 of the arena."""


class BodyShares:
    """The shares of one door. Callers are namespaces, or addresses where there are no keys."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.by_caller: dict[str, int] = {}

    def first_room(self, caller: str, declared: int) -> int:
        """Room for a body before any of it has arrived."""
        fits = self.total + declared <= self.limit // DECLARED
        mine = self.by_caller.get(caller, 0) + declared
        if not self.total or (fits and mine <= self.limit // (2 * DECLARED)):
            return declared
        return min(declared, FIRST_BYTES)

    def change(self, caller: str, before: int, after: int) -> None:
        """A body's room changes from `before` to `after` bytes. Raises Overloaded, and changes
        nothing then.

        A caller's only large body may have any room; bodies of up to `FIRST_BYTES` are not counted.
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
        text = (
            f"this caller's other requests hold {others} bytes while they are received, the limit "
            f"is {self.limit // OF_ONE}: send fewer large bodies at once, or raise "
            "server.max_inflight_bytes"
        )
        return Overloaded(text, retry_after_s=1.0)
