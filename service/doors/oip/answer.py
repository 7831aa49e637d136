"""A reply's image as the protocol's parameters and outputs; over HTTP, JSON and binary data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import DTYPE_NAMES, Part
from attnd.wire.images import RESPONSE, Entry

from service.doors.oip.json_request import BINARY_SIZE, read_request
from service.doors.oip.models import DATATYPES, VERSION, model_of
from service.doors.oip.request import Wanted
from service.errors import InvalidRequest
from service.image.json_body import fields_text
from service.image.json_tensors import write_data
from service.image.json_text import dump_json, load_json
from service.image.reading import read_entry

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


def answer_parts(name: str, image: memoryview, wanted: Wanted) -> tuple[list[Part], int]:
    """The body of a response, as parts to send in order; and the length of its JSON; 0 for a body
    of JSON only. Binary data is sent from the image, without a copy."""
    answer = read_answer(image, wanted)
    data: list[Part] = [answer.data(image, one) for one in answer.outputs if one.is_binary]
    if wanted.has_text:
        text = body_head(name, answer, wanted, image)
    elif answer.start <= MAX_CACHED_BYTES:
        text = binary_head(name, answer, wanted)
    else:
        text = binary_head.__wrapped__(name, answer, wanted)
    return [text, *data], len(text) if data else 0


@lru_cache(maxsize=256)
def binary_head(name: str, answer: Answer, wanted: Wanted) -> bytes:
    """As `body_head`, cached, for a response whose outputs are all binary."""
    return body_head(name, answer, wanted, memoryview(b""))


def body_head(name: str, answer: Answer, wanted: Wanted, image: memoryview) -> bytes:
    head: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if wanted.id:
        head["id"] = wanted.id
    if answer.parameters:
        head["parameters"] = answer.parameters
    outputs = [b"".join(spell(answer, output, image)) for output in answer.outputs]
    return b"".join((dump_json(head)[:-1].encode(), b',"outputs":[', b",".join(outputs), b"]}"))


def spell(answer: Answer, output: Output, image: memoryview) -> Iterator[bytes]:
    entry = output.entry
    head = {"name": entry.name, "datatype": output.datatype, "shape": entry.shape}
    if output.is_binary:
        yield dump_json({**head, "parameters": {BINARY_SIZE: output.size}}).encode()
        return
    yield dump_json(head)[:-1].encode() + b',"data":['
    yield from write_data(np.frombuffer(answer.data(image, output), entry.dtype))
    yield b"]}"


def image_of_request(
    body: memoryview, given: Mapping[str, Any]
) -> tuple[list[Part], dict[str, Any]]:
    """The image of a request whose JSON is `body[begin:end]`, and the form of its response."""
    begin, end = given["begin"], given["end"]
    call = read_request(model_of(given["model"]), bytes(body[begin:end]), body[end:])
    return call.pieces(body[end:]), asdict(call.wanted)


def answer_of_image(
    image: memoryview, given: Mapping[str, Any]
) -> tuple[list[Part], dict[str, Any]]:
    """The response, and the length of its JSON."""
    parts, json_bytes = answer_parts(given["model"], image, wanted_of(given["wanted"]))
    return parts, {"json_bytes": json_bytes}


def wanted_of(fields: Mapping[str, Any]) -> Wanted:
    """The inverse of `asdict`."""
    return Wanted(**{**fields, "outputs": tuple((name, flag) for name, flag in fields["outputs"])})
