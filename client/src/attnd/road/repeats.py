"""Calls that repeat themselves: all the same but what arrays hold, and offsets.

A model's layer makes the same call at every token. What can be known of it beforehand is worked out
once, so that the calls after it write their frames at once; and what their answers will most likely
be is made ready while the engine is at work.
"""

from __future__ import annotations

import marshal
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np

from attnd import images
from attnd.call import Call, Reply
from attnd.images import Array
from attnd.results import Meta
from attnd.road.areas import ALIGNMENT, Area, Areas, Laid
from attnd.road.arena import Arena, Held, Slot
from attnd.road.calling import StageTimes, answer_room, read_answer
from attnd.road.connection import Connection
from attnd.road.frames import Answer
from attnd.tensor_calls import numbers

T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Key = tuple[object, ...]

MOST: Final = 512
"""Calls remembered at a time: some operations of all of a model's layers."""
PLAIN: Final = frozenset({int, float, bool, str, list, tuple, type(None)})


def key_of(build: Callable[..., Any], args: Args, kwargs: Kwargs) -> Key | None:
    """What tells a call from those that are not like it; None for one without an array, or with
    arguments of rare kinds.

    Arrays made by `Session.empty` count by identity, as they are sent from where they lie, and
    others by dtype and shape; all else by what `marshal` makes of it, which tells 1 from True.
    """
    key: list[object] = [build]
    plain: list[object] = []
    for arg in args:
        if type(arg) in PLAIN:
            plain.append(arg)
        elif not add_array(key, arg):
            return None
    for name, arg in kwargs.items():
        if name == "offsets":
            continue
        if type(arg) in PLAIN:
            plain += (name, arg)
        else:
            key.append(name)
            if not add_array(key, arg):
                return None
    if len(key) == 1:
        return None
    try:
        key.append(marshal.dumps(plain, 2))
    except ValueError:
        return None
    return tuple(key)


def add_array(key: list[object], arg: object) -> bool:
    """Whether it is an array of the usual kinds, which then is part of the key."""
    if type(arg) is not np.ndarray:
        return False
    if arg.base is None:
        key += (arg.dtype, arg.shape)
    elif type(arg.base) is Held:
        key.append(id(arg))
    else:
        return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What an answer is taken to be like: its status, its bytes up to the arrays and in all, what
    the first of them say, and where which arrays lie behind."""

    status: int
    head: bytes
    length: int
    fields: dict[str, Any]
    entries: tuple[images.Entry, ...]

    @classmethod
    def like(cls, status: int, image: images.Bytes) -> Expected | None:
        """As this one was; None without arrays, or where they would have to be copied."""
        start, layout = images.layout_of(image)
        aligned = all((start + one.begin) % one.dtype.itemsize == 0 for one in layout.entries)
        if not layout.entries or not aligned or start > images.ANSWER_BYTES:
            return None
        head = image[:start].tobytes()
        fields = layout.metadata["response"]
        return cls(status, head, len(image), fields, layout.entries)

    def reply(self, arena: Arena, place: Slot, meta: Meta) -> Reply:
        """The reply that it is, should it come like this into its place."""
        image, start = arena.hold(place.offset, self.length, place), len(self.head)
        arrays = {
            one.name: np.ndarray(one.shape, one.dtype, image, start + one.begin)
            for one in self.entries
        }
        return Reply(self.status, self.fields, arrays, "", meta)

    def has_come(self, answer: Answer, arena: Arena, offset: int) -> bool:
        """Whether it is like this, and may stay where it is."""
        if answer.status != self.status or answer.length != self.length or arena.is_short:
            return False
        return arena.memory[offset : offset + len(self.head)] == self.head


def places_of(call: Call[Any], args: Args, kwargs: Kwargs) -> dict[str, int | str] | None:
    """Which arguments a call's arrays are; None where that cannot be told, as when one is given
    twice: the next time they may be two."""
    places: dict[int, int | str] = {id(arg): index for index, arg in enumerate(args)}
    places |= {id(arg): name for name, arg in kwargs.items()}
    found = {name: places[id(one)] for name, one in call.arrays.items() if id(one) in places}
    return found if len(set(found.values())) == len(call.arrays) else None


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

    def __init__(self, places: Sequence[int | str]) -> None:
        self._places = places

    def lay(
        self, areas: Areas, header: bytes, room: int, args: Args, kwargs: Kwargs
    ) -> Laid | None:
        arrays = [kwargs[at] if isinstance(at, str) else args[at] for at in self._places]
        return areas.lay_behind(header, arrays, room)


class Repeat(Generic[T]):
    """A call that was made over a connection before."""

    __slots__ = (
        *("_arrays", "_connection", "_expected", "_header", "_padding", "_parse", "_room"),
        "_route",
    )

    def __init__(
        self, connection: Connection, call: Call[T], places: Mapping[str, int | str]
    ) -> None:
        """`places`: which arguments the arrays are."""
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
        connection, offsets = self._connection, numbers(kwargs.get("offsets"))
        header = images.with_offsets(self._header, offsets, self._padding)
        laid = self._arrays.lay(connection.areas, header, self._room, args, kwargs)
        if laid is None:
            return None
        posted = connection.post(self._route, laid, 0, request_id, ends)
        meta = Meta(request_id.hex(), times := StageTimes())
        expected, place, arena = self._expected, laid.place, connection.arena
        result = None
        if expected is not None:  # made while the engine is at work
            result = self._parse(expected.reply(arena, place, meta))
        answer = connection.answer_to(posted, ends)
        times.seconds = answer.seconds
        if expected is not None and expected.has_come(answer, arena, place.offset):
            place.trim(answer.length)
            return result
        if answer.needed > self._room:  # it was refused for that, and nothing done
            self._room = answer.needed
            return self.send(args, kwargs, request_id, ends)
        reply = read_answer(arena, laid, answer, meta)
        if answer.inline is None:
            image = arena.array((answer.length,), np.dtype(np.uint8), place.offset)
            self._expected = Expected.like(answer.status, image)
        return self._parse(reply)
