"""Tensors inside JSON bodies: `{"q": {"dtype": "F32", "shape": [2, 3], "data": [...]}}`.

`data` is flat, in row-major order. JSON has no infinities, and the log-sum-exp of an empty state
is one: `"Infinity"`, `"-Infinity"` and `"NaN"` stand for them, in both directions.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from service.errors import InvalidRequest
from service.wire import (
    DTYPE_NAMES,
    DTYPES,
    MAX_RANK,
    MAX_TENSORS,
    Array,
    Tensors,
    are_counts,
    is_huge,
)

SPELLED: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


def read_tensors(value: object) -> Tensors:
    """The `tensors` object of a JSON body; raises `InvalidRequest` naming what is wrong."""
    if not isinstance(value, dict):
        raise InvalidRequest("tensors", value, "must be an object of named tensors")
    if len(value) > MAX_TENSORS:
        raise InvalidRequest("tensors", len(value), f"at most {MAX_TENSORS} tensors")
    return {name: read_tensor(f"tensors.{name}", entry) for name, entry in value.items()}


def read_tensor(field: str, entry: object) -> Array:
    """One tensor, its data converted to its dtype."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data"}:
        raise InvalidRequest(field, entry, "must be an object of dtype, shape and data")
    name, shape, data = entry["dtype"], entry["shape"], entry["data"]
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidRequest(f"{field}.dtype", name, f"must be one of {', '.join(DTYPES)}")
    if not are_counts(shape) or len(shape) > MAX_RANK:
        raise InvalidRequest(
            f"{field}.shape", shape, f"must be a list of at most {MAX_RANK} counts"
        )
    if not isinstance(data, list):
        raise InvalidRequest(f"{field}.data", data, "must be a flat list of numbers")
    if len(data) != math.prod(shape):
        raise InvalidRequest(
            f"{field}.data", f"{len(data)} numbers", f"shape {shape} needs {math.prod(shape)}"
        )
    if is_huge(shape):
        raise InvalidRequest(f"{field}.shape", shape, "is too large")
    convert = read_floats if name in FLOATS else read_whole
    return convert(f"{field}.data", data, name).reshape(shape)


def read_floats(field: str, data: list[Any], name: str) -> Array:
    """Numbers and spelled-out infinities; a finite number that the dtype cannot hold is refused."""
    if not set(map(type, data)) <= {int, float}:
        data = [read_number(field, value) for value in data]
    try:
        wide = np.array(data, np.float64)
    except OverflowError as error:
        raise InvalidRequest(field, "an integer", "does not fit a float") from error
    with np.errstate(over="ignore", invalid="ignore"):
        values = wide.astype(DTYPES[name])
        lost = np.isfinite(wide) & ~np.isfinite(values.astype(np.float64))
    if lost.any():
        raise InvalidRequest(field, float(wide[lost][0]), f"does not fit {name}")
    return values


def read_number(field: str, value: object) -> float:
    """One element of a float tensor."""
    if isinstance(value, str) and value in SPELLED:
        return SPELLED[value]
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
    if data and not low <= min(data) <= max(data) <= high:
        worst = min(data) if min(data) < low else max(data)
        raise InvalidRequest(field, worst, f"must be within {low}..{high} for {name}")
    return np.array(data, DTYPES[name])


def integer_range(name: str) -> tuple[int, int]:
    limits = np.iinfo(DTYPES[name])
    return int(limits.min), int(limits.max)


def write_tensors(tensors: Tensors) -> dict[str, Any]:
    """Tensors as JSON values, in the form that `read_tensors` takes."""
    return {name: write_tensor(array) for name, array in tensors.items()}


def write_tensor(array: Array) -> dict[str, Any]:
    name = DTYPE_NAMES[array.dtype]
    flat = array.reshape(-1)
    if name not in FLOATS:
        return {"dtype": name, "shape": list(array.shape), "data": flat.tolist()}
    wide = flat.astype(np.float64)
    data: list[Any] = wide.tolist()
    for index in np.flatnonzero(~np.isfinite(wide)).tolist():
        data[index] = spell(data[index])
    return {"dtype": name, "shape": list(array.shape), "data": data}


def spell(value: float) -> str:
    """A float that JSON has no number for."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
