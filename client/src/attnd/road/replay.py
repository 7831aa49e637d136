"""Repeated calls over a connection to the engine: their frames are written at once, and what they
will most likely answer is made ready while the engine is at work.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from attnd.calls.arguments import whole_numbers
from attnd.calls.call import Call
from attnd.replay import Args, Expected, Kwargs, Places, given
from attnd.results import Meta
from attnd.road.areas import ALIGNMENT, Area, Areas, Laid
from attnd.road.arena import Arena, Held
from attnd.road.attempts import StageTimes, answer_room, read_answer
from attnd.road.connection import Connection
from attnd.road.frames import Answer
from attnd.wire import images
from attnd.wire.images import Array

T = TypeVar("T")


def add_array(key: list[object], arg: object) -> bool:
    """Whether it is an array of the usual kinds, which then is part of the key by dtype and shape;
    arrays made by `Session.empty` by identity too, as they are sent from where they lie."""
    if type(arg) is not np.ndarray:
        return False
    if arg.base is None:
        key += (arg.dtype, arg.shape)
    elif type(arg.base) is Held:
        key += (arg.dtype, arg.shape, id(arg))
    else:
        return False
    return True


def has_come(expected: Expected, answer: Answer, arena: Arena, offset: int) -> bool:
    """Whether an answer is as it was expected, and may stay where it is."""
    if answer.status != expected.status or answer.length != expected.length or arena.is_short:
        return False
    head = expected.head
    return arena.memory[offset : offset + len(head)] == head


class InPlace:
    """Arrays that are sent from where they lie. It does not keep them."""

    __slots__ = ("_area", "_arrays", "_length")

    def __init__(self, area: Area, arrays: Sequence[Array], length: int) -> None:
        """`arrays` are the first `length` bytes of the area."""
        self._area = weakref.ref(area)
        self._arrays = [(weakref.ref(one), one.shape, one.dtype) for one in arrays]
        self._length = length

    def lay(
        self, areas: Areas, header: bytes, room: int, args: Args, kwargs: Kwargs
    ) -> Laid | None:
        """None where the arrays are not what they were, or another call is at them."""
        for ref, shape, dtype in self._arrays:
            array = ref()
            if array is None or array.shape != shape or array.dtype is not dtype:
                return None
        area = self._area()
        return None if area is None else areas.lay_before(area, self._length, header, room)


class Copied:
    """Arrays that are copied into the arena, by their places among a call's arguments."""

    __slots__ = ("_places",)

    def __init__(self, places: list[int | str]) -> None:
        self._places = places

    def lay(
        self, areas: Areas, header: bytes, room: int, args: Args, kwargs: Kwargs
    ) -> Laid | None:
        return areas.lay_behind(header, given(self._places, args, kwargs), room)


class RoadRepeat(Generic[T]):
    """A call that was made over a connection before."""

    __slots__ = (
        *("_arrays", "_connection", "_expected", "_header", "_padding", "_parse", "_room"),
        "_route",
    )

    def __init__(self, connection: Connection, call: Call[T], places: Places) -> None:
        ordered = images.in_order(call.arrays)
        found = connection.areas.place_of(ordered)
        self._arrays: InPlace | Copied
        if found is None:
            self._arrays = Copied([places[name] for name, _ in ordered])
            self._padding = images.ALIGNMENT
        else:
            area, ordered, length = found
            self._arrays = InPlace(area, [array for _, array in ordered], length)
            self._padding = ALIGNMENT
        self._connection = connection
        self._header = images.cut(call.fields, ordered, self._padding)
        self._parse = call.parse
        self._room = answer_room(call)
        self._route = connection.routes[call.operation]
        self._expected: Expected | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the connection stands."""
        return self._connection.is_usable

    def send(self, args: Args, kwargs: Kwargs, request_id: bytes, ends: float) -> T | None:
        """What the call answers; None, and nothing sent, where it has to go like any other. Raises
        what calls raise."""
        connection, offsets = self._connection, whole_numbers(kwargs.get("offsets"), "offsets")
        header = images.with_offsets(self._header, offsets, self._padding)
        laid = self._arrays.lay(connection.areas, header, self._room, args, kwargs)
        if laid is None:
            return None
        posted = connection.post(self._route, laid, 0, request_id, ends)
        meta = Meta(request_id.hex(), times := StageTimes())
        expected, place, arena = self._expected, laid.place, connection.arena
        result = None
        if expected is not None:  # made while the engine is at work
            image = arena.hold(place.offset, expected.length, place)
            result = self._parse(expected.reply(image, meta))
        answer = connection.answer_to(posted, ends)
        times.seconds = answer.seconds
        if expected is not None and has_come(expected, answer, arena, place.offset):
            place.trim(answer.length)
            return result
        if answer.needed > self._room:  # it was refused for that, and nothing done
            self._room = answer.needed
            return self.send(args, kwargs, request_id, ends)
        reply = read_answer(arena, laid, answer, meta)
        if answer.inline is None:
            seen = arena.array((answer.length,), np.dtype(np.uint8), place.offset)
            self._expected = Expected.like(answer.status, seen)
        return self._parse(reply)
