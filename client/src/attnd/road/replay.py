"""Replay: a session's calls that differ from an earlier one in rows and `offsets` only.

A model's layer makes the same call for every token. All that is known beforehand is kept: the
request's header, the place of its arrays, and the header of its last answer, from which the result
is built while the engine works. docs/decisions/repeated-calls.md has the measurements.
"""

from __future__ import annotations

import inspect
import marshal
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np

from attnd.calls.arguments import whole_numbers
from attnd.calls.call import Call, Reply, parsed
from attnd.meta import Meta, Timings
from attnd.road.areas import Area, ArraysInPlace, PlacedCall
from attnd.road.arena import Held
from attnd.road.attempts import answer_room, by_stage, read_answer
from attnd.road.connection import Connection
from attnd.wire import images
from attnd.wire.dtypes import Array
from attnd.wire.images import cut_header
from attnd.wire.slots import ALIGNMENT

T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Key = tuple[object, ...]
Places = list[int | str]
"""The argument of each array: a position, or a keyword."""

MAX_REPLAYS: Final = 512
"""Calls remembered at a time: some operations of all of a model's layers."""
PLAIN: Final = frozenset({int, float, bool, str, list, tuple, type(None)})
"""Types whose values are part of a key."""
LISTS: Final = frozenset({list, tuple})
LISTED: Final = frozenset({int, float, bool, str})
"""Types of the items in those lists: `marshal` writes other types as bytes."""
ROWS: Final = frozenset({"q", "k", "v", "mask", "sinks"})
"""Arguments whose arrays are sent again. The contents of all other arrays are part of the key."""


class Replays:
    """The calls that a session remembers."""

    def __init__(self) -> None:
        self.known: dict[Key, Replay[Any]] = {}

    def key_of(self, build: Callable[..., Any], args: Args, kwargs: Kwargs) -> Key | None:
        """A key that is equal for calls whose requests are equal but for rows and `offsets`.

        None for a call without rows, or with arguments of rare types. Rows count by dtype and
        shape, arrays of `Session.empty` by identity too, because they are sent in place.
        `marshal` distinguishes 1 from True.
        """
        key: list[object] = [build, len(args)]
        plain: list[object] = []
        has_rows = False
        named = zip(parameters(build), args, strict=False)
        for name, value in chain(named, kwargs.items()) if kwargs else named:
            kind = type(value)
            if name in ROWS:
                if value is None:
                    continue
                if kind is not np.ndarray:
                    return None
                if value.base is None:
                    key += (name, value.dtype, value.shape)
                elif type(value.base) is Held:
                    key += (name, value.dtype, value.shape, id(value))
                else:
                    return None
                has_rows = True
            elif name == "offsets":
                continue
            elif kind in PLAIN:
                if kind in LISTS and not LISTED.issuperset(map(type, value)):
                    return None
                plain += (name, value)
            elif kind is np.ndarray and value.dtype.kind in "iuU":
                key += (name, value.dtype, value.shape, value.tobytes())
            else:
                return None
        if not has_rows:
            return None
        key.append(marshal.dumps(plain, 2))
        return tuple(key)

    def remember(
        self, key: Key, call: Call[Any], args: Args, kwargs: Kwargs, connection: Connection | None
    ) -> None:
        places = places_of(key[0], call, args, kwargs)
        if places is None or connection is None or not connection.is_usable:
            return
        if len(self.known) >= MAX_REPLAYS:
            self.known.clear()
        self.known[key] = Replay(connection, call, places)


def places_of(
    build: Any, call: Call[Any], args: Args, kwargs: Kwargs
) -> dict[str, int | str] | None:
    """The argument of each of a call's arrays; None where an array was made from its argument."""
    found: dict[str, int | str] = {}
    names = parameters(build)[: len(args)]
    for name, array in call.arrays.items():
        argument = "mask" if name == "packed_mask" else name
        place = names.index(argument) if argument in names else argument
        if (args[place] if isinstance(place, int) else kwargs.get(place)) is not array:
            return None
        found[name] = place
    return found


