"""Short slots that are used again as they are: to cut one from the arena takes 8 µs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from service.road.caller_end.slots import ArenaFull, Slot

LEAST_BYTES: Final = 4 * 2**10
MOST_BYTES: Final = 256 * 2**10
"""Longer ones are worth their cutting."""
MOST_SLOTS: Final = 32
"""Of each size that are kept."""


class SpareSlots:
    """Slots that nobody uses, by their sizes, which are powers of two."""

    def __init__(self) -> None:
        self.by_size: dict[int, list[Slot]] = {}

    def take(self, size: int, cut: Callable[[int], Slot]) -> Slot:
        """A slot of at least `size` bytes, newly cut when there is none. Raises ArenaFull."""
        if size <= MOST_BYTES:
            size = 1 << max(size - 1, LEAST_BYTES - 1).bit_length()
            if spare := self.by_size.get(size):
                return spare.pop()
        try:
            return cut(size)
        except ArenaFull:
            if not self.by_size:
                raise
            self.free()
            return cut(size)

    def put(self, slot: Slot) -> None:
        """Give up a slot. One that a call, or the transport, may still use is left to them."""
        if slot.holds == 1 and slot.size <= MOST_BYTES:
            spare = self.by_size.setdefault(slot.size, [])
            if len(spare) < MOST_SLOTS and slot.size & (slot.size - 1) == 0:
                spare.append(slot)
                return
        slot.free()

    def free(self) -> None:
        """Give all of them back to the arena."""
        kept, self.by_size = self.by_size, {}
        for slots in kept.values():
            for slot in slots:
                slot.free()
