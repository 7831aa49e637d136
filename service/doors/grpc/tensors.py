"""Reads inference requests in protobuf, and writes replies as protobuf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    make_call,
    read_timeout,
    refuse_keys,
    refuse_regions,
)
from service.errors import InvalidRequest, MalformedBody
from service.image.reading import MAX_TENSORS

DESCRIPTORS: Final = Path(__file__).with_name("open_inference.binpb")
POOL: Final = DescriptorPool()
for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
    POOL.Add(file)
SERVICE: Final = POOL.FindServiceByName("inference.GRPCInferenceService")


def message(name: str) -> Any:
    return GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


def decoder(name: str) -> Callable[[bytes], Any]:
    """A function that reads a message of that name, and raises MalformedBody."""
    read = message(name).FromString

    def decode(data: bytes) -> Any:
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


def read_request(model: Model, request: Any) -> Call:
    """A request as a call. Raises InvalidRequest, MalformedBody, NotSupported."""
    parameters = read_parameters(request.parameters)
    deadline_us = read_timeout(parameters.pop(TIMEOUT, 0))
    outputs = tuple((output.name, True) for output in request.outputs)
    for output in request.outputs:
        check_parameters(output)
    wanted = Wanted(request.id, outputs, deadline_us=deadline_us)
    return make_call(model, parameters, read_inputs(model, request), wanted)


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


def read_inputs(model: Model, request: Any) -> list[Input]:
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
        shape = tuple(given.shape)
        dtype, needed = check_input(model, given.name, given.datatype, list(shape))
        if is_raw and given.HasField("contents"):
            rule = "must be given once: in contents or in raw_input_contents"
            raise InvalidRequest(f"{given.name}.contents", "given", rule)
        data = next(raw) if is_raw else read_contents(given, dtype)
        check_size(given.name, len(data), needed)
        inputs.append(Input(given.name, dtype, shape, data))
    return inputs


def read_contents(given: Any, dtype: DType) -> Part:
    """The bytes of an input that comes as numbers."""
    field = CONTENTS.get(given.datatype)
    if field is None:
        rule = f"{given.datatype} has no field for numbers: send raw_input_contents"
        raise InvalidRequest(f"{given.name}.contents", "given", rule)
    try:
        array: Any = np.array(getattr(given.contents, field), dtype)
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
