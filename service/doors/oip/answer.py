"""A reply's image as the protocol's parameters and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from attnd.wire.dtypes import DTYPE_NAMES
from attnd.wire.images import Entry

from service.doors.oip.datatypes import DATATYPES
from service.doors.oip.request import Wanted
from service.errors import InvalidRequest
from service.image.json_body import fields_text
from service.image.json_text import dump_json, load_json
from service.image.reading import read_entry
from service.image.writing import RESPONSE

MAX_CACHED_BYTES: Final = 2048
"""Longest cached header: steps repeat theirs."""


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of an answer, from `entry.begin` to `end` in the image's data."""

    entry: Entry
    end: int
    is_binary: bool

    @property
    def datatype(self) -> str:
        return DATATYPES[DTYPE_NAMES[self.entry.dtype]]

    @property
    def size(self) -> int:
        return self.end - self.entry.begin


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Fields as parameters, and the requested outputs; `start` is the begin of the image's data."""

    parameters: Mapping[str, str | int | float | bool]
    outputs: tuple[Output, ...]
    start: int

    def data(self, image: memoryview, output: Output) -> memoryview:
        """An output's bytes in the image."""
        return image[self.start + output.entry.begin : self.start + output.end]


EMPTY: Final = Answer({}, (), 0)


def read_answer(image: memoryview, wanted: Wanted) -> Answer:
    """Read an image of the engine. Raises InvalidRequest for an output that it lacks."""
    if not len(image):
        return EMPTY
    start = 8 + int.from_bytes(image[:8], "little")
    read = read_header if start <= MAX_CACHED_BYTES else read_header.__wrapped__
    return read(bytes(image[8:start]), len(image) - start, wanted)


@lru_cache(maxsize=256)
def read_header(header: bytes, room: int, wanted: Wanted) -> Answer:
    """As `read_answer`, from the image's header; `room` bytes of data follow it."""
    document: dict[str, Any] = load_json(header, "the answer's header")
    fields: dict[str, Any] = load_json(fields_text(document, RESPONSE).encode(), "the answer")
    document.pop("__metadata__", None)
    found = {name: read_entry(name, entry, room) for name, entry in document.items()}
    outputs = []
    for name, is_binary in wanted.outputs or [(name, wanted.binary) for name in found]:
        if name not in found:
            rule = "this request has no such output: see the model's parameters"
            raise InvalidRequest("outputs", name, rule)
        entry, end = found[name]
        outputs.append(Output(entry, end, is_binary))
    parameters = {name: parameter(value) for name, value in fields.items() if value is not None}
    return Answer(parameters, tuple(outputs), 8 + len(header))


def parameter(value: Any) -> str | int | float | bool:
    """A field as a parameter: lists and objects as JSON text."""
    return value if isinstance(value, (str, int, float)) else dump_json(value)
