"""What calls with arrays are made of: their answers, and what a lost reply may have carried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnd.call import Call, Reply, Settled
from attnd.control import reads
from attnd.errors import LengthMismatch, ServiceError
from attnd.results import AttentionResult
from attnd.states import AttentionState, LseBase

T = TypeVar("T")
Array = NDArray[Any]
Indices = Sequence[int] | NDArray[np.integer[Any]]
"""Lengths, offsets or an indptr: ints, or an integer array."""


def tensor_call(
    operation: str,
    fields: dict[str, Any],
    arrays: dict[str, Array | None],
    parse: Callable[[Reply], T],
    *,
    repeatable: bool,
    answer_bytes: int = 0,
    recover: Callable[[ServiceError], Settled[T] | Call[T] | None] = lambda error: None,
) -> Call[T]:
    """A call with what was given: fields and arrays that are None are left out."""
    return Call(
        operation,
        reads(parse),
        repeatable,
        {name: value for name, value in fields.items() if value is not None},
        {name: array for name, array in arrays.items() if array is not None},
        answer_bytes,
        recover=recover,
    )


def attend(
    operation: str,
    fields: dict[str, Any],
    arrays: dict[str, Array | None],
    after: dict[str, int],
    states: int = 1,
) -> Call[AttentionResult]:
    """A call whose answer is attention, perhaps after an append that leaves lengths `after`.

    The answer has `states` pairs of an o like q and its lse.
    """
    appends = operation != "ragged_prefill" and arrays.get("k") is not None
    q = arrays["q"]

    def recover(error: ServiceError) -> Call[AttentionResult] | None:
        # The lost attempt appended k and v: only the attention is still wanted.
        if not landed(error, after):
            return None
        without = {name: value for name, value in fields.items() if name != "offsets"}
        return attend(operation, without, {**arrays, "k": None, "v": None}, {})

    return tensor_call(
        operation,
        fields,
        arrays,
        attention_of,
        repeatable=not appends or bool(after),
        answer_bytes=0 if q is None else states * state_bytes(q),
        recover=recover,
    )


def state_bytes(o: Array) -> int:
    """Bytes of a state whose o is like this array, lse included."""
    return o.nbytes + 4 * prod(o.shape[:-1])


def attention_of(reply: Reply) -> AttentionResult:
    fields, arrays = reply.fields, reply.tensors
    base: LseBase = fields["lse_base"]
    states: list[AttentionState] = []
    while f"o.{len(states)}" in arrays:
        i = len(states)
        states.append(AttentionState(arrays[f"o.{i}"], arrays[f"lse.{i}"], base))
    return AttentionResult(
        o=arrays["o"],
        lse=arrays["lse"],
        lse_base=base,
        levels=fields["levels"],
        cascade=fields["cascade"],
        level_states=tuple(states),
        meta=reply.meta,
    )


def mask_tensor(mask: Array | None) -> dict[str, Array | None]:
    """`mask` for bool elements, `packed_mask` for uint8 bits."""
    return {} if mask is None else {"mask" if mask.dtype == np.bool_ else "packed_mask": mask}


def numbers(values: Indices | None) -> list[int] | None:
    if isinstance(values, np.ndarray):
        return [int(value) for value in values.tolist()]
    return None if values is None else [int(value) for value in values]


def lengths_after(
    sequences: Sequence[str], offsets: Indices | None, indptr: Indices | None
) -> dict[str, int]:
    """kv_len of each sequence after an append at `offsets`; empty when they are not given."""
    if offsets is None:
        return {}
    counts = [1] * len(sequences) if indptr is None else np.diff(indptr).tolist()
    return {
        name: int(offset) + int(count)
        for name, offset, count in zip(sequences, offsets, counts, strict=False)
    }


def landed(error: ServiceError, after: dict[str, int]) -> bool:
    """Whether a refusal shows exactly the lengths that the append would have left."""
    return isinstance(error, LengthMismatch) and bool(after) and error.lengths == after
