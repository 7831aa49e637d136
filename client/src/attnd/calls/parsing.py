"""Parsing answers: whatever breaks the service's contract is a `ProtocolError`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from attnd.calls.call import Reply
from attnd.errors import ProtocolError
from attnd.results import NO_META, Meta

T = TypeVar("T")


def reads(parse: Callable[[Reply], T]) -> Callable[[Reply], T]:
    """A parser that raises `ProtocolError` for a missing member, or one of another type."""

    def checked(reply: Reply) -> T:
        try:
            return parse(reply)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            detail = f"the answer breaks the service's contract: {error!r}"
            raise ProtocolError(detail, reply.meta.request_id) from error

    return checked


def result_of(kind: type[T], document: dict[str, Any], meta: Meta = NO_META) -> T:
    """The dataclass `kind` from a JSON object: lists become tuples, unknown members are ignored.

    A member without a default must be there, else this raises TypeError.
    """
    hashable: Any = kind
    names = names_of(hashable)
    values = {
        name: tuple(value) if type(value) is list else value
        for name, value in document.items()
        if name in names
    }
    if "meta" in names:
        values["meta"] = meta
    return kind(**values)


@cache
def names_of(kind: type[Any]) -> frozenset[str]:
    """The names of a dataclass's fields."""
    return frozenset(field.name for field in fields(kind))


def reads_into(kind: type[T]) -> Callable[[Reply], T]:
    """A parser of answers whose fields are those of the dataclass `kind`."""
    return reads(lambda reply: result_of(kind, reply.fields, reply.meta))


def nothing(_: Reply) -> None:
    """The answer has no fields."""
