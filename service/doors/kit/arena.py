"""The arena of a door with several engines, shared by all engines of its host.

A door receives a body before the engine is chosen, so every engine of the host maps the arena that
holds it, and writes replies where the door sends them from. Engines of other hosts get and send
images over TCP.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from attnd.wire.dtypes import Part

from config.server import ServerSettings
from service.doors.kit.answer_shares import AnswerShares
from service.doors.kit.spare_slots import SpareSlots
from service.errors import AttndError, Overloaded
from service.road.arena import PAGE, anonymous_file, pages, seal
from service.road.caller_end.shared_arena import OwnArena
from service.road.caller_end.slots import ArenaFull, Mapping, Slot

FIRST_BYTES: Final = 64 * 2**20


class DoorArena:
    """Slots of one growing memory, which the door brings to its sessions."""

    def __init__(self, limits: ServerSettings) -> None:
        self.limit = limits.max_inflight_bytes
        size = max(pages(min(FIRST_BYTES, self.limit)), PAGE)
        fd, sealable = anonymous_file()
        os.ftruncate(fd, size)
        if sealable:
            seal(fd)
        self.own = OwnArena(Mapping(fd, size))
        self.mapping, self.slots = self.own.mapping, self.own.slots
        self.spare = SpareSlots()
        self.answers = AnswerShares(self.limit)

    def take(self, size: int) -> Slot:
        """Raises ArenaFull when the memory cannot grow any more."""
        return self.spare.take(size, self.cut)

    def cut(self, size: int) -> Slot:
        """A slot not much larger than `size`. Raises ArenaFull."""
        try:
            return self.slots.take(size)
        except ArenaFull as full:
            wanted = min(max(2 * full.size, full.size + full.needed), self.limit)
            if wanted <= full.size:
                raise
        os.ftruncate(self.mapping.fd, pages(wanted))
        self.mapping.grow(pages(wanted))
        self.slots.grow(pages(wanted))
        return self.slots.take(size)

    def slot(self, size: int, *, exactly: bool = False) -> Slot:
        """As `take`; raises Overloaded."""
        try:
            return self.cut(size) if exactly else self.take(size)
        except ArenaFull as full:
            raise overloaded(full) from None

    def lay(self, parts: Sequence[Part]) -> tuple[Slot, int]:
        """A slot with an image's parts, and the image's length. Raises Overloaded."""
        slot = self.slot(sum(map(len, parts)))
        into, at = slot.view(), 0
        for part in parts:
            into[at : at + len(part)] = part
            at += len(part)
        return slot, at

    def give_back(self, slot: Slot) -> None:
        """Give up a slot that nothing here refers to any more; a call may still hold it."""
        self.spare.put(slot)

    def trim(self) -> None:
        """Return unused memory to the system. Not while a device holds it."""
        self.spare.free()
        self.slots.trim()

    def close(self) -> None:
        self.spare.free()
        self.own.close()


def overloaded(full: ArenaFull) -> AttndError:
    text = (
        f"requests and replies in flight need {full.needed} more bytes, {full.free} of {full.size} "
        "are free: retry later, or raise server.max_inflight_bytes"
    )
    return Overloaded(text, retry_after_s=1.0)
