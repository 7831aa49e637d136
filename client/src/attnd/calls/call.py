"""`Call`: one request as a value, with how to read its answer and when it may be sent again; and
how calls with arrays are built, parsed, and recovered after a lost reply.

An answer that breaks the service's contract is a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, Final, Generic, TypeVar, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from attnd.calls.arguments import Array, check_array, plain_fields
from attnd.errors import LengthMismatch, ProtocolError, ServiceError
from attnd.wire.answer_table import ANSWERS, layout_of
from attnd.wire.answers import AttentionResult
from attnd.wire.meta import NO_META, Meta
from attnd.wire.states import AttentionState, LseBase

T = TypeVar("T")
LENS_BYTES: Final = 24
"""Of the numbers of one sequence in the reply to a call with token ids."""
EMPTY: Final[Mapping[str, Array]] = MappingProxyType({})


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


def nothing(_: Reply) -> None:
    """The answer has no fields."""


Read = Callable[[Any, Meta], Any]


@cache
def reads(operation: str) -> Callable[[Reply], Any]:
    """The parser of an operation's answers, by the table: of a class, or of one member."""
    answer = ANSWERS[operation]
    if answer is None:
        return nothing
    if isinstance(answer, type):
        return lambda reply: result_of(answer, reply.fields, reply.meta, reply.tensors)
    ((name, hint),) = answer.items()
    read = int_of if hint is int else reader_of(hint)
    return lambda reply: read(reply.fields[name], reply.meta)


def result_of(
    kind: type[T],
    document: Mapping[str, Any],
    meta: Meta = NO_META,
    tensors: Mapping[str, Array] = EMPTY,
    prefix: str = "",
) -> T:
    """The class `kind` of an answer from a JSON object and tensors, whose names have the prefix.

    Lists become tuples, unknown members are ignored. A member without a default must be there,
    else this raises TypeError; KeyError for a missing tensor.
    """
    hashable: Any = kind
    readers, layout = readers_of(hashable), layout_of(hashable)
    values = {
        name: readers[name](value, meta) for name, value in document.items() if name in readers
    }
    for name in layout.tensors:
        values[name] = tensors[prefix + name]
    for name, nested in layout.nested.items():
        values[name] = result_of(nested, document, meta, tensors, f"{name}_")
    if layout.has_meta:
        values["meta"] = meta
    return kind(**values)


@cache
def readers_of(kind: Any) -> dict[str, Read]:
    return {name: reader_of(hint) for name, hint in layout_of(kind).members.items()}


def reader_of(hint: Any) -> Read:
    """How a member of this type is read."""
    if get_origin(hint) is Annotated:
        return indices
    for one in (hint, *get_args(hint)):
        if is_dataclass(one):
            kind: Any = one
            break
    else:
        return plain_of
    if get_origin(hint) is tuple:
        return lambda value, meta: tuple([result_of(kind, one, meta) for one in value])
    return lambda value, meta: None if value is None else result_of(kind, value, meta)


def plain_of(value: Any, meta: Meta) -> Any:
    return tuple(value) if type(value) is list else value


def int_of(value: Any, meta: Meta) -> int:
    return int(value)


def indices(value: Any, meta: Meta) -> NDArray[np.int32]:
    return np.asarray(value, dtype=np.int32)


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
        left = {**fields, "offsets": None, "ids_indptr": None}  # its ids are known by then
        return attend(operation, left, {**arrays, **dict.fromkeys(("k", "v", "token_ids"))})

    q = arrays["q"]
    lens = 0 if arrays.get("token_ids") is None else LENS_BYTES * len(fields["sequences"])
    return tensor_call(
        operation,
        fields,
        arrays,
        attention_of,
        repeatable=not appends or known,
        answer_bytes=0 if q is None else states * state_bytes(q) + lens,
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
    return AttentionResult(o, lse, base, levels, cascade, states, reply.meta, *lens_of(fields))


def lens_of(fields: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`known_len` and `committed_len` of a reply to a call with token ids; else empty."""
    return tuple(fields.get("known_len", ())), tuple(fields.get("committed_len", ()))


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
