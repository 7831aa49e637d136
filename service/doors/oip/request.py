"""A request of the protocol, of either door, as the image that the engine reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import DType, Part
from attnd.wire.images import Shaped, header

from service.doors.oip.models import DTYPES_BY_DATATYPE, NUMBERED, Model
from service.errors import InvalidRequest, NotSupported, unknown_name
from service.image.json_body import dump_fields
from service.image.json_text import Pieces, finish, loading
from service.image.reading import MAX_RANK, MAX_VALUES, REQUEST, are_counts, is_huge

TIMEOUT: Final = "timeout"
"""The request parameter with a client's deadline, in microseconds."""
MAX_TEXT: Final = 4096
"""Characters of a field that is a string: more than any rule for one allows."""
MAX_TIMEOUT_US: Final = 3_600_000_000
REGION_PARAMETERS: Final = frozenset(
    {"shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"}
)
"""Parameters of a tensor in shared memory, which is not supported."""
NO_REGIONS: Final = (
    "shared memory regions are not supported: send tensors as binary data, or use a Session"
)


@dataclass(frozen=True, slots=True)
class Input:
    """One input: its bytes, row-major and little-endian; `offset` is where they begin in the binary
    data, None for numbers in JSON."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: Part
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The form of the response: the names of `outputs` with whether each is binary; none for all,
    whose form is `binary`."""

    id: str = ""
    outputs: tuple[tuple[str, bool], ...] = ()
    binary: bool = True
    deadline_us: int = 0

    @property
    def has_text(self) -> bool:
        """Whether any tensor is written as JSON."""
        if self.outputs:
            return not all(is_binary for _, is_binary in self.outputs)
        return not self.binary


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was read: its image's header, and its tensors in order.

    `span`: first and last byte of the tensors in the binary data; None if there are gaps.
    `repeats`: the call depends on nothing but the request's JSON, and the length of that data.
    """

    head: bytes
    tensors: tuple[Input, ...]
    wanted: Wanted
    span: tuple[int, int] | None = None
    repeats: bool = False

    def pieces(self, data: Part = b"") -> list[Part]:
        """The image in parts; `data` is the request's binary data."""
        if self.span is not None:
            begin, end = self.span
            return [self.head, data[begin:end]]
        return [self.head, *(one.data for one in self.tensors)]


def make_call(
    model: Model, parameters: Mapping[str, Any], inputs: Sequence[Input], wanted: Wanted
) -> Call:
    """The call for a request's inputs and parameters, without the protocol's own parameters.

    Raises InvalidRequest, and MalformedBody for a parameter that is not JSON.
    """
    return finish(making_call(model, parameters, inputs, wanted))


def making_call(
    model: Model, parameters: Mapping[str, Any], inputs: Sequence[Input], wanted: Wanted
) -> Pieces[Call]:
    """As `make_call`, in pieces."""
    check_outputs(model, wanted.outputs)
    fields = {}
    texts = [value for value in parameters.values() if isinstance(value, str)]
    if (count := sum(text.count(",") for text in texts)) > MAX_VALUES:
        raise InvalidRequest(
            "parameters", f"{count} values", f"must be at most {MAX_VALUES} values together"
        )
    for name, value in parameters.items():
        fields[name] = yield from reading_value(model, name, value)
    tensors = []
    names: set[str] = set()
    for one in inputs:
        if one.name in names or one.name in fields:
            raise InvalidRequest(one.name, "given", "is given twice")
        names.add(one.name)
        if one.name in model.list_fields:
            fields[one.name] = np.frombuffer(one.data, one.dtype).tolist()
        else:
            tensors.append(one)
    shapes: tuple[Shaped, ...] = tuple((one.name, one.dtype, one.shape) for one in tensors)
    head = header(REQUEST, dump_fields(fields), shapes)
    span = span_of(tensors)
    return Call(
        head, tuple(tensors), wanted, span, span is not None and len(tensors) == len(inputs)
    )


