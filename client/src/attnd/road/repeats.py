"""Calls that repeat themselves: the same arrays of the arena, and the same of all else but offsets.

A model's layer makes the same call at every token. What can be known of it beforehand is worked out
once, so that the calls after it write their frames at once; and what their answers will most likely
be is made ready while the engine is at work.
"""

from __future__ import annotations

import marshal
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np

from attnd import images
from attnd.call import Call, Reply
from attnd.images import Array
from attnd.results import Meta
from attnd.road.areas import ALIGNMENT, Area, Laid
from attnd.road.arena import Arena, Slot
from attnd.road.calling import StageTimes, answer_room, image_of, inline_reply, read_reply
from attnd.road.connection import Connection
from attnd.road.frames import Answer
from attnd.tensor_calls import Indices, numbers

T = TypeVar("T")
Key = tuple[object, ...]

MOST: Final = 512
"""Calls remembered at a time: some operations of all of a model's layers."""
PLAIN: Final = frozenset({int, float, bool, str, list, tuple, type(None)})


def key_of(build: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    """What tells a call from all others but in its `offsets`; None for one without an array, with
    one that lies in no arena, or with arguments of rare types.

    Arrays count by identity, all else by what `marshal` makes of it, which tells 1 from True.
    """
    key: list[object] = [build]
    plain: list[object] = []
    for arg in args:
        if type(arg) in PLAIN:
            plain.append(arg)
        elif type(arg) is np.ndarray and arg.base is not None:
            key.append(id(arg))
        else:
            return None
    for name, arg in kwargs.items():
        if type(arg) is np.ndarray and arg.base is not None:
            key += (name, id(arg))
        elif name != "offsets":
            if type(arg) not in PLAIN:
                return None
            plain += (name, arg)
    if len(key) == 1:
        return None
    try:
        key.append(marshal.dumps(plain, 2))
    except ValueError:
        return None
    return tuple(key)


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


class Repeat(Generic[T]):
    """A call that was made over a connection before. It does not keep the call's arrays."""

    __slots__ = (
        *("_area", "_arrays", "_connection", "_expected", "_header", "_length", "_parse", "_room"),
        "_route",
    )

    def __init__(
        self,
        connection: Connection,
        call: Call[T],
        area: Area,
        arrays: list[tuple[str, Array]],
        length: int,
    ) -> None:
        """`arrays` are the first `length` bytes of the area."""
        fields = {name: value for name, value in call.fields.items() if name != "offsets"}
        described = tuple([(name, array.dtype, array.shape) for name, array in arrays])
        self._connection = connection
        self._area = weakref.ref(area)
        self._arrays = tuple([(weakref.ref(one), one.shape, one.dtype) for _, one in arrays])
        self._header = images.write(fields, described, ALIGNMENT)
        self._length = length
        self._parse = call.parse
        self._room = answer_room(call)
        self._route = connection.routes[call.operation]
        self._expected: Expected | None = None

    @property
    def is_sound(self) -> bool:
        """Whether the connection stands, and the arrays are what they were."""
        for ref, shape, dtype in self._arrays:
            array = ref()
            if array is None or array.shape != shape or array.dtype is not dtype:
                return False
        return self._connection.is_usable

    def send(self, offsets: Indices | None, request_id: bytes, ends: float) -> T | None:
        """What the call answers; None, and nothing sent, where it has to go like any other. Raises
        what calls raise."""
        laid = self._lay(offsets)
        if laid is None:
            return None
        connection, arena = self._connection, self._connection.arena
        posted = connection.post(self._route, laid, 0, request_id, ends)
        meta = Meta(request_id.hex(), times := StageTimes())
        expected, place, result = self._expected, laid.place, None
        if expected is not None:  # made while the engine is at work
            result = self._parse(expected.reply(arena, place, meta))
        answer = connection.answer_to(posted, ends)
        times.seconds = answer.seconds
        if expected is not None and expected.has_come(answer, arena, place.offset):
            place.trim(answer.length)
            return result
        if answer.needed > self._room:  # it was refused for that, and nothing done
            self._room = answer.needed
            return self.send(offsets, request_id, ends)
        if answer.inline is not None:
            place.free()
            return self._parse(inline_reply(answer, answer.inline, meta))
        image = image_of(arena, laid, answer.length)
        reply = read_reply(answer.status, image, meta)
        self._expected = Expected.like(answer.status, image)
        return self._parse(reply)

    def _lay(self, offsets: Indices | None) -> Laid | None:
        area = self._area()
        if area is None:
            return None
        begin, end, header = self._header
        if offsets is not None:
            text = f'{begin},\\"offsets\\":{numbers(offsets)}{end}'
            header = images.padded(text, ALIGNMENT)
        return self._connection.areas.lay_before(area, self._length, header, self._room)
