"""`Call`: one request as a value, with how to read its answer and when it may be sent again; and
how calls with arrays are built, parsed, and recovered after a lost reply.

An answer that breaks the service's contract is a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np

from attnd.calls.arguments import Array, check_array, plain_fields
from attnd.errors import LengthMismatch, ProtocolError, ServiceError
from attnd.meta import NO_META, Meta
from attnd.results import AttentionResult
from attnd.wire.states import AttentionState, LseBase

T = TypeVar("T")


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
    executed, it returns the result, or a call that gets it; else None. `within_s`: seconds for it
    with its retries, if they are fewer than the caller's deadline.
    """

    operation: str
    parse: Callable[[Reply], T]
    repeatable: bool = True
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    answer_bytes: int = 0
    also_answers: tuple[int, ...] = ()
    recover: Callable[[ServiceError], Settled[T] | Call[T] | None] = no_recovery
    within_s: float | None = None


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


def tensor_call(
    operation: str,
    fields: dict[str, Any],
    arrays: Mapping[str, Array | None],
    parse: Callable[[Reply], T],
    *,
    repeatable: bool = True,
    answer_bytes: int = 0,
    recover: Callable[[ServiceError], Settled[T] | Call[T] | None] = no_recovery,
) -> Call[T]:
    """A call with these fields, and the given arrays, without None."""
    given: dict[str, Array] = {}
    for name, array in arrays.items():
        if array is not None:
            if type(array) is not np.ndarray:
                check_array(name, array)
            given[name] = array
    fields = plain_fields(fields)
    return Call(operation, parse, repeatable, fields, given, answer_bytes, (), recover)


def attend(
    operation: str, fields: dict[str, Any], arrays: dict[str, Array | None], states: int = 1
) -> Call[AttentionResult]:
    """A call for attention, possibly with an append before it.

    The answer has `states` pairs of an o like q and its lse. Sinks are among the `fields`. A call
    whose lost attempt appended k and v is recovered by a call for the attention alone.
    """
    if "sinks" in fields:
        arrays["sinks"] = fields.pop("sinks")
    appends = operation != "ragged_prefill" and arrays.get("k") is not None
    known = bool(fields.get("offsets"))

    def recover(error: ServiceError) -> Call[AttentionResult] | None:
        if not landed(error, lengths_after(fields)):
            return None
        return attend(operation, {**fields, "offsets": None}, {**arrays, "k": None, "v": None})

    q = arrays["q"]
    return tensor_call(
        operation,
        fields,
        arrays,
        attention_of,
        repeatable=not appends or known,
        answer_bytes=0 if q is None else states * state_bytes(q),
        recover=recover if known else no_recovery,
    )


def state_bytes(o: Array, name: str = "q") -> int:
    """Bytes of a state whose o is like this array, lse included."""
    check_array(name, o)
    return o.nbytes + 4 * prod(o.shape[:-1])


def attention_of(reply: Reply) -> AttentionResult:
    fields, arrays = reply.fields, reply.tensors
    base: LseBase = fields["lse_base"]
    states: tuple[AttentionState, ...] = ()
    while f"o.{(i := len(states))}" in arrays:  # the state of each level
        states += (AttentionState(arrays[f"o.{i}"], arrays[f"lse.{i}"], base),)
    o, lse, levels, cascade = arrays["o"], arrays["lse"], fields["levels"], fields["cascade"]
    return AttentionResult(o, lse, base, levels, cascade, states, reply.meta)


def mask_tensor(mask: Array | None) -> dict[str, Array | None]:
    """`mask` for bool elements, `packed_mask` for uint8 bits; raises TypeError for others."""
    if mask is not None:
        check_array("mask", mask)
        if mask.dtype not in (np.bool_, np.uint8):
            raise TypeError(f"mask has dtype {mask.dtype}: it must be bool, or uint8 for bits")
    return {} if mask is None else {"mask" if mask.dtype == np.bool_ else "packed_mask": mask}


def lengths_after(fields: Mapping[str, Any]) -> dict[str, int]:
    """kv_len of each sequence after the append of a call with these fields, which has offsets."""
    sequences, offsets = fields["sequences"], fields["offsets"]
    indptr = fields.get("append_indptr") or fields.get("qo_indptr")
    counts = np.diff(indptr).tolist() if indptr else [1] * len(sequences)
    return {
        name: offset + count
        for name, offset, count in zip(sequences, offsets, counts, strict=False)
    }


def landed(error: ServiceError, after: dict[str, int]) -> bool:
    """Whether an error shows exactly the lengths after the append, except of sequences that were
    changed as it says: it was executed."""
    if not isinstance(error, LengthMismatch) or not after:
        return False
    known = {*error.lengths, *error.problem.get("done", ())}
    return error.lengths.items() <= after.items() and known >= after.keys()