def span_of(tensors: Sequence[Input]) -> tuple[int, int] | None:
    """First and last byte of tensors in the binary data; None for gaps, or numbers in JSON."""
    begin = end = 0
    for index, one in enumerate(tensors):
        if one.offset is None:
            return None
        if not index:
            begin = end = one.offset
        if one.offset != end:
            return None
        end += len(one.data)
    return begin, end


def reading_value(model: Model, name: str, value: Any) -> Pieces[Any]:
    """A request parameter as a field: a string is JSON, unless the field is a string."""
    if name not in model.fields:
        raise unknown_name(name, value, f"model {model.name}", "parameter", tuple(model.fields))
    if isinstance(value, str) and name in model.text_fields and len(value) > MAX_TEXT:
        rule = f"must have at most {MAX_TEXT} characters"
        raise InvalidRequest(name, f"{len(value)} characters", rule)
    if not isinstance(value, str) or name in model.text_fields:
        return value
    text = value.encode("utf-8", "surrogatepass")
    return (yield from loading(text, f"parameter {name}"))


def check_input(model: Model, name: str, datatype: str, shape: list[int]) -> tuple[DType, int]:
    """An input's dtype and the length of its bytes; raises InvalidRequest."""
    allowed = model.inputs.get(name)
    if allowed is None:
        owner = f"model {model.name}"
        raise unknown_name(f"inputs.{name}", "given", owner, "input", tuple(model.inputs))
    if datatype not in allowed:
        rule = f"must be {' or '.join(allowed)}"
        raise InvalidRequest(f"{name}.datatype", datatype, rule)
    if not are_counts(shape) or len(shape) > MAX_RANK or is_huge(shape):
        rule = f"must be a list of at most {MAX_RANK} counts"
        raise InvalidRequest(f"{name}.shape", shape, rule)
    if name in model.list_fields and len(shape) != 1:
        raise InvalidRequest(f"{name}.shape", shape, "must be flat: one dimension")
    if name in model.list_fields and shape[0] > MAX_VALUES:
        raise InvalidRequest(f"{name}.shape", shape, f"must be at most {MAX_VALUES} numbers")
    dtype = DTYPES_BY_DATATYPE[datatype]
    return dtype, math.prod(shape) * dtype.itemsize


def refuse_regions(parameters: Mapping[str, Any]) -> None:
    """Raises NotSupported for a tensor in shared memory."""
    if parameters.keys() & REGION_PARAMETERS:
        raise NotSupported(NO_REGIONS)


def check_size(name: str, size: int, needed: int) -> None:
    """Raises InvalidRequest unless an input has the bytes of its shape."""
    if size != needed:
        raise InvalidRequest(f"{name}.data", f"{size} bytes", f"its shape needs {needed}")


def check_outputs(model: Model, outputs: Iterable[tuple[str, bool]]) -> None:
    """Raises InvalidRequest for a requested output that the model lacks, or that is repeated."""
    seen: set[str] = set()
    for name, _ in outputs:
        if not any(is_named(name, spec.name) for spec in model.operation.gives):
            raise InvalidRequest("outputs", name, f"model {model.name} has no such output")
        if name in seen:
            raise InvalidRequest("outputs", name, "is requested twice")
        seen.add(name)


def is_named(name: str, spec: str) -> bool:
    """Whether `name` is the declared name `spec`, which may have a number."""
    stem, numbered, _ = spec.partition(NUMBERED)
    if not numbered:
        return name == spec
    digits = name.removeprefix(stem)
    return name.startswith(stem) and digits.isascii() and digits.isdigit()


def read_timeout(value: Any) -> int:
    """A deadline in microseconds; 0 for none. Raises InvalidRequest."""
    if type(value) is not int or not 0 <= value <= MAX_TIMEOUT_US:
        rule = f"must be microseconds, 0 (none) to {MAX_TIMEOUT_US}"
        raise InvalidRequest(TIMEOUT, value, rule)
    return value


def refuse_keys(prefix: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises InvalidRequest for an unknown key."""
    if extra := given.keys() - known:
        name = min(extra)
        raise InvalidRequest(f"{prefix}{name}", given[name], "is unknown: remove it")
