"""Calls with arrays: how they are built, parsed, and recovered after a lost reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from attnd.calls.arguments import Array, check_array, plain_fields
from attnd.calls.call import Call, Reply, Settled, no_recovery
from attnd.errors import LengthMismatch, ServiceError
from attnd.results import AttentionResult
from attnd.wire.states import AttentionState, LseBase

T = TypeVar("T")


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
    return o.nbytes + 4 * (o.size // o.shape[-1] if o.size else 0)


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
