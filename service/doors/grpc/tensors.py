"""Reads inference requests in protobuf, and writes replies as protobuf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import DType, Part
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from service.doors.oip.answer import read_answer
from service.doors.oip.models import VERSION, Model
from service.doors.oip.request import (
    REGION_PARAMETERS,
    TIMEOUT,
    Call,
    Input,
    Wanted,
    check_input,
    check_size,
    making_call,
    read_timeout,
    refuse_keys,
    refuse_regions,
)
from service.errors import InvalidRequest, MalformedBody
from service.image.json_text import Pieces
from service.image.reading import MAX_RANK, MAX_TENSORS

DESCRIPTORS: Final = Path(__file__).with_name("open_inference.binpb")
POOL: Final = DescriptorPool()
for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
    POOL.Add(file)
SERVICE: Final = POOL.FindServiceByName("inference.GRPCInferenceService")


MAX_FIELDS: Final = 4096
"""Fields of a message and of the messages in it. The library takes a microsecond for each, and does
nothing else meanwhile: 16 megabytes of empty ones are half a minute."""
MAX_READ_BYTES: Final = 2 * 2**20
"""Bytes of a message beside those that the library copies as they are. It takes a second for a
hundred megabytes of integers or text."""
VARINT_BYTES: Final = 10
NUMBERS_AT_ONCE: Final = 32 * 2**10
"""Numbers of an input that are converted in one piece: a few milliseconds."""
Inner = dict[int, "Inner | None"]
"""The messages in a message, by their fields' numbers; None for a field that is copied as it is."""
PARAMETERS: Final[Inner] = {2: {}}
CONTENTS_OF_FLOATS: Final[Inner] = {6: None, 7: None}
INNER: Final[dict[str, Inner]] = {
    "ModelInferRequest": {
        4: PARAMETERS,
        5: {4: PARAMETERS, 5: CONTENTS_OF_FLOATS},  # an input, its parameters and contents
        6: {2: PARAMETERS},  # a requested output
        7: None,  # raw_input_contents
    }
}


class Scan:
    """A look at a message before the library reads it."""

    def __init__(self, data: bytes, inner: Inner) -> None:
        self.data = data
        self.num_fields = 0
        self.copied = 0
        """Bytes that the library copies as they are."""
        with suppress(IndexError):  # the message ends in a field: the library says so
            self.look(0, len(data), inner)

    def look(self, at: int, end: int, inner: Inner) -> None:
        """Look at the fields in `data[at:end]`. Raises MalformedBody beyond `MAX_FIELDS`, and
        IndexError where the data ends in a field."""
        data = self.data
        while at < end:
            self.num_fields += 1
            if self.num_fields > MAX_FIELDS:
                rule = "send numbers packed, or in raw_input_contents"
                raise MalformedBody(f"the message has more than {MAX_FIELDS} fields: {rule}")
            tag, at = varint(data, at)
            match tag & 7:
                case 0:
                    _, at = varint(data, at)
                case 1:
                    at += 8
                case 2:
                    size, at = varint(data, at)
                    after, number = min(at + size, end), tag >> 3
                    if number in inner:
                        if (deeper := inner[number]) is None:
                            self.copied += after - at
                        else:
                            self.look(at, after, deeper)
                    at += size
                case 5:
                    at += 4
                case _:
                    raise MalformedBody("the message has a group, which no method takes")


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and the first byte after it."""
    value = 0
    for shift in range(VARINT_BYTES):
        byte = data[at + shift]
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise MalformedBody(f"the message has a number of more than {VARINT_BYTES} bytes")


def message(name: str) -> Any:
    return GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


def decoder(name: str) -> Callable[[bytes], Any]:
    """A function that reads a message of that name, and raises MalformedBody."""
    read, inner = message(name).FromString, INNER.get(name, {})

    def decode(data: bytes) -> Any:
        if len(data) > 2 * MAX_FIELDS:  # every field has two bytes
            scan = Scan(data, inner)
            if (left := len(data) - scan.copied) > MAX_READ_BYTES:
                rule = f"at most {MAX_READ_BYTES}: send tensors in raw_input_contents"
                raise MalformedBody(f"the message has {left} bytes beside raw tensors, {rule}")
        try:
            return read(data)
        except DecodeError as error:
            raise MalformedBody(f"not a message {name}: {error}") from None

    return decode


ModelInferResponse: Final = message("ModelInferResponse")
ModelStreamInferResponse: Final = message("ModelStreamInferResponse")
read_infer_request: Final = decoder("ModelInferRequest")


CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""The field with an input's numbers, by datatype; others come as raw bytes only."""


