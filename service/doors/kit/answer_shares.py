"""Limits each namespace's share of the arena for replies, until their last byte is sent.

A client that does not read its responses keeps their memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

from service.doors.kit.spare_slots import MAX_BYTES
from service.errors import Overloaded
from service.road.caller_end.slots import Slot

OF_ONE: Final = 2
"""The replies of one namespace get 1/2 of the arena."""


class AnswerShares:
    """The shares of one arena. Slots of up to `MAX_BYTES` are not counted: the number of
    connections bounds them."""

    __slots__ = ("by_namespace", "limit", "returned")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.by_namespace: dict[str, int] = {}
        self.returned: deque[tuple[str, int]] = deque()
        """Freed slots; the garbage collector appends to it at any moment."""

    def check(self, namespace: str, size: int) -> None:
        """Raises Overloaded if a reply of `size` bytes exceeds the namespace's share. Its only
        large reply may have any size."""
        while self.returned:
            name, freed = self.returned.popleft()
            self.by_namespace[name] -= freed
            if not self.by_namespace[name]:
                del self.by_namespace[name]
        held = self.by_namespace.get(namespace, 0)
        if held and held + size > self.limit // OF_ONE:
            text = (
                f"this namespace's unread responses hold {held} bytes, the limit is "
                f"{self.limit // OF_ONE}: read the responses, or raise server.max_inflight_bytes"
            )
            raise Overloaded(text, retry_after_s=1.0)

    def count(self, namespace: str, slot: Slot) -> None:
        """Count a slot until nothing refers to its bytes any more."""
        if slot.size > MAX_BYTES:
            self.by_namespace[namespace] = self.by_namespace.get(namespace, 0) + slot.size
            freed = (namespace, slot.size)
            weakref.finalize(slot.array, self.returned.append, freed).atexit = False
