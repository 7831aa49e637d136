"""Converts query parameters, which are text, to the fields of an operation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from service.errors import unknown_name
from service.operations.schema.fields import refuse
from service.operations.schema.spec import Operation


def query_values(operation: Operation, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The fields of a query's decoded names and values; raises `InvalidRequest`.

    Converts numbers, `true` and `false`; the fields' own rules check the values.
    """
    values: dict[str, Any] = {}
    for name, text in pairs:
        if not operation.query_names:
            refuse("query", f"{name}={text}", "this route takes no parameters")
        if name not in operation.query_names:
            raise unknown_name(name, text, "this route", "parameter", operation.query_names)
        if name in values:
            refuse(name, text, "is given twice")
        values[name] = value(operation.fields.model_fields[name].annotation, text)
    return values


def value(kind: Any, text: str) -> int | bool | str:
    """The text converted for a field of type `kind`; the text itself if it cannot be."""
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    return number(text) if kind is int else text


def number(text: str) -> int | str:
    """The integer of at most 18 digits that the text denotes, or the text."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else text
