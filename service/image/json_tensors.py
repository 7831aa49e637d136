"""Tensors inside JSON bodies: `{"q": {"dtype": "F32", "shape": [2, 3], "data": [...]}}`.

`data` is flat, in row-major order. JSON has no infinities, and the log-sum-exp of an empty state
is one: `"Infinity"`, `"-Infinity"` and `"NaN"` represent them, in both directions.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import DTYPE_NAMES, DTYPES, Array
from pydantic_core import from_json, to_json

from service.errors import InvalidRequest, MalformedBody
from service.image.json_text import dump_json
from service.image.reading import MAX_RANK, MAX_TENSORS, are_counts, is_huge

SPELLED: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
DATA_KEY: Final = b'"data"'
BLANK: Final = b" \t\r\n"


def cut_data(body: bytes, mark: str) -> tuple[bytes, dict[str, bytes]]:
    """The body with every flat `"data": [...]` replaced by a string, and the lists' texts by it.

    The strings are `mark` with a number. Quotes inside JSON strings are escaped, so what looks like
    the key is the key. A list that nests others stays where it is.
    """
    pieces: list[bytes] = []
    cut: dict[str, bytes] = {}
    done = end = 0  # `end`: a bracket is looked for once, or many keys before it take seconds
    at = body.find(DATA_KEY)
    while at >= 0:
        at += len(DATA_KEY)
        head = body[at : at + 64].lstrip(BLANK)
        if head.startswith(b":") and head[1:].lstrip(BLANK).startswith(b"["):
            begin = body.index(b"[", at)
            if 0 <= end < begin:
                end = body.find(b"]", begin)
            if end >= 0 and body.find(b"[", begin + 1, end) < 0:
                name = f"{mark}{len(cut)}"
                cut[name] = body[begin + 1 : end]
                pieces += (body[done:begin], dump_json(name).encode())
                done = at = end + 1
        at = body.find(DATA_KEY, at)
    return b"".join([*pieces, body[done:]]), cut


def read_tensors(value: object, texts: dict[str, bytes]) -> dict[str, Array]:
    """The `tensors` object of a JSON body whose `data` was cut out; raises `InvalidRequest`."""
    if not isinstance(value, dict):
        raise InvalidRequest("tensors", value, "must be an object of named tensors")
    if len(value) > MAX_TENSORS:
        raise InvalidRequest("tensors", len(value), f"at most {MAX_TENSORS} tensors")
    return {name: read_tensor(f"tensors.{name}", entry, texts) for name, entry in value.items()}


def read_tensor(field: str, entry: object, texts: dict[str, bytes]) -> Array:
    rule = "must be an object of dtype, shape and data"
    if not isinstance(entry, dict):
        raise InvalidRequest(field, entry, rule)
    if entry.keys() != {"dtype", "shape", "data"}:
        raise InvalidRequest(field, sorted(entry), f"{rule}, and nothing else")
    name, shape, data = entry["dtype"], entry["shape"], entry["data"]
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidRequest(f"{field}.dtype", name, f"must be one of {', '.join(DTYPES)}")
    if not are_counts(shape) or len(shape) > MAX_RANK:
        raise InvalidRequest(
            f"{field}.shape", shape, f"must be a list of at most {MAX_RANK} counts"
        )
    if not isinstance(data, str) or data not in texts:
        raise InvalidRequest(f"{field}.data", data, "must be a flat list of numbers")
    if is_huge(shape):
        raise InvalidRequest(f"{field}.shape", shape, "is too large")
    values = read_data(f"{field}.data", texts[data], name)
    if values.size != math.prod(shape):
        rule = f"shape {shape} needs {math.prod(shape)}"
        raise InvalidRequest(f"{field}.data", f"{values.size} numbers", rule)
    return values.reshape(shape)


def read_data(field: str, text: bytes, name: str) -> Array:
    """The numbers of one list, by its text between the brackets."""
    if not text.strip(BLANK):
        return np.empty(0, DTYPES[name])
    return convert_data(field, read_list(field, text), name)


def convert_data(field: str, values: list[Any], name: str) -> Array:
    """Values of JSON as a flat array of the dtype of that name."""
    if not values:
        return np.empty(0, DTYPES[name])
    return (read_floats if name in FLOATS else read_whole)(field, values, name)


def read_list(field: str, text: bytes) -> list[Any]:
    """At least one value; there are no objects in it whose keys could be given twice."""
    try:
        values: list[Any] = from_json(b"[%b]" % text, allow_inf_nan=False)
    except ValueError as error:
        raise MalformedBody(f"{field} is not JSON: {error}") from error
    if not values:
        raise MalformedBody(f"{field} is not JSON: a value is missing")
    return values


def read_floats(field: str, data: list[Any], name: str) -> Array:
    """Numbers and spelled-out infinities; a finite number that the dtype cannot hold is refused."""
    spelled = not set(map(type, data)) <= {int, float}
    if spelled:
        data = [read_number(field, value) for value in data]
    try:
        wide = np.array(data, np.float64)
    except OverflowError as error:
        raise InvalidRequest(field, "an integer", "does not fit a float") from error
    with np.errstate(over="ignore", invalid="ignore"):
        values = wide.astype(DTYPES[name])
        lost = ~np.isfinite(values.astype(np.float64))
        if spelled:
            lost &= np.isfinite(wide)
    if lost.any():
        raise InvalidRequest(field, float(wide[lost][0]), f"does not fit {name}")
    return values


def read_number(field: str, value: object) -> float:
    if isinstance(value, str) and value in SPELLED:
        return SPELLED[value]
    if isinstance(value, float) and math.isinf(value):  # 1e400 is
        raise InvalidRequest(field, value, "does not fit a float")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    rule = 'must be a number, or one of "Infinity", "-Infinity", "NaN"'
    raise InvalidRequest(field, value, rule)


def read_whole(field: str, data: list[Any], name: str) -> Array:
    """Integers in the dtype's range; for BOOL true and false, or 0 and 1."""
    kinds = {int, bool} if name == "BOOL" else {int}
    low, high = (0, 1) if name == "BOOL" else integer_range(name)
    for value in data if not set(map(type, data)) <= kinds else ():
        if type(value) not in kinds:
            raise InvalidRequest(field, value, f"must be an element of {name}")
    least, most = min(data), max(data)
    if least < low or most > high:
        worst = least if least < low else most
        raise InvalidRequest(field, worst, f"must be within {low}..{high} for {name}")
    return np.array(data, DTYPES[name])


def integer_range(name: str) -> tuple[int, int]:
    limits = np.iinfo(DTYPES[name])
    return int(limits.min), int(limits.max)


def write_tensor(name: str, array: Array) -> bytes:
    """One tensor as a member of a JSON object."""
    dtype = DTYPE_NAMES[array.dtype]
    sizes = ",".join(map(str, array.shape))
    head = f'{dump_json(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data":'
    return b"".join((head.encode(), write_data(array), b"}"))


def write_data(array: Array) -> bytes:
    """The elements as a flat JSON list."""
    flat = array.reshape(-1)
    values = flat.astype(np.float64) if DTYPE_NAMES[array.dtype] in FLOATS else flat
    return to_json(values.tolist(), inf_nan_mode="strings")