@cache
def parameters(build: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters, in the order of positional arguments."""
    return tuple(inspect.signature(build).parameters)


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedAnswer:
    """The last answer, to which the next one will most likely be equal but for its rows: `head` are
    its bytes before the arrays, `length` all its bytes."""

    status: int
    head: bytes
    length: int
    fields: dict[str, Any]
    entries: tuple[images.Entry, ...]

    @classmethod
    def like(cls, status: int, image: images.Bytes) -> Self | None:
        """Made from an answer; None without arrays, or where they would have to be copied."""
        start, contents = images.contents_of(image)
        aligned = all((start + one.begin) % one.dtype.itemsize == 0 for one in contents.entries)
        if not contents.entries or not aligned or start > images.SHORT_HEADER:
            return None
        head = image[:start].tobytes()
        fields = contents.metadata[images.RESPONSE]
        return cls(status, head, len(image), fields, contents.entries)

    def reply(self, image: images.Bytes, meta: Meta) -> Reply:
        start = len(self.head)
        arrays = {
            one.name: np.ndarray(one.shape, one.dtype, image, start + one.begin)
            for one in self.entries
        }
        return Reply(self.status, self.fields, arrays, "", meta)


class RowsInPlace:
    """Rows of the arena that are sent in place. It does not keep them alive."""

    __slots__ = ("_area", "_arrays", "_length")

    def __init__(self, found: ArraysInPlace) -> None:
        self._area: weakref.ref[Area] = weakref.ref(found.area)
        self._arrays = [(weakref.ref(one), one.shape, one.dtype) for _, one in found.arrays]
        self._length = found.length

    def place(
        self, connection: Connection, header: bytes, room: int, args: Args, kwargs: Kwargs
    ) -> PlacedCall | None:
        """None where an array was deleted or reshaped, or another call uses the area."""
        for ref, shape, dtype in self._arrays:
            array = ref()
            if array is None or array.shape != shape or array.dtype is not dtype:
                return None
        area = self._area()
        if area is None:
            return None
        return connection.areas.place_before(area, self._length, header, room)


class CopiedRows:
    """Rows that are copied into the arena, found by their places among the arguments."""

    __slots__ = ("_places",)

    def __init__(self, places: Places) -> None:
        self._places = places

    def place(
        self, connection: Connection, header: bytes, room: int, args: Args, kwargs: Kwargs
    ) -> PlacedCall | None:
        arrays: list[Array] = [
            kwargs[place] if isinstance(place, str) else args[place] for place in self._places
        ]
        return connection.areas.place_copies(header, arrays, room)


class Replay(Generic[T]):
    """A call that was answered over a connection before."""

    __slots__ = ("_expected", "_header", "_parse", "_room", "_route", "_rows", "connection")

    def __init__(self, connection: Connection, call: Call[T], places: dict[str, int | str]) -> None:
        ordered = images.in_order(call.arrays)
        found = connection.areas.find(ordered)
        self._rows: RowsInPlace | CopiedRows
        if found is None:
            self._rows = CopiedRows([places[name] for name, _ in ordered])
            self._header = cut_header(call.fields, ordered, images.ALIGNMENT)
        else:
            self._rows = RowsInPlace(found)
            self._header = cut_header(call.fields, found.arrays, ALIGNMENT)
        self.connection = connection
        self._parse = call.parse
        self._room = answer_room(call)
        self._route = connection.routes[call.operation]
        self._expected: ExpectedAnswer | None = None

    def send(self, args: Args, kwargs: Kwargs, request_id: bytes, ends: float) -> T | None:
        """The call's result; None, with nothing sent, where it has to be built like a first call.

        Raises what calls raise.
        """
        connection = self.connection
        header = self._header.with_offsets(whole_numbers(kwargs.get("offsets"), "offsets"))
        place = self._rows.place(connection, header, self._room, args, kwargs)
        if place is None:
            return None
        number, pending = connection.post(self._route, place, 0, request_id, ends)
        meta = Meta(request_id.hex(), times := Timings(by_stage, ()))
        expected, slot, arena = self._expected, place.answer, connection.arena
        result = None
        if expected is not None:  # built while the engine works
            image = arena.hold(slot.offset, expected.length, slot)
            result = parsed(self._parse, expected.reply(image, meta))
        answer = connection.answer_to(number, pending, ends)
        times.given = answer.seconds
        if (
            expected is not None
            and answer.length == expected.length
            and answer.status == expected.status
            and not arena.is_short
            and arena.memory[slot.offset : slot.offset + len(expected.head)] == expected.head
        ):
            slot.trim(answer.length)
            return result
        if answer.needed > self._room:  # refused for that, with nothing done
            self._room = answer.needed
            return self.send(args, kwargs, request_id, ends)
        reply = read_answer(arena, place, answer, meta)
        if answer.inline is None:
            seen = arena.array((answer.length,), np.dtype(np.uint8), slot.offset)
            self._expected = ExpectedAnswer.like(answer.status, seen)
        return parsed(self._parse, reply)
