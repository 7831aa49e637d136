"""Requests of the protocol as calls, and replies as its outputs and parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from attnd.wire.dtypes import DTYPE_NAMES, Array
from pydantic import BaseModel, ConfigDict, Field

from service.errors import InvalidRequest, MalformedBody, NotSupported
from service.gateway.models import DTYPES_BY_DATATYPE, NUMBERED, Model, datatype_of
from service.image.json_tensors import convert_data
from service.image.json_text import dump_json, load_json
from service.image.reading import MAX_RANK, MAX_TENSORS, is_huge
from service.operations.schema.spec import validate

MAX_VALUES: Final = 2**16
"""Values of a request's JSON, and numbers that are spelled out in a reply."""
NO_REGIONS: Final = (
    "shared memory regions are not supported: send tensors as binary data, or use a Session"
)


class OipObject(BaseModel):
    """An object of a request, in the protocol's words."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TensorParameters(OipObject):
    binary_data_size: Annotated[int, Field(ge=0)] | None = None
    binary_data: bool | None = None
    content_type: Any = None
    """By this MLServer decodes a tensor: its clients send it."""
    shared_memory_region: Any = None
    shared_memory_byte_size: Any = None
    shared_memory_offset: Any = None


class RequestedOutput(OipObject):
    name: str
    parameters: TensorParameters = TensorParameters()


class Input(RequestedOutput):
    datatype: str
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(max_length=MAX_RANK)]
    data: Any = None
    """Its numbers, or its bytes, row-major and little-endian."""


class RequestBody(OipObject):
    id: str = ""
    model_name: str | None = None
    model_version: str | None = None
    parameters: dict[str, Any] = {}
    inputs: Annotated[list[Input], Field(max_length=MAX_TENSORS)] = []
    outputs: Annotated[list[RequestedOutput], Field(max_length=MAX_TENSORS)] = []


class CallParameters(BaseModel):
    """The protocol's own parameters of a request; all others are the operation's fields."""

    model_config = ConfigDict(extra="allow", strict=True)
    binary_data_output: bool = False
    timeout: Annotated[int, Field(ge=0, le=3_600_000_000)] = 0
    """In microseconds; 0 is none."""
    content_type: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Inference:
    """A request that was read. `outputs`: the requested ones, with whether each is binary; empty:
    all, as `binary` says."""

    model: Model
    fields: dict[str, Any]
    arrays: dict[str, Array]
    id: str
    outputs: dict[str, bool]
    binary: bool
    timeout_s: float | None

    def check_spelled(self, count: int) -> None:
        """Raises InvalidRequest where a reply of that many numbers would be spelled out."""
        if count > MAX_VALUES and not all(self.outputs.values() or (self.binary,)):
            rule = f"at most {MAX_VALUES} are spelled out: request binary_data_output"
            raise InvalidRequest("outputs", f"{count} numbers", rule)

    def outputs_of(self, tensors: Mapping[str, Array]) -> list[tuple[dict[str, Any], Array, bool]]:
        """Description, array, and whether binary, of each output. Raises InvalidRequest."""
        found = []
        for name, is_binary in (self.outputs or dict.fromkeys(tensors, self.binary)).items():
            if (array := tensors.get(name)) is None:
                rule = "this request has no such output: see the model's parameters"
                raise InvalidRequest("outputs", name, rule)
            datatype = datatype_of(DTYPE_NAMES[array.dtype])
            about = {"name": name, "datatype": datatype, "shape": array.shape}
            found.append((about, array, is_binary))
        self.check_spelled(sum(array.size for _, array, is_binary in found if not is_binary))
        return found


def parameters_of(fields: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """A reply's fields as parameters: lists and objects as JSON; null is left out."""
    return {
        name: value if isinstance(value, (str, int, float)) else dump_json(value)
        for name, value in fields.items()
        if value is not None
    }


def read_json(model: Model, text: bytes, data: memoryview) -> Inference:
    """A request's JSON, and the binary data behind it, to which arrays refer. Raises MalformedBody,
    InvalidRequest, NotSupported."""
    if (count := text.count(b",")) > MAX_VALUES:
        rule = f"at most {MAX_VALUES}: send tensors as binary data"
        raise MalformedBody(f"the JSON has {count} values: {rule}")
    document = load_json(text, "the request")
    if not isinstance(document, dict):
        raise MalformedBody("the request is not a JSON object")
    body, begin = validate(RequestBody, document), 0
    for one in body.inputs:
        if (size := one.parameters.binary_data_size) is not None:
            if one.data is not None:
                raise InvalidRequest(f"{one.name}.data", "given", "must be left out: it is binary")
            one.data = data[begin : begin + size]
            begin += size
    if begin != len(data):
        rule = f"the inputs' binary_data_size are {begin} together"
        raise MalformedBody(f"{len(data)} bytes follow the JSON, {rule}")
    return read_body(model, body)


