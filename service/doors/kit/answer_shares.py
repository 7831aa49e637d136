"""Arena room of answers, from the call until the last byte is sent: how much of it one namespace
may have. A client that does not read its answers keeps them there."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

from service.doors.kit.spare_slots import MOST_BYTES
from service.errors import Overloaded
from service.road.caller_end.slots import Slot

OF_ONE: Final = 2
"""The answers of one namespace get half of the arena."""


class AnswerShares:
    """Of one arena. Slots of up to `MOST_BYTES` count for nothing: the number of connections
    bounds them."""

    __slots__ = ("by_namespace", "limit", "returned")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.by_namespace: dict[str, int] = {}
        self.returned: deque[tuple[str, int]] = deque()
        """What is free again; the garbage collector appends to it at any moment."""

    def check(self, namespace: str, size: int) -> None:
        """Raises Overloaded where an answer of `size` bytes passes the namespace's share. Its only
        large answer may have any size."""
        while self.returned:
            name, freed = self.returned.popleft()
            self.by_namespace[name] -= freed
            if not self.by_namespace[name]:
                del self.by_namespace[name]
        held = self.by_namespace.get(namespace, 0)
        if held and held + size > self.limit // OF_ONE:
            told = (
                f"{held} bytes are held for this namespace's answers that are not sent yet, at "
                f"most {self.limit // OF_ONE} may be: read the answers, or raise "
                "server.max_inflight_bytes"
            )
            raise Overloaded(told, retry_after_s=1.0)

    def count(self, namespace: str, slot: Slot) -> None:
        """Count a slot until nothing refers to its bytes any more."""
        if slot.size > MOST_BYTES:
            self.by_namespace[namespace] = self.by_namespace.get(namespace, 0) + slot.size
            freed = (namespace, slot.size)
            weakref.finalize(slot.array, self.returned.append, freed).atexit = False
