"""JSON bodies: a request becomes an image, an answer's image becomes one JSON document."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, Final

from attnd.wire.bounds import MAX_HEADER_BYTES, MAX_JSON_VALUES, MAX_VALUES
from attnd.wire.dtypes import Array, Part
from attnd.wire.images import RESPONSE

from service.errors import InvalidRequest, MalformedBody
from service.image.json_tensors import cut_data, read_tensors, write_tensor
from service.image.json_text import check_counts, dump_json, load_json
from service.image.reading import (
    REQUEST,
    SPLIT,
    Layout,
    place,
    read_document,
    read_entry,
    read_fields,
    split,
)
from service.image.writing import image

MAX_JSON_IMAGE_BYTES: Final = 256 * 2**10
"""Image of an answer with tensors that is sent as JSON: 65,536 F32 take some 6 ms to write."""
MARK: Final = secrets.token_hex(8)
"""Placeholder of a list of numbers that was cut out of a body."""


def image_of_json(body: bytes, given: Mapping[str, Any]) -> list[Part]:
    """A JSON request as an image; with the values `given` by path and query added to its fields.

    A request without a body is `b"{}"`. Raises `MalformedBody`, and `InvalidRequest` for a tensor
    that breaks a rule and for a field that is given twice.
    """
    if (count := body.count(b",")) > MAX_JSON_VALUES:
        remedy = "send safetensors, or less in a call"
        raise MalformedBody(f"the body has {count} values: at most {MAX_JSON_VALUES}: {remedy}")
    check_counts(body, "the body")
    text, data = cut_data(body, MARK)
    if (count := text.count(b",")) > MAX_VALUES:
        raise MalformedBody(f"the fields have {count} values: at most {MAX_VALUES}: {SPLIT}")
    fields = load_json(text, "the body")
    if not isinstance(fields, dict):
        raise MalformedBody("the body is not a JSON object")
    if twice := given.keys() & fields.keys():
        name = min(twice)
        raise InvalidRequest(name, fields[name], "is given by the path or query: leave it out")
    tensors = read_tensors(fields.pop("tensors", {}), data)
    parts = image(REQUEST, dump_fields({**fields, **given}), tensors)
    if (length := len(parts[0]) - 8) > MAX_HEADER_BYTES:
        raise MalformedBody(f"the fields are {length} bytes: at most {MAX_HEADER_BYTES}: {SPLIT}")
    return parts


def dump_fields(fields: Mapping[str, Any]) -> str:
    """The fields as JSON; `InvalidRequest` naming one with a number beyond float64, as 1e400."""
    try:
        return dump_json(fields)
    except ValueError:
        for name, value in fields.items():
            if not is_finite(value):
                raise InvalidRequest(name, value, "numbers must be finite") from None
        raise


def is_finite(value: object) -> bool:
    try:
        dump_json(value)
    except ValueError:
        return False
    return True


def json_of_image(whole: bytes | memoryview) -> bytes:
    """An answer's image as JSON: its fields, with `tensors` beside them when there are any."""
    document, start = read_header(whole)
    text = fields_text(document, RESPONSE)
    tensors = own_tensors(document, whole, start)
    if not tensors:
        return text.encode()
    written = b",".join(write_tensor(name, array) for name, array in tensors.items())
    return b"".join((text[:-1].encode(), b"," * (len(text) > 2), b'"tensors":{', written, b"}}"))


def own_tensors(document: Mapping[str, Any], whole: Part, start: int) -> dict[str, Array]:
    """The tensors of an image that the service wrote, with this header."""
    room = len(whole) - start
    entries = (
        read_entry(name, entry, room)[0]
        for name, entry in document.items()
        if name != "__metadata__"
    )
    return place(whole, start, Layout({}, tuple(entries)))


def fields_text_of_image(whole: bytes | memoryview, key: str = RESPONSE) -> str:
    """The JSON text under `key`, `response` or `problem`, of an image that the service wrote."""
    return fields_text(read_header(whole)[0], key)


def read_header(whole: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """The header of an image that the service wrote, whatever its size; and the first data byte."""
    start = 8 + int.from_bytes(whole[:8], "little")
    document = json.loads(bytes(whole[8:start]))
    if not isinstance(document, dict):
        raise MalformedBody("the safetensors header is not a JSON object")
    return document, start


def fields_text(document: dict[str, Any], key: str) -> str:
    text = document.get("__metadata__", {}).get(key, "{}")
    if not isinstance(text, str):
        raise MalformedBody(f"__metadata__.{key} is not a string")
    return text


def with_fields(whole: memoryview, given: Mapping[str, Any]) -> list[Part]:
    """A request's image with the fields `given` by its path; the tensors' bytes are not copied.

    Raises `MalformedBody`, and `InvalidRequest` for a field that is given twice. The rest is for
    the engine to check.
    """
    header, start = split(whole)
    document = read_document(header)
    metadata = document.setdefault("__metadata__", {})
    fields = read_fields(metadata, REQUEST)
    if twice := given.keys() & fields.keys():
        name = min(twice)
        raise InvalidRequest(name, fields[name], "is given by the path: leave it out")
    metadata[REQUEST] = dump_fields({**fields, **given})
    laid = dump_json(document).encode()
    laid += b" " * (-len(laid) % 8)
    return [len(laid).to_bytes(8, "little") + laid, whole[start:]]


def read_image(whole: bytes | memoryview, key: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields under `key`, and the tensors, of an image that the service wrote."""
    document, start = read_header(whole)
    return json.loads(fields_text(document, key)), own_tensors(document, whole, start)
