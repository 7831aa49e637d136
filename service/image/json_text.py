"""JSON text: read strictly, refused early when it would take long, written compact and ASCII."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from service.errors import MalformedBody

MAX_LISTS: Final = 4096
"""Most are the token ids and further keys of the sequences of one create or commit, at most 1,024
of each."""
MAX_OBJECTS: Final = 8192
"""Most are the sequences of one create, with a prefix each, and their further keys."""
MAX_KEYS: Final = 128
"""In one object; the most are the tensors, at most 64."""


def check_counts(text: bytes, what: str) -> None:
    """Raises `MalformedBody` when more values would be made than any request has.

    Making each takes half a microsecond; counting brackets takes none. Brackets inside strings
    count too: no id, name or option has one.
    """
    for bracket, limit, kind in ((b"[", MAX_LISTS, "lists"), (b"{", MAX_OBJECTS, "objects")):
        if (count := text.count(bracket)) > limit:
            raise MalformedBody(
                f"{what} has {count} {kind}: at most {limit}: send fewer sequences in a call"
            )


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
    raise MalformedBody(f'{name} is not JSON: fields have finite numbers, data of tensors "{name}"')


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


OBJECT_BYTES: Final = 640
VALUE_BYTES: Final = 128
"""Memory of an object and of a value of a request's JSON, once it is read."""


def weight_of(header: bytes) -> int:
    """Approximate memory of a request that was read, in bytes; an escape may stand for a brace."""
    objects = header.count(b"{") + header.count(b"\\u")
    return OBJECT_BYTES * objects + VALUE_BYTES * header.count(b",") + len(header)
