"""Calls with arrays: how they are built, parsed, and recovered after a lost reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final, TypeVar

import numpy as np

from attnd.calls.arguments import Array, check_array, plain_fields
from attnd.calls.call import Call, Reply, Settled, no_recovery, reads
from attnd.errors import LengthMismatch, ServiceError
from attnd.results import AttentionResult
from attnd.wire.states import AttentionState, LseBase

T = TypeVar("T")


def tensor_call(
    operation: str,
    fields: dict[str, Any],
    arrays: dict[str, Array | None],
    parse: Callable[[Reply], T],
    *,
    repeatable: bool,
    answer_bytes: int = 0,
    recover: Callable[[ServiceError], Settled[T] | Call[T] | None] = no_recovery,
) -> Call[T]:
    """A call with these fields and arrays, without those that are None."""
    given = {name: array for name, array in arrays.items() if array is not None}
    for name, array in given.items():
        if type(array) is not np.ndarray:
            check_array(name, array)
    return Call(
        operation,
        parse,
        repeatable,
        plain_fields(fields),
        given,
        answer_bytes,
        (),
        recover,
    )


def attend(
    operation: str,
    fields: dict[str, Any],
    arrays: dict[str, Array | None],
    states: int = 1,
) -> Call[AttentionResult]:
    """A call for attention, possibly with an append before it.

    The answer has `states` pairs of an o like q and its lse. Sinks are among the `fields`.
    """
    sinks = fields.pop("sinks", arrays.get("sinks"))
    arrays = {**arrays, "sinks": sinks}
    appends = operation != "ragged_prefill" and arrays.get("k") is not None
    known = bool(fields.get("offsets"))
    q = arrays["q"]
    return tensor_call(
        operation,
        fields,
        arrays,
        read_attention,
        repeatable=not appends or known,
        answer_bytes=0 if q is None else states * state_bytes(q),
        recover=attends_only(operation, fields, arrays) if known else no_recovery,
    )


def attends_only(
    operation: str, fields: dict[str, Any], arrays: dict[str, Array | None]
) -> Callable[[ServiceError], Call[AttentionResult] | None]:
    """Recovers a call whose lost attempt appended k and v, by a call for the attention alone."""

    def recover(error: ServiceError) -> Call[AttentionResult] | None:
        if not landed(error, lengths_after(fields)):
            return None
        return attend(operation, {**fields, "offsets": None}, {**arrays, "k": None, "v": None})

    return recover


def state_bytes(o: Array, name: str = "q") -> int:
    """Bytes of a state whose o is like this array, lse included."""
    check_array(name, o)
    return o.nbytes + 4 * prod(o.shape[:-1])


def attention_of(reply: Reply) -> AttentionResult:
    fields, arrays = reply.fields, reply.tensors
    base: LseBase = fields["lse_base"]
    states = level_states(arrays, base) if "o.0" in arrays else ()
    return AttentionResult(
        arrays["o"], arrays["lse"], base, fields["levels"], fields["cascade"], states, reply.meta
    )


read_attention: Final = reads(attention_of)


def level_states(arrays: Mapping[str, Array], base: LseBase) -> tuple[AttentionState, ...]:
    """The state of each level, beside the merged one."""
    states: list[AttentionState] = []
    while f"o.{len(states)}" in arrays:
        i = len(states)
        states.append(AttentionState(arrays[f"o.{i}"], arrays[f"lse.{i}"], base))
    return tuple(states)


def mask_tensor(mask: Array | None) -> dict[str, Array | None]:
    """`mask` for bool elements, `packed_mask` for uint8 bits."""
    if mask is not None:
        check_array("mask", mask)
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
    """Whether an error shows exactly the lengths after the append: it was executed."""
    return isinstance(error, LengthMismatch) and bool(after) and error.lengths == after
