"""Requests over HTTP: a JSON object, and binary tensor data behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from attnd.wire.dtypes import DTYPE_NAMES, Array, DType

from service.doors.oip.models import Model
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
from service.image.json_body import MARK
from service.image.json_tensors import convert_data, cut_data, read_data
from service.image.json_text import check_counts, load_json
from service.image.reading import MAX_RANK, MAX_TENSORS, MAX_VALUES

BINARY_SIZE: Final = "binary_data_size"
BINARY: Final = "binary_data"
BINARY_OUTPUT: Final = "binary_data_output"
MAX_CACHED_BYTES: Final = 4096
"""Longest JSON of a cached request."""
MAX_CACHED: Final = 256
TOP_KEYS: Final = frozenset({"id", "parameters", "inputs", "outputs"})
INPUT_KEYS: Final = frozenset({"name", "shape", "datatype", "parameters", "data"})
INPUT_PARAMETERS: Final = REGION_PARAMETERS | {BINARY_SIZE}
OUTPUT_KEYS: Final = frozenset({"name", "parameters"})
Kind = TypeVar("Kind", bool, str, dict[str, Any])
KINDS: Final = {bool: "true or false", str: "a string", dict: "an object"}
OUTPUT_PARAMETERS: Final = REGION_PARAMETERS | {BINARY}


def read_request(model: Model, text: bytes, data: memoryview) -> Call:
    """Read a request's JSON text, and the binary data behind it, which the call refers to.

    Raises MalformedBody, InvalidRequest, NotSupported.
    """
    check_counts(text, "the body")
    text, lists = cut_data(text, MARK)
    if (count := text.count(b",")) > MAX_VALUES:
        raise MalformedBody(
            f"the request has {count} values beside the tensors' data: at most {MAX_VALUES}"
        )
    document = load_json(text, "the request")
    if not isinstance(document, dict):
        raise MalformedBody("the request is not a JSON object")
    refuse_keys("", document, TOP_KEYS)
    parameters = dict(expect("parameters", document.get("parameters", {}), dict))
    wanted = read_wanted(document, parameters)
    given = read_list("inputs", document.get("inputs", []))
    inputs = read_inputs(model, given, lists, data)
    return make_call(model, parameters, inputs, wanted)


class Requests:
    """Reads requests, and caches those whose JSON determines them: a step's JSON repeats that of
    the step before."""

    def __init__(self) -> None:
        self.cached: dict[tuple[str, bytes, int], Call] = {}

    def read(self, model: Model, text: bytes, data: memoryview) -> Call:
        key = (model.name, text, len(data))
        call = self.cached.get(key)
        if call is None:
            call = read_request(model, text, data)
            if call.repeats and len(text) <= MAX_CACHED_BYTES:
                if len(self.cached) >= MAX_CACHED:
                    self.cached.clear()
                self.cached[key] = replace(call, tensors=())
        return call


def read_wanted(document: Mapping[str, Any], parameters: dict[str, Any]) -> Wanted:
    """The form of the response; removes the protocol's own parameters from `parameters`."""
    binary = expect(BINARY_OUTPUT, parameters.pop(BINARY_OUTPUT, False), bool)
    deadline_us = read_timeout(parameters.pop(TIMEOUT, 0))
    name = expect("id", document.get("id", ""), str)
    outputs = []
    for index, output in enumerate(read_list("outputs", document.get("outputs", []))):
        entry = expect(f"outputs.{index}", output, dict)
        refuse_keys(f"outputs.{index}.", entry, OUTPUT_KEYS)
        given = expect(f"outputs.{index}.parameters", entry.get("parameters", {}), dict)
        refuse_keys(f"outputs.{index}.parameters.", given, OUTPUT_PARAMETERS)
        refuse_regions(given)
        is_binary = expect(BINARY, given.get(BINARY, binary), bool)
        outputs.append((expect(f"outputs.{index}.name", entry.get("name"), str), is_binary))
    return Wanted(name, tuple(outputs), binary, deadline_us)


def read_inputs(
    model: Model, given: list[Any], lists: dict[str, bytes], data: memoryview
) -> list[Input]:
    """The inputs; their binary data has the same order, without gaps."""
    inputs = []
    at = 0
    for index, one in enumerate(given):
        entry = expect(f"inputs.{index}", one, dict)
        refuse_keys(f"inputs.{index}.", entry, INPUT_KEYS)
        name = expect(f"inputs.{index}.name", entry.get("name"), str)
        shape: Any = entry.get("shape")
        dtype, needed = check_input(model, name, entry.get("datatype", ""), shape)
        parameters = expect(f"{name}.parameters", entry.get("parameters", {}), dict)
        refuse_keys(f"{name}.parameters.", parameters, INPUT_PARAMETERS)
        refuse_regions(parameters)
        if BINARY_SIZE in parameters:
            size = read_binary_size(name, entry, parameters)
            check_size(name, size, needed)
            if at + size > len(data):
                text = f"ends at byte {at + size} of the binary data, which has {len(data)}"
                raise MalformedBody(f"input {name} {text}")
            inputs.append(Input(name, dtype, tuple(shape), data[at : at + size], at))
            at += size
        else:
            spelled = read_spelled(name, entry.get("data"), lists, dtype)
            check_size(name, len(spelled), needed)
            inputs.append(Input(name, dtype, tuple(shape), spelled))
    if at != len(data):
        raise MalformedBody(f"{len(data) - at} bytes after the last input's binary data")
    return inputs


def read_binary_size(name: str, entry: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    """The length of an input in the binary data. Raises InvalidRequest."""
    size = parameters[BINARY_SIZE]
    if type(size) is not int or "data" in entry:
        raise InvalidRequest(f"{name}.{BINARY_SIZE}", size, "must be a count, without data")
    return size


def read_spelled(name: str, data: object, lists: dict[str, bytes], dtype: DType) -> memoryview:
    """The bytes of an input whose numbers are JSON, flat or nested."""
    field = f"{name}.data"
    if isinstance(data, str) and data in lists:
        array: Array = read_data(field, lists[data], DTYPE_NAMES[dtype])
    elif isinstance(data, list):
        array = convert_data(field, flat(field, data), DTYPE_NAMES[dtype])
    else:
        raise InvalidRequest(field, data, "must be a list of numbers, or binary data")
    return array.reshape(-1).view(np.uint8).data


def flat(field: str, values: list[Any], depth: int = MAX_RANK) -> list[Any]:
    """The elements of nested lists, in order; the number of lists was checked in the text."""
    if not depth:
        raise InvalidRequest(field, values, f"must be nested {MAX_RANK} times at most")
    found: list[Any] = []
    for value in values:
        if isinstance(value, list):
            found.extend(flat(field, value, depth - 1))
        else:
            found.append(value)
    return found


def expect(field: str, value: object, kind: type[Kind]) -> Kind:
    """The value, of that kind. Raises InvalidRequest."""
    if not isinstance(value, kind):
        raise InvalidRequest(field, value, f"must be {KINDS[kind]}")
    return value


def read_list(field: str, value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_TENSORS:
        raise InvalidRequest(field, value, f"must be a list of at most {MAX_TENSORS} objects")
    return value
