"""Requests laid into the arena: arrays that lie there already are not copied, others are."""

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
from attnd.wire.images import Array

HEADER_ROOM: Final = 16 * 1024
"""Before the first array of an area: enough for some hundred sequences. A longer header is no
error, the arrays are copied behind it."""

FOLLOWS: Final[Mapping[str, tuple[str, ...]]] = {
    "k": ("q",),
    "v": ("k",),
    "mask": ("q", "v"),
    "packed_mask": ("q", "v"),
    "lse": ("o",),
}
"""An array by one of these names lies behind the one made before it, if that has such a name."""

ALIGNMENT: Final = 64


class Area:
    """Arrays back to back, the first one at `begin`, with room for a header before them."""

    __slots__ = ("__weakref__", "begin", "busy", "end", "last", "memory", "slot")

    def __init__(self, slot: Slot, arena: Arena) -> None:
        self.slot = slot
        self.memory = arena
        self.begin = self.end = slot.offset + HEADER_ROOM
        self.last = ""
        self.busy = threading.Lock()


@dataclass(slots=True, eq=False)
class Laid:
    """A call in the arena: its image, the place for its answer, and what keeps both taken.

    Not frozen, since that would cost a microsecond a call.
    """

    offset: int
    length: int
    place: Slot
    capacity: int
    area: Area | None = None

    def release(self) -> None:
        """The engine has read it: another header may be written before the area's arrays."""
        if self.area is not None:
            self.area.busy.release()
            self.area = None


class Areas:
    """The areas of one arena. `take` gives a slot of so many bytes, growing the arena for it."""

    def __init__(self, arena: Arena, take: Callable[[int], Slot]) -> None:
        self._arena = arena
        self._take = take
        self._lock = threading.Lock()
        self._last: weakref.ref[Area] | None = None

    def empty(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array in the arena, behind the one made before it where `FOLLOWS` says so."""
        size = prod(shape) * dtype.itemsize
        with self._lock:
            area = None if self._last is None else self._last()
            if area is None or area.last not in FOLLOWS.get(name, ()) or not self._fits(area, size):
                area = Area(self._take(HEADER_ROOM + size), self._arena)
                self._last = weakref.ref(area)
            offset = area.end
            area.end += size
            area.last = name
        return np.ndarray(shape, dtype, self._arena.hold(offset, size, area))

    def _fits(self, area: Area, size: int) -> bool:
        return self._arena.slots.extend(area.slot, area.end + size - area.slot.offset)

    def lay(self, fields: dict[str, Any], arrays: Mapping[str, Array], room: int) -> Laid:
        """The image of a request, and a place of at least `room` bytes for its answer.

        Raises TypeError as `in_order`, and `ArenaFull`.
        """
        ordered = images.in_order(arrays)
        if ordered and isinstance(ordered[0][1].base, np.ndarray):
            laid = self._in_place(fields, ordered, room)
            if laid is not None:
                return laid
        return self._copied(fields, ordered, room)

    def _in_place(
        self, fields: dict[str, Any], ordered: list[tuple[str, Array]], room: int
    ) -> Laid | None:
        """The arrays where they are; None when they are not the beginning of one area."""
        found = self.place_of(ordered)
        if found is None:
            return None
        area, arrays, length = found
        return self.lay_before(area, length, images.header(fields, arrays, ALIGNMENT), room)

    def place_of(
        self, ordered: list[tuple[str, Array]]
    ) -> tuple[Area, list[tuple[str, Array]], int] | None:
        """The area that arrays are the beginning of, if they are: with them in the order in which
        they lie there, and their bytes together."""
        area: object = None
        offsets: dict[str, int] = {}
        for name, array in ordered:
            held = held_by(array)
            if held is None or not array.flags.c_contiguous:
                return None
            bytes_held, offsets[name] = held
            if area is not None and area is not bytes_held.owner:
                return None
            area = bytes_held.owner
        if not isinstance(area, Area) or area.memory is not self._arena:
            return None
        if len(ordered) > 1:
            ordered = sorted(ordered, key=lambda named: offsets[named[0]])
        end = area.begin
        for name, array in ordered:
            if offsets[name] != end:
                return None
            end += array.nbytes
        return area, ordered, end - area.begin

    def lay_before(self, area: Area, length: int, header: bytes, room: int) -> Laid | None:
        """A header before the first `length` bytes of an area, and a place for the answer; None
        when the header is too long, or another call has one there."""
        size = len(header)
        place = self._take(room)
        if size > HEADER_ROOM or not area.busy.acquire(blocking=False):
            return None
        offset = area.begin - size
        self._arena.memory[offset : area.begin] = header
        return Laid(offset, size + length, place, place.size, area)

    def _copied(self, fields: dict[str, Any], ordered: list[tuple[str, Array]], room: int) -> Laid:
        """The arrays copied behind a header."""
        header = images.header(fields, ordered)
        return self.lay_behind(header, [array for _, array in ordered], room)

    def lay_behind(self, header: bytes, arrays: Sequence[Array], room: int) -> Laid:
        """A header and copies of the arrays, in one slot with the answer's place before them."""
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
        return Laid(begin, length, slot, room)
