"""Fields of a request's path, added to the header of the image in its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnd.wire.dtypes import Part

from service.errors import InvalidRequest, MalformedBody
from service.image.json_body import dump_fields
from service.image.json_pieces import Pieces, is_short, loading
from service.image.json_text import dump_json
from service.image.reading import MAX_VALUES, REQUEST, split


def placing_fields(whole: memoryview, given: Mapping[str, Any]) -> Pieces[list[Part]]:
    """A request's image with the fields `given` by its path, made in pieces; the tensors' bytes are
    not copied.

    Raises `MalformedBody`, and `InvalidRequest` for a field that is given twice. The rest is for
    the engine to check.
    """
    header, start = split(whole)
    if (count := header.count(b",")) > MAX_VALUES:
        raise MalformedBody(f"the safetensors header has {count} values: at most {MAX_VALUES}")
    document = yield from loading(header, "the safetensors header")
    if not isinstance(document, dict):
        raise MalformedBody("the safetensors header is not a JSON object")
    metadata = document.setdefault("__metadata__", {})
    if not isinstance(metadata, dict):
        raise MalformedBody("__metadata__ is not a JSON object")
    text = metadata.get(REQUEST, "{}")
    if not isinstance(text, str):
        raise MalformedBody(f"__metadata__.{REQUEST} is not a string in the safetensors header")
    data = text.encode("utf-8", "surrogatepass")
    fields = yield from loading(data, f"__metadata__.{REQUEST}")
    if not isinstance(fields, dict):
        raise MalformedBody(f"__metadata__.{REQUEST} is not a JSON object")
    if twice := given.keys() & fields.keys():
        name = min(twice)
        raise InvalidRequest(name, fields[name], "is given by the path: leave it out")
    metadata[REQUEST] = dump_fields({**fields, **given})
    if not is_short(data):
        yield
    laid = dump_json(document).encode()
    laid += b" " * (-len(laid) % 8)
    return [len(laid).to_bytes(8, "little") + laid, whole[start:]]