def read_body(model: Model, body: RequestBody) -> Inference:
    """The call of a request; the service checks its fields and tensors. Raises MalformedBody,
    InvalidRequest, NotSupported."""
    if body.model_name not in (None, model.name):
        rule = f"the path names {model.name}: leave it out"
        raise InvalidRequest("model_name", body.model_name, rule)
    if any(one.parameters.shared_memory_region is not None for one in body.inputs + body.outputs):
        raise NotSupported(NO_REGIONS)
    parameters = validate(CallParameters, body.parameters)
    given = parameters.model_extra or {}
    count = sum(one.count(",") for one in given.values() if isinstance(one, str))
    if count > MAX_VALUES:
        rule = f"must be at most {MAX_VALUES} values together"
        raise InvalidRequest("parameters", f"{count} values", rule)
    fields = {
        name: load_json(value.encode("utf-8", "surrogatepass"), f"parameter {name}")
        if isinstance(value, str) and name in model.spelled
        else value
        for name, value in given.items()
    }
    arrays: dict[str, Array] = {}
    for one in body.inputs:
        if one.name in fields or one.name in arrays:
            raise InvalidRequest(one.name, "given", "is given twice")
        array = read_input(model, one)
        if one.name in model.lists:
            fields[one.name] = array.tolist()
        else:
            arrays[one.name] = array
    outputs: dict[str, bool] = {}
    for output in body.outputs:
        if output.name in outputs:
            raise InvalidRequest("outputs", output.name, "is requested twice")
        if not any(is_named(output.name, spec.name) for spec in model.operation.gives):
            rule = f"model {model.name} has no such output"
            raise InvalidRequest("outputs", output.name, rule)
        is_binary = output.parameters.binary_data
        outputs[output.name] = parameters.binary_data_output if is_binary is None else is_binary
    binary, timeout_s = parameters.binary_data_output, parameters.timeout * 1e-6 or None
    name = body.id.encode("utf-8", "replace").decode()
    read = Inference(model, fields, arrays, name, outputs, binary, timeout_s)
    if "q" in arrays:  # before anything changes
        levels = fields.get("levels") if fields.get("return_levels") else None
        read.check_spelled(arrays["q"].size * (1 + len(levels or ())))
    return read


def is_named(name: str, declared: str) -> bool:
    """Whether an output has its declared name, which may have a number."""
    pattern = re.escape(declared).replace(re.escape(NUMBERED), "[0-9]+")
    return re.fullmatch(pattern, name) is not None


def read_input(model: Model, given: Input) -> Array:
    """An input's array. Raises InvalidRequest."""
    name, shape, data = given.name, given.shape, given.data
    dtype = DTYPES_BY_DATATYPE.get(given.datatype)
    if dtype is None:
        rule = f"must be one of {', '.join(DTYPES_BY_DATATYPE)}"
        raise InvalidRequest(f"{name}.datatype", given.datatype, rule)
    if is_huge(shape):
        raise InvalidRequest(f"{name}.shape", shape, "is too large")
    if name in model.lists and (len(shape) != 1 or shape[0] > MAX_VALUES):
        rule = f"must be flat: one dimension, of at most {MAX_VALUES} numbers"
        raise InvalidRequest(f"{name}.shape", shape, rule)
    if isinstance(data, list):
        values = flat(f"{name}.data", data, MAX_RANK)
        data = convert_data(f"{name}.data", values, DTYPE_NAMES[dtype]).view(np.uint8).data
    elif not isinstance(data, (bytes, memoryview)):
        rule = "must be a list of numbers, or binary data (over gRPC raw_input_contents)"
        raise InvalidRequest(f"{name}.data", data, rule)
    if (needed := math.prod(shape) * dtype.itemsize) != len(data):
        raise InvalidRequest(f"{name}.data", f"{len(data)} bytes", f"its shape needs {needed}")
    return np.frombuffer(data, dtype).reshape(shape)


def flat(field: str, values: list[Any], depth: int) -> list[Any]:
    """The elements of nested lists, in order."""
    if not any(isinstance(value, list) for value in values):
        return values
    if not depth:
        raise InvalidRequest(field, "given", f"must be nested {MAX_RANK} times at most")
    nested = [flat(field, one, depth - 1) if isinstance(one, list) else [one] for one in values]
    return [value for some in nested for value in some]
