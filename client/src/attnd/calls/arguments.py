"""Arguments of calls as JSON and images have them: plain ints, floats and strings, dense arrays.

Whatever counts as a number in Python is taken, numpy's scalars included. What would silently mean
anything else is a `TypeError` or a `ValueError` with the remedy.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]
Int = int | np.integer[Any]
"""A number of any caller's, which requests have as an int."""
Indices = Sequence[Int] | NDArray[np.integer[Any]]
"""Lengths, offsets or an indptr: ints, or an integer array."""

PLAIN: Final = frozenset({int, bool, str, type(None), list, dict})
INTS: Final = frozenset({int})
STRINGS: Final = frozenset({str})


def sequence_ids(ids: Iterable[str], field: str = "sequences") -> list[str]:
    """Ids as a list; raises TypeError for a string, which would count as its letters, and for a
    set, whose order rows cannot follow."""
    if type(ids) is not list:
        if isinstance(ids, (str, bytes)):
            raise TypeError(f"{field} is {ids!r}: it must be a list of ids, such as [{ids!r}]")
        if isinstance(ids, (set, frozenset)) or not isinstance(ids, Iterable):
            raise TypeError(f"{field} is {shown(ids)}: it must be a list of ids")
    found = list(ids)
    if STRINGS.issuperset(map(type, found)):
        return found
    return [sequence_id(name, f"{field}[{at}]") for at, name in enumerate(found)]


def sequence_id(name: str, field: str = "sequence", many: str = "") -> str:
    """One id; raises TypeError for any other type. `many` is the method for a list of ids."""
    if type(name) is str:
        return name
    if isinstance(name, str):
        return str(name)
    remedy = f" (for several sequences: {many})" if many else ""
    raise TypeError(f"{field} is {shown(name)}: it must be an id, a string{remedy}")


def instances(values: Iterable[T], kind: type[T], field: str) -> list[T]:
    """Values of one type as a list; raises TypeError for any other type."""
    expected = f"a list of attnd.{kind.__name__}"
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{field} is {shown(values)}: it must be {expected}")
    found = list(values)
    for at, one in enumerate(found):
        if not isinstance(one, kind):
            raise TypeError(f"{field}[{at}] is {shown(one)}: {field} must be {expected}")
    return found


def whole_numbers(values: Indices | None, field: str) -> list[int] | None:
    """Ints as a list; raises TypeError for other types, ValueError for a fraction."""
    if values is None:
        return None
    found: Any = values.tolist() if hasattr(values, "tolist") else values
    if type(found) is not list:
        if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
            raise TypeError(f"{field} is {shown(values)}: it must be a list of ints")
        found = list(found)
    if INTS.issuperset(map(type, found)):
        return [*found]
    return [whole_number(value, f"{field}[{at}]") for at, value in enumerate(found)]


def whole_number(value: Any, field: str) -> int:
    """One int; raises TypeError for other types, ValueError for a fraction."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not float(value).is_integer():
            raise ValueError(f"{field} is {value}: it must be a whole number")
        return int(float(value))
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return whole_number(value.item(), field)
    raise TypeError(f"{field} is {shown(value)}: it must be an int")


def plain_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given (not None), as JSON has them."""
    return {
        name: value if type(value) in PLAIN else plain(value, name)
        for name, value in fields.items()
        if value is not None
    }


def plain(value: Any, field: str) -> Any:
    """A value as JSON has it; raises TypeError for one that JSON does not have, and ValueError
    for a number that is not finite."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise ValueError(f"{field} is {value}: it must be a finite number")
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one, f"{field}.{name}") for name, one in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(one, f"{field}[{at}]") for at, one in enumerate(value)]
    if value is None:
        return None
    listed = getattr(value, "tolist", None)
    if listed is not None and not isinstance(value, type):
        return plain(listed(), field)
    raise TypeError(f"{field} is {shown(value)}: it must be a number, a string or a list of them")


def check_array(name: str, array: Any) -> None:
    """Raises TypeError for anything but a numpy array, and for one with a mask of its elements."""
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        return
    if hasattr(array, "filled"):
        remedy = "give an array of all its elements, `.filled(0)`"
    elif hasattr(array, "detach") and hasattr(array, "cpu"):
        remedy = "give its numpy array, `.detach().cpu().numpy()` (bfloat16: after `.half()` or "
        remedy += "`.float()`), or use attnd.torch.TorchSession"
    elif hasattr(array, "get") and hasattr(array, "device"):
        remedy = "give its copy on the host, `.get()`"
    else:
        dtype = "bool" if name == "mask" else "np.float32"
        remedy = f"give a numpy array, such as np.asarray({name}, dtype={dtype})"
    raise TypeError(f"{name} is {shown(array)}: {remedy}")


def shown(value: Any) -> str:
    """A value and its type, for a message."""
    kind = type(value)
    where = "" if kind.__module__ in ("builtins", "numpy") else f"{kind.__module__}."
    text = repr(value)
    return f"{text} ({where}{kind.__name__})" if len(text) <= 60 else f"a {where}{kind.__name__}"
