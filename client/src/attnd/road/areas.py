"""Places requests in the arena: arrays of the arena are sent in place, others are copied."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from attnd.road.arena import Arena, Slot, held_by
from attnd.wire import images
from attnd.wire.dtypes import Array
from attnd.wire.images import flat, lengthened, request_header
from attnd.wire.slots import ALIGNMENT

HEADER_ROOM: Final = 16 * 1024
"""Bytes before the first array of an area, enough for some hundred sequences. Arrays are copied
behind a longer header."""

ROOMS: Final = {"values": 96 * 1024}
"""Room before arrays of other names: for a header, and the keys of a thousand records."""
FOLLOWS: Final[Mapping[str, tuple[str, ...]]] = {
    "k": ("q",),
    "v": ("k",),
    "mask": ("q", "v"),
    "packed_mask": ("q", "v"),
    "lse": ("o",),
}
"""Inputs that an array of this name is placed behind, if one of them was made before it."""


class Area:
    """Arrays back to back, the first one at `begin`, with room for a header before them."""

    __slots__ = ("__weakref__", "arena", "begin", "busy", "end", "last", "room", "slot")

    def __init__(self, slot: Slot, arena: Arena, room: int) -> None:
        self.slot = slot
        self.arena = arena
        self.room = room
        self.begin = self.end = slot.offset + room
        self.last = ""
        """Name of the array made last."""
        self.busy = threading.Lock()
        """Locked while a call's header is before the arrays."""


@dataclass(slots=True, eq=False)
class PlacedCall:
    """A call in the arena: its image, and the slot for its answer of `capacity` bytes.

    Not frozen: that costs a microsecond per call.
    """

    offset: int
    length: int
    answer: Slot
    capacity: int
    area: Area | None = None

    def release(self) -> None:
        """The engine has read the image: another header may be written before the area's arrays."""
        area, self.area = self.area, None
        if area is not None:
            area.busy.release()


@dataclass(frozen=True, slots=True, eq=False)
class ArraysInPlace:
    """Arrays that are the first `length` bytes of an area, in the order of their offsets."""

    area: Area
    arrays: list[tuple[str, Array]]
    length: int


class Areas:
    """Places calls in one arena. `take` returns a slot of `n` bytes; the arena grows for it."""

    def __init__(self, arena: Arena, take: Callable[[int], Slot]) -> None:
        self._arena = arena
        self._take = take
        self._lock = threading.Lock()
        self._last: weakref.ref[Area] | None = None

    def empty(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array in the arena, directly behind the one made before it where `FOLLOWS` allows."""
        size = prod(shape) * dtype.itemsize
        with self._lock:
            area = None if self._last is None else self._last()
            if (
                area is None
                or area.last not in FOLLOWS.get(name, ())
                or not self._arena.slots.extend(area.slot, area.end + size - area.slot.offset)
            ):
                room = ROOMS.get(name, HEADER_ROOM)
                area = Area(self._take(room + size), self._arena, room)
                self._last = weakref.ref(area)
            offset = area.end
            area.end += size
            area.last = name
        return np.ndarray(shape, dtype, self._arena.hold(offset, size, area))

    def place(self, fields: dict[str, Any], arrays: Mapping[str, Array], room: int) -> PlacedCall:
        """The image of a request, and a slot of at least `room` bytes for its answer.

        Raises TypeError for a dtype that images do not have, and `ArenaFull`.
        """
        ordered = images.in_order(arrays)
        before = 0
        """Arrays that are not in the arena: a header's room has them, too."""
        while before < len(ordered) and not isinstance(ordered[before][1].base, np.ndarray):
            before += 1
        if before < len(ordered):
            found = self.find(ordered[before:])
            if found is not None:
                copies = b"".join([flat(array) for _, array in ordered[:before]])
                header = request_header(fields, [*ordered[:before], *found.arrays], 8)
                placed = self.place_before(found.area, found.length, header, copies, room)
                if placed is not None:
                    return placed
        header = request_header(fields, ordered)
        return self.place_copies(header, [array for _, array in ordered], room)

    def find(self, ordered: list[tuple[str, Array]]) -> ArraysInPlace | None:
        """The area whose first bytes these arrays are; None for any other arrays.

        One array under two names (as k and v) is not the beginning of an area: it is copied.
        """
        area: object = None
        offsets: dict[str, int] = {}
        for name, array in ordered:
            held = held_by(array)
            if held is None or not array.flags.c_contiguous:
                return None
            stretch, offsets[name] = held
            if area is not None and area is not stretch.owner:
                return None
            area = stretch.owner
        if not isinstance(area, Area) or area.arena is not self._arena:
            return None
        if len(ordered) > 1:
            ordered = sorted(ordered, key=lambda named: offsets[named[0]])
        end = area.begin
        for name, array in ordered:
            if offsets[name] != end:
                return None
            end += array.nbytes
        return ArraysInPlace(area, ordered, end - area.begin)

    def place_before(
        self, area: Area, length: int, header: bytes, copies: bytes, room: int
    ) -> PlacedCall | None:
        """Write a header and copies of arrays before the first `length` bytes of an area; take a
        slot for the answer.

        None when they are too long, or another call's header is there.
        """
        head = lengthened(header, -(len(header) + len(copies)) % ALIGNMENT) + copies
        size = len(head)
        answer = self._take(room)
        if size > area.room or not area.busy.acquire(blocking=False):
            return None
        offset = area.begin - size
        self._arena.memory[offset : area.begin] = head
        return PlacedCall(offset, size + length, answer, answer.size, area)

    def place_copies(self, header: bytes, arrays: Sequence[Array], room: int) -> PlacedCall:
        """A header and copies of the arrays, in one slot behind the room for the answer."""
        length = len(header) + sum([array.nbytes for array in arrays])
        room = -(-room // ALIGNMENT) * ALIGNMENT
        slot = self._take(room + length)
        begin = slot.offset + room
        offset = begin + len(header)
        self._arena.memory[begin:offset] = header
        for array in arrays:
            if array.nbytes:
                self._arena.array(array.shape, array.dtype, offset)[...] = array
                offset += array.nbytes
        return PlacedCall(begin, length, slot, room)
