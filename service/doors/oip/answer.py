"""An answer's image as the protocol's parameters and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.doors.oip.datatypes import DATATYPES
from service.doors.oip.request import Wanted
from service.errors import InvalidRequest
from service.image.dtypes import DTYPE_NAMES
from service.image.json_body import fields_text, read_header
from service.image.json_text import dump_json, load_json
from service.image.reading import Entry, read_entry
from service.image.writing import RESPONSE


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of an answer; `data` lies in the image."""

    entry: Entry
    data: memoryview
    is_binary: bool

    @property
    def datatype(self) -> str:
        return DATATYPES[DTYPE_NAMES[self.entry.dtype]]


@dataclass(frozen=True, slots=True)
class Answer:
    """Fields as parameters, and the outputs that were asked for."""

    parameters: Mapping[str, str | int | float | bool]
    outputs: tuple[Output, ...]


def read_answer(image: memoryview, wanted: Wanted) -> Answer:
    """What an image of the engine says; raises InvalidRequest for an output that did not come."""
    if not len(image):
        return Answer({}, ())
    document, start = read_header(image)
    fields: dict[str, Any] = load_json(fields_text(document, RESPONSE).encode(), "the answer")
    document.pop("__metadata__", None)
    room = len(image) - start
    found = {name: read_entry(name, entry, room) for name, entry in document.items()}
    outputs = []
    for name, is_binary in wanted.outputs or [(name, wanted.binary) for name in found]:
        if name not in found:
            rule = "this request has no such output: see the model's parameters"
            raise InvalidRequest("outputs", name, rule)
        entry, end = found[name]
        outputs.append(Output(entry, image[start + entry.begin : start + end], is_binary))
    told = {name: parameter(value) for name, value in fields.items() if value is not None}
    return Answer(told, tuple(outputs))


def parameter(value: Any) -> str | int | float | bool:
    """A field as the protocol's parameters can have it: lists and objects as JSON."""
    return value if isinstance(value, (str, int, float)) else dump_json(value)
