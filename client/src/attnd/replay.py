"""Calls that repeat themselves: all the same but what arrays hold, and offsets.

A model's layer makes the same call at every token. What can be known of it beforehand is worked out
once, so that the calls after it need not be; and so is what their answers will most likely be.
"""

from __future__ import annotations

import inspect
import marshal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np

from attnd.calls.call import Call, Reply
from attnd.results import Meta
from attnd.wire import images

R = TypeVar("R")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Key = tuple[object, ...]
Places = Mapping[str, int | str]
"""Which of a call's arguments its arrays are, by their names in the image."""

MOST: Final = 512
"""Calls remembered at a time: some operations of all of a model's layers."""
PLAIN: Final = frozenset({int, float, bool, str, list, tuple, type(None)})
"""Kinds that a key holds by value."""
LISTS: Final = frozenset({list, tuple})
LISTED: Final = frozenset({int, float, bool, str})
"""What the lists among a call's arguments may hold: `marshal` takes other kinds for bytes."""
ROWS: Final = frozenset({"q", "k", "v", "mask"})
"""The arguments that a repeated call sends anew. Every other array is part of its header."""


class Repeats(Generic[R]):
    """The calls that a client remembers, each with what repeats it."""

    def __init__(
        self,
        add_array: Callable[[list[object], object], bool],
        make: Callable[[Call[Any], Places], R | None],
    ) -> None:
        """`add_array` adds to a key what tells an array from those that are not like it, unless it
        is none; `make` makes what repeats a call that was answered, where it can be repeated."""
        self._add_array = add_array
        self._make = make
        self.known: dict[Key, R] = {}

    def key_of(self, build: Callable[..., Any], args: Args, kwargs: Kwargs) -> Key | None:
        """A key that is equal for calls with equal requests, but for `offsets` and what the arrays
        in `ROWS` hold; None for a call without such an array, or with arguments of rare kinds.

        Arrays in `ROWS` count by dtype, shape and which of them are one object; everything else
        counts by content. `marshal` tells 1 from True.
        """
        add_array = self._add_array
        key: list[object] = [build, len(args)]
        plain: list[object] = []
        rows: list[int] = []
        named = zip(parameters(build), args, strict=False)
        for name, arg in chain(named, kwargs.items()) if kwargs else named:
            kind = type(arg)
            if name in ROWS:
                if arg is not None:
                    rows.append(id(arg))
                    key.append(name)
                    if not add_array(key, arg):
                        return None
            elif name == "offsets":
                continue
            elif kind in PLAIN:
                if kind in LISTS and not LISTED.issuperset(map(type, arg)):
                    return None
                plain += (name, arg)
            elif kind is np.ndarray and arg.dtype.kind in "iuU":
                key += (name, arg.dtype, arg.shape, arg.tobytes())
            else:
                return None
        if not rows:
            return None
        if len(rows) > 1 and len(set(rows)) < len(rows):
            key += map(rows.index, rows)
        key.append(marshal.dumps(plain, 2))
        return tuple(key)

    def remember(self, key: Key, call: Call[Any], args: Args, kwargs: Kwargs) -> None:
        """A call that was answered may come again."""
        places = places_of(call, args, kwargs)
        repeat = None if places is None else self._make(call, places)
        if repeat is not None:
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[key] = repeat


def places_of(call: Call[Any], args: Args, kwargs: Kwargs) -> Places | None:
    """Which arguments a call's arrays are; None where an array was made from its argument."""
    places: dict[int, int | str] = {id(arg): index for index, arg in enumerate(args)}
    places |= {id(arg): name for name, arg in kwargs.items()}
    found = {name: places[id(one)] for name, one in call.arrays.items() if id(one) in places}
    return found if len(found) == len(call.arrays) else None


@cache
def parameters(build: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters, in the order of positional arguments."""
    return tuple(inspect.signature(build).parameters)


def given(places: list[int | str], args: Args, kwargs: Kwargs) -> list[images.Array]:
    """The arrays among a call's arguments."""
    return [kwargs[at] if isinstance(at, str) else args[at] for at in places]


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
    def like(cls, status: int, image: images.Bytes) -> Self | None:
        """As this one was; None without arrays, or where they would have to be copied."""
        start, layout = images.layout_of(image)
        aligned = all((start + one.begin) % one.dtype.itemsize == 0 for one in layout.entries)
        if not layout.entries or not aligned or start > images.ANSWER_BYTES:
            return None
        head = image[:start].tobytes()
        fields = layout.metadata["response"]
        return cls(status, head, len(image), fields, layout.entries)

    def reply(self, image: images.Bytes, meta: Meta) -> Reply:
        """The reply that an image like this is."""
        start = len(self.head)
        arrays = {
            one.name: np.ndarray(one.shape, one.dtype, image, start + one.begin)
            for one in self.entries
        }
        return Reply(self.status, self.fields, arrays, "", meta)
