"""`Call`: one request as a value, with how to read its answer and when it may be sent again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from attnd.errors import ServiceError
from attnd.results import Meta

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
