"""A door's arena: its slots, the unused ones, and the shares of namespaces."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
from attnd.wire.dtypes import Array, Part

from config.server import ServerSettings
from service.errors import AttndError, Overloaded
from service.road.arena import PAGE, anonymous_file, pages, seal
from service.road.caller_end.slots import ArenaFull, Mapping, OwnArena, Slot

OF_ONE: Final = 2
"""The replies of one namespace get 1/2 of the arena."""


class AnswerShares:
    """Limits each namespace's share of an arena for replies, until their last byte is sent: a
    client that does not read its responses keeps their memory. Slots of up to `MAX_BYTES` are not
    counted: the number of connections bounds them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.by_namespace: dict[str, int] = {}
        self.returned: deque[tuple[str, int]] = deque()
        """Freed slots; the garbage collector appends to it at any moment."""

    def check(self, namespace: str, size: int) -> None:
        """Raises Overloaded if a reply of `size` bytes exceeds the namespace's share. Its only
        large reply may have any size."""
        self.settle()
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
            self.count_array(namespace, slot.array, slot.size)

    def counted(self, namespace: str, text: bytes) -> Part:
        """A reply's text, which counts like a slot."""
        if len(text) <= MAX_BYTES:
            return text
        array = np.frombuffer(text, np.uint8)
        self.count_array(namespace, array, len(text))
        return array.data

    def count_array(self, namespace: str, array: Array, size: int) -> None:
        self.settle()
        self.by_namespace[namespace] = self.by_namespace.get(namespace, 0) + size
        weakref.finalize(array, self.returned.append, (namespace, size)).atexit = False

    def settle(self) -> None:
        """Subtract the slots freed since the last call."""
        while self.returned:
            name, freed = self.returned.popleft()
            self.by_namespace[name] -= freed
            if not self.by_namespace[name]:
                del self.by_namespace[name]


MIN_BYTES: Final = 4 * 2**10
MAX_BYTES: Final = 256 * 2**10
"""Longer slots are cut each time."""
MAX_SLOTS: Final = 32
"""Unused slots of one size."""


class SpareSlots:
    """Unused slots by their sizes, which are powers of two."""

    def __init__(self) -> None:
        self.by_size: dict[int, list[Slot]] = {}

    def take(self, size: int, cut: Callable[[int], Slot]) -> Slot:
        """A slot of at least `size` bytes, newly cut if none is unused. Raises ArenaFull."""
        if size <= MAX_BYTES:
            size = 1 << (size - 1 if size > MIN_BYTES else MIN_BYTES - 1).bit_length()
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
        """Keep a slot for later; one that a call or the transport still uses is left to them."""
        size = slot.size
        if slot.holds == 1 and size <= MAX_BYTES and size & (size - 1) == 0:
            spare = self.by_size.setdefault(size, [])
            if len(spare) < MAX_SLOTS:
                spare.append(slot)
                return
        slot.free()

    def free(self) -> None:
        """Return every unused slot to the arena."""
        unused, self.by_size = self.by_size, {}
        for slots in unused.values():
            for slot in slots:
                slot.free()


FIRST_BYTES: Final = 64 * 2**20


class DoorArena:
    """Slots of one growing memory, which a door brings to its sessions.

    A door receives a body before the engine is chosen, so every engine of the host maps the arena
    that holds it, and writes replies where the door sends them from. Engines of other hosts get and
    send images over TCP. An engine maps new memory with the next call that needs it.
    """

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
        self.take = partial(self.spare.take, cut=self.cut)
        self.give_back = self.spare.put
        self.answers = AnswerShares(self.limit)

    def cut(self, size: int) -> Slot:
        """A slot not much larger than `size`. Raises ArenaFull."""
        try:
            return self.slots.take(size)
        except ArenaFull as full:
            wanted = min(max(2 * full.size, full.size + full.needed), self.limit)
            if wanted <= full.size:
                raise
            try:
                os.ftruncate(self.mapping.fd, pages(wanted))
                self.mapping.grow(pages(wanted))
            except OSError:  # the system has no memory for it
                raise full from None
        self.slots.grow(self.mapping.size)
        return self.slots.take(size)

    def slot(self, size: int, *, exactly: bool = False) -> Slot:
        """Raises Overloaded when the memory cannot grow any more."""
        try:
            return self.cut(size) if exactly else self.take(size)
        except ArenaFull as full:
            raise overloaded(full) from None

    def lay(self, parts: Sequence[Part]) -> tuple[Slot, int]:
        """A slot with an image's parts, and the image's length. Raises Overloaded."""
        slot = self.slot(sum(map(len, parts)))
        return slot, slot.write(parts)

    def trim(self, begin: int) -> int | None:
        """Return unused memory to the system, as `Slots.trim`."""
        self.spare.free()
        return self.slots.trim(begin)

    def close(self) -> None:
        self.spare.free()
        self.own.close()


def overloaded(full: ArenaFull) -> AttndError:
    text = (
        f"requests and replies in flight need {full.needed} more bytes, {full.free} of {full.size} "
        "are free: retry later, or raise server.max_inflight_bytes"
    )
    return Overloaded(text, retry_after_s=1.0)
