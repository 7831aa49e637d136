"""Inference requests in protobuf as calls, and answers' images as protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from service.doors.grpc.messages import ModelInferResponse
from service.doors.oip.answer import read_answer, region_parameters
from service.doors.oip.memory import ClientMemory
from service.doors.oip.models import VERSION, Model
from service.doors.oip.request import (
    REGION_PARAMETERS,
    TIMEOUT,
    Call,
    Input,
    InRegion,
    Wanted,
    check_input,
    check_size,
    make_call,
    read_place,
    read_timeout,
    refuse_keys,
)
from service.errors import InvalidRequest
from service.image.dtypes import DType, Part
from service.image.reading import MAX_TENSORS

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
"""Where an input's elements are when they are spelled out; other datatypes come as raw bytes."""


def read_request(model: Model, request: Any, memory: ClientMemory) -> Call:
    """A request as a call; `memory` is the caller's.

    Raises InvalidRequest, MalformedBody, and what `ClientMemory` does.
    """
    parameters = read_parameters(request.parameters)
    deadline_us = read_timeout(parameters.pop(TIMEOUT, 0))
    outputs = tuple((output.name, True) for output in request.outputs)
    places = [read_tensor_place(output) for output in request.outputs]
    found = tuple(place for place in places if place is not None)
    wanted = Wanted(request.id, outputs, deadline_us=deadline_us, places=found)
    return make_call(model, parameters, read_inputs(model, request, memory), wanted)


def read_tensor_place(tensor: Any) -> InRegion | None:
    """The region that an input or a requested output names, if any."""
    parameters = read_parameters(tensor.parameters)
    refuse_keys(f"{tensor.name}.parameters.", parameters, REGION_PARAMETERS)
    return read_place(tensor.name, parameters)


def read_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by their names."""
    found = {}
    for name, value in given.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(name, None, "must be a bool, a number or a string")
        found[name] = getattr(value, kind)
    return found


def read_inputs(model: Model, request: Any, memory: ClientMemory) -> list[Input]:
    """The inputs; the bytes of those that are in no region are all raw or all spelled out."""
    if len(request.inputs) > MAX_TENSORS:
        raise InvalidRequest("inputs", len(request.inputs), f"at most {MAX_TENSORS} tensors")
    places = [read_tensor_place(given) for given in request.inputs]
    sent = places.count(None)
    is_raw = len(request.raw_input_contents) > 0
    if is_raw and len(request.raw_input_contents) != sent:
        rule = f"must be one for each of {sent} inputs, or none"
        told = f"{len(request.raw_input_contents)} entries"
        raise InvalidRequest("raw_input_contents", told, rule)
    raw = iter(request.raw_input_contents)
    inputs = []
    for given, place in zip(request.inputs, places, strict=True):
        shape = tuple(given.shape)
        dtype, needed = check_input(model, given.name, given.datatype, list(shape))
        if (is_raw or place is not None) and given.HasField("contents"):
            rule = "must be given once: in contents, in raw_input_contents or in a region"
            raise InvalidRequest(f"{given.name}.contents", "given", rule)
        if place is not None:
            check_size(given.name, place.size, needed)
            inputs.append(memory.input(model, dtype, shape, place))
            continue
        data = next(raw) if is_raw else read_contents(given, dtype)
        check_size(given.name, len(data), needed)
        inputs.append(Input(given.name, dtype, shape, data))
    return inputs


def read_contents(given: Any, dtype: DType) -> Part:
    """The bytes of an input that is spelled out."""
    field = CONTENTS.get(given.datatype)
    if field is None:
        rule = f"{given.datatype} has no elements to spell out: send raw_input_contents"
        raise InvalidRequest(f"{given.name}.contents", "given", rule)
    try:
        array: Any = np.array(getattr(given.contents, field), dtype)
    except OverflowError:
        rule = f"must be within the range of {given.datatype}"
        raise InvalidRequest(f"{given.name}.contents", field, rule) from None
    part: Part = array.view(np.uint8).data
    return part


def write_answer(model: Model, image: memoryview, wanted: Wanted) -> Any:
    """The answer's message; the tensors' bytes are copied to it."""
    answer = read_answer(image, wanted)
    response = ModelInferResponse(model_name=model.name, model_version=VERSION, id=wanted.id)
    for name, value in answer.parameters.items():
        put_parameter(response.parameters[name], value)
    for output in answer.outputs:
        entry = output.entry
        told = response.outputs.add(name=entry.name, datatype=output.datatype, shape=entry.shape)
        for name, value in region_parameters(output).items():
            put_parameter(told.parameters[name], value)
        data = b"" if output.place is not None else bytes(answer.data(image, output))
        response.raw_output_contents.append(data)
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