def reading_request(model: Model, request: Any) -> Pieces[Call]:
    """A request as a call, read in pieces. Raises InvalidRequest, MalformedBody, NotSupported."""
    parameters = read_parameters(request.parameters)
    deadline_us = read_timeout(parameters.pop(TIMEOUT, 0))
    outputs = tuple((output.name, True) for output in request.outputs)
    for output in request.outputs:
        check_parameters(output)
    wanted = Wanted(request.id, outputs, deadline_us=deadline_us)
    inputs = yield from reading_inputs(model, request)
    return (yield from making_call(model, parameters, inputs, wanted))


def check_parameters(tensor: Any) -> None:
    """An input or a requested output has no parameters. Raises InvalidRequest, NotSupported."""
    parameters = read_parameters(tensor.parameters)
    refuse_keys(f"{tensor.name}.parameters.", parameters, REGION_PARAMETERS)
    refuse_regions(parameters)


def read_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(name, None, "must be a bool, a number or a string")
        found[name] = getattr(value, kind)
    return found


def reading_inputs(model: Model, request: Any) -> Pieces[list[Input]]:
    """The inputs; all come as raw bytes, or all as numbers."""
    if len(request.inputs) > MAX_TENSORS:
        raise InvalidRequest("inputs", len(request.inputs), f"at most {MAX_TENSORS} tensors")
    sent = len(request.inputs)
    is_raw = len(request.raw_input_contents) > 0
    if is_raw and len(request.raw_input_contents) != sent:
        rule = f"must be one for each of {sent} inputs, or none"
        count = f"{len(request.raw_input_contents)} entries"
        raise InvalidRequest("raw_input_contents", count, rule)
    raw = iter(request.raw_input_contents)
    inputs = []
    for given in request.inputs:
        check_parameters(given)
        shape = given.shape[: MAX_RANK + 1]
        dtype, needed = check_input(model, given.name, given.datatype, shape)
        if is_raw and given.HasField("contents"):
            rule = "must be given once: in contents or in raw_input_contents"
            raise InvalidRequest(f"{given.name}.contents", "given", rule)
        data = next(raw) if is_raw else (yield from reading_contents(given, dtype, needed))
        check_size(given.name, len(data), needed)
        inputs.append(Input(given.name, dtype, tuple(shape), data))
    return inputs


def reading_contents(given: Any, dtype: DType, needed: int) -> Pieces[Part]:
    """The bytes of an input that comes as numbers, which have `needed` bytes."""
    field = CONTENTS.get(given.datatype)
    if field is None:
        rule = f"{given.datatype} has no field for numbers: send raw_input_contents"
        raise InvalidRequest(f"{given.name}.contents", "given", rule)
    values = getattr(given.contents, field)
    check_size(given.name, len(values) * dtype.itemsize, needed)
    array: Any = np.empty(len(values), dtype)
    try:
        for begin in range(0, len(values), NUMBERS_AT_ONCE):
            if begin:
                yield
            end = begin + NUMBERS_AT_ONCE
            array[begin:end] = values[begin:end]
    except OverflowError:
        rule = f"must be within the range of {given.datatype}"
        raise InvalidRequest(f"{given.name}.contents", field, rule) from None
    part: Part = array.view(np.uint8).data
    return part


def write_answer(model: Model, image: memoryview, wanted: Wanted) -> Any:
    """The response with copies of the tensors' bytes."""
    answer = read_answer(image, wanted)
    response = ModelInferResponse(model_name=model.name, model_version=VERSION, id=wanted.id)
    for name, value in answer.parameters.items():
        put_parameter(response.parameters[name], value)
    for output in answer.outputs:
        entry = output.entry
        response.outputs.add(name=entry.name, datatype=output.datatype, shape=entry.shape)
        response.raw_output_contents.append(bytes(answer.data(image, output)))
    return response


def put_parameter(into: Any, value: str | int | float | bool) -> None:
    match value:
        case bool():
            into.bool_param = value
        case int():
            into.int64_param = value
        case float():
            into.double_param = value
        case str():
            into.string_param = value
