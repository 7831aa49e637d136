"""JSON text: read strictly, refused early when it would take long, written compact and ASCII.

Long text is read in pieces, so that an event loop can do other work between two of them: two
megabytes at once take up to 70 ms. The generators yield after about a millisecond of work each and
return the value; they accept the same text as `load_json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final, NoReturn, TypeVar

from service.errors import MalformedBody

MAX_LISTS: Final = 1024
"""A request has a dozen lists, and two more for each of up to 64 tensors and 16 levels."""
MAX_OBJECTS: Final = 66_000
"""Most are the sequences of one create, at most 65536."""
MAX_KEYS: Final = 128
"""In one object; the most are the tensors, at most 64."""


def check_counts(text: bytes, what: str) -> None:
    """Raises `MalformedBody` when more values would be made than any request has.

    Making millions of small lists and objects takes most of a second; counting brackets takes a
    millisecond. Brackets inside strings count too: no id, name or option has one.
    """
    for bracket, limit, kind in ((b"[", MAX_LISTS, "lists"), (b"{", MAX_OBJECTS, "objects")):
        if (count := text.count(bracket)) > limit:
            raise MalformedBody(f"{what} has {count} {kind}: no request has more than {limit}")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    if len(pairs) > MAX_KEYS:
        raise MalformedBody(f"an object has {len(pairs)} keys: at most {MAX_KEYS}")
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise MalformedBody(f"duplicate key {key!r:.80}")
            seen.add(key)
    return values


def refuse_constant(name: str) -> NoReturn:
    raise MalformedBody(f"{name} is not JSON")


ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
DECODER: Final = json.JSONDecoder(object_pairs_hook=unique, parse_constant=refuse_constant)


def dump_json(document: Any) -> str:
    """Compact ASCII JSON; escapes keep whatever a client sent printable."""
    return ENCODER.encode(document)


def load_json(text: bytes, what: str) -> Any:
    """JSON in UTF-8, without duplicate keys and NaN; `MalformedBody` otherwise."""
    check_counts(text, what)
    try:
        return DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise not_json(what, error) from error


def not_json(what: str, error: Exception) -> MalformedBody:
    """The error for text that a decoder of JSON rejects."""
    match error:
        case UnicodeDecodeError():
            return MalformedBody(f"{what} is not UTF-8")
        case RecursionError():
            return MalformedBody(f"{what} is nested too deep")
        case json.JSONDecodeError():
            return MalformedBody(f"{what} is not JSON: {error}")
    # the other ValueError is of an integer that Python does not convert
    return MalformedBody(f"{what} is not JSON: an integer is too long")


T = TypeVar("T")
Pieces = Generator[None, None, T]
"""Yields between pieces of work and returns the result."""

OBJECT_BYTES: Final = 640
VALUE_BYTES: Final = 128
"""Memory of an object and of a value of a request's JSON, once it is read."""
SHORT_VALUES: Final = 8192
SHORT_OBJECTS: Final = 1024
"""Text with fewer commas and braces is read at once."""
WINDOW: Final = 2**14
"""Characters of a list that are read at once."""
ITEMS: Final = 256
"""Items of a list of objects between two yields."""
FLAT_CHARS: Final = 4096
SPACE: Final = re.compile(r"[ \t\n\r]*")
FLAT: Final = re.compile(r'\{(?:[^{}\[\]"]|"[^"\\]*")*+\}')
"""An object without lists, objects and escapes in it."""


def finish(pieces: Pieces[T]) -> T:
    """All of the work at once."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def is_short(text: bytes) -> bool:
    """Whether text may be read at once."""
    return text.count(b",") <= SHORT_VALUES and text.count(b"{") <= SHORT_OBJECTS


def weight_of(header: bytes) -> int:
    """Approximate memory of a request that was read, in bytes; an escape may stand for a brace."""
    objects = header.count(b"{") + header.count(b"\\u")
    return OBJECT_BYTES * objects + VALUE_BYTES * header.count(b",") + len(header)


def loading(text: bytes, what: str) -> Pieces[Any]:
    """As `load_json`, in pieces."""
    if is_short(text):
        return load_json(text, what)
    check_counts(text, what)
    try:
        string = text.decode("utf-8")
        value, end = yield from value_at(string, skip(string, 0))
        end = skip(string, end)
        if end != len(string):
            raise JSONDecodeError("Extra data", string, end)
    except (ValueError, RecursionError) as error:
        raise not_json(what, error) from error
    return value


def skip(text: str, at: int) -> int:
    """The first character that is no white space."""
    found = SPACE.match(text, at)
    return at if found is None else found.end()


def value_at(text: str, at: int) -> Pieces[tuple[Any, int]]:
    """The value that begins there, and where it ends."""
    first = text[at : at + 1]
    if first == "{":
        flat = FLAT.match(text, at, at + FLAT_CHARS)
        if flat is not None:
            return DECODER.raw_decode(text, at)
        return (yield from object_at(text, at))
    if first == "[":
        return (yield from list_at(text, at))
    return DECODER.raw_decode(text, at)


def object_at(text: str, at: int) -> Pieces[tuple[dict[str, Any], int]]:
    """An object, its values in pieces."""
    pairs: list[tuple[str, Any]] = []
    at = skip(text, at + 1)
    if text[at : at + 1] == "}":
        return {}, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        key, at = scanstring(text, at + 1, True)
        at = skip(text, at)
        if text[at : at + 1] != ":":
            raise JSONDecodeError("Expecting ':' delimiter", text, at)
        value, at = yield from value_at(text, skip(text, at + 1))
        pairs.append((key, value))
        if len(pairs) > MAX_KEYS:
            raise MalformedBody(f"an object has more than {MAX_KEYS} keys")
        at = skip(text, at)
        if text[at : at + 1] == "}":
            return unique(pairs), at + 1
        if text[at : at + 1] != ",":
            raise JSONDecodeError("Expecting ',' delimiter", text, at)
        at = skip(text, at + 1)


def list_at(text: str, at: int) -> Pieces[tuple[list[Any], int]]:
    """A list: in windows where no list is in it, else item by item."""
    end = text.find("]", at)
    begin = skip(text, at + 1)
    if begin == end:
        return [], end + 1
    values: list[Any] = []
    if end > 0 and text.find("[", at + 1, end) < 0:
        begin = yield from windows(text, begin, end, values)
        if begin > end:
            return values, end + 1
    return (yield from items_at(text, begin, values))


def windows(text: str, begin: int, end: int, values: list[Any]) -> Pieces[int]:
    """Add the values up to `end`, in windows that end between two of them; where the next value
    begins, after `end` when there is none.

    A window that ends within a value is no list of values, and so is left to `items_at`, which
    takes all that may come.
    """
    mark = "}," if text.find("{", begin, end) >= 0 else ","
    while begin <= end:
        stop = end
        if end - begin > WINDOW:
            stop = text.rfind(mark, begin, begin + WINDOW) + len(mark) - 1
            if stop < begin:
                return begin
        try:
            some = DECODER.decode(f"[{text[begin:stop]}]")
        except JSONDecodeError:
            return begin
        if not some:
            return begin
        values += some
        begin = stop + 1
        yield
    return begin


def items_at(text: str, at: int, values: list[Any]) -> Pieces[tuple[list[Any], int]]:
    while True:
        value, at = yield from value_at(text, skip(text, at))
        values.append(value)
        if not len(values) % ITEMS:
            yield
        at = skip(text, at)
        if text[at : at + 1] == "]":
            return values, at + 1
        if text[at : at + 1] != ",":
            raise JSONDecodeError("Expecting ',' delimiter", text, at)
        at += 1
