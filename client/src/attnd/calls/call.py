"""`Call`: one request as a value, with how to read its answer and when it may be sent again.

An answer that breaks the service's contract is a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from attnd.errors import ProtocolError, ServiceError
from attnd.results import NO_META, Meta

T = TypeVar("T")
Array = NDArray[Any]


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Reply:
    """A decoded answer: JSON fields, arrays where the operation has them, text for metrics."""

    status: int
    fields: dict[str, Any]
    tensors: Mapping[str, Array]
    text: str
    meta: Meta


@dataclass(frozen=True, slots=True)
class Settled(Generic[T]):
    """The result that a lost reply must have had."""

    value: T


def no_recovery(error: ServiceError) -> None:
    """No error shows that an earlier attempt was executed."""


def settled_by(kind: type[ServiceError]) -> Callable[[ServiceError], Settled[None] | None]:
    """Recovers a deletion: an error of this kind on the second attempt means that the first was
    executed."""
    return lambda error: Settled(None) if isinstance(error, kind) else None


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Call(Generic[T]):
    """An operation of the service by name, with its fields and arrays; a transport writes them.

    `parse` reads a successful answer (or one whose status is in `also_answers`). `repeatable`:
    after a lost reply it may be sent again, because doing it twice does no harm. `answer_bytes`:
    how many bytes of arrays the answer will have, as far as one can know. `recover`: called with
    the error of a retry after a lost reply. If the error shows that the earlier attempt was
    executed, it returns the result, or a call that gets it; else None.
    """

    operation: str
    parse: Callable[[Reply], T]
    repeatable: bool = True
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    answer_bytes: int = 0
    also_answers: tuple[int, ...] = ()
    recover: Callable[[ServiceError], Settled[T] | Call[T] | None] = no_recovery


def parsed(parse: Callable[[Reply], T], reply: Reply) -> T:
    """The result; raises `ProtocolError` for a missing member, or one of another type."""
    try:
        return parse(reply)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        detail = f"the answer breaks the service's contract: {error!r}"
        raise ProtocolError(detail, reply.meta.request_id) from error


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
    """A parser of answers that have the fields of the dataclass `kind`."""
    return lambda reply: result_of(kind, reply.fields, reply.meta)


def reads_many(kind: type[T], name: str) -> Callable[[Reply], tuple[T, ...]]:
    """A parser of answers whose field `name` lists such dataclasses."""
    return lambda reply: tuple([result_of(kind, one, reply.meta) for one in reply.fields[name]])


def reads_number(name: str) -> Callable[[Reply], int]:
    """A parser of answers with a number in the field `name`."""
    return lambda reply: int(reply.fields[name])


def nothing(_: Reply) -> None:
    """The answer has no fields."""
