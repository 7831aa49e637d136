"""The tensor routes as calls: append, decode, prefill, cascade, merge, gather. safetensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnd import tensors
from attnd.call import Call, Reply, Settled
from attnd.control import indices, reads
from attnd.errors import LengthMismatch, ServiceError
from attnd.results import AppendResult, AttentionResult, GatherResult, MergeResult
from attnd.states import AttentionState, LseBase

T = TypeVar("T")
Array = NDArray[Any]
Indices = Sequence[int] | NDArray[np.integer[Any]]
"""Lengths, offsets or an indptr: ints, or an integer array."""


class ScoringOptions(TypedDict, total=False):
    """What all attention takes; one that is not given is the service's default.

    `sm_scale` head_dim ** -0.5, `logits_soft_cap` 0 (off), `lse_base` "e".
    """

    sm_scale: float
    logits_soft_cap: float
    lse_base: LseBase


class WindowOptions(ScoringOptions, total=False):
    """`window_left`: keys a query sees before its own position; -1 (off) by default."""

    window_left: int


class Options(WindowOptions, total=False):
    """`cascade`: whether KV that sequences share is read once for all of them; "auto"."""

    cascade: Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class CascadeLevel:
    """Query rows `qo_indptr[s]:qo_indptr[s+1]` attend the whole of `sequences[s]`."""

    sequences: Sequence[str]
    qo_indptr: Indices


def append(
    layer: int,
    sequences: Sequence[str],
    k: Array,
    v: Array,
    *,
    append_indptr: Indices | None = None,
    offsets: Indices | None = None,
) -> Call[AppendResult]:
    """Append rows `append_indptr[b]:[b+1]` of `k, v [n, num_kv_heads, head_dim]` to sequence b.

    Without `append_indptr`, one row each. `offsets` are the kv_len that each sequence is believed
    to have: a difference raises `LengthMismatch`, and with them a lost reply is retried safely.
    Raises `UnknownSequence`, `LengthMismatch`, `OutOfPages`, `InvalidRequest`.
    """
    fields = {
        "layer": layer,
        "sequences": list(sequences),
        "append_indptr": numbers(append_indptr),
        "offsets": numbers(offsets),
    }
    after = lengths_after(sequences, offsets, append_indptr)

    def recover(error: ServiceError) -> Settled[AppendResult] | None:
        if not landed(error, after):
            return None
        return Settled(AppendResult(tuple(after[name] for name in sequences), error.meta))

    return tensor_call(
        "/v1/append",
        fields,
        {"k": k, "v": v},
        lambda reply: AppendResult(tuple(reply.fields["lengths"]), reply.meta),
        repeatable=offsets is not None,
        recover=recover,
    )


def decode(
    layer: int,
    sequences: Sequence[str],
    q: Array,
    *,
    k: Array | None = None,
    v: Array | None = None,
    offsets: Indices | None = None,
    **options: Unpack[Options],
) -> Call[AttentionResult]:
    """One query row per sequence, `q [B, num_qo_heads, head_dim]`, over all of its KV.

    With `k, v [B, num_kv_heads, head_dim]` they are appended first; then `offsets` are as in
    `append`. Raises what `append` raises.
    """
    fields = {"layer": layer, "sequences": list(sequences), "offsets": numbers(offsets), **options}
    return attend(
        "/v1/decode",
        fields,
        {"q": q, "k": k, "v": v},
        lengths_after(sequences, offsets, None),
    )


def prefill(
    layer: int,
    sequences: Sequence[str],
    q: Array,
    qo_indptr: Indices,
    *,
    k: Array | None = None,
    v: Array | None = None,
    offsets: Indices | None = None,
    causal: bool = False,
    mask: Array | None = None,
    **options: Unpack[Options],
) -> Call[AttentionResult]:
    """Rows `qo_indptr[b]:qo_indptr[b+1]` of `q [n, num_qo_heads, head_dim]` attend sequence b.

    With `k, v` they are appended first by the same indptr. `causal` is aligned to the end of the
    sequence. `mask` is every request's `qo_len x kv_len` visibility, flattened and concatenated:
    bool elements, or uint8 bits (little order, each request padded to a byte). Raises what `append`
    raises.
    """
    fields = {
        "layer": layer,
        "sequences": list(sequences),
        "qo_indptr": numbers(qo_indptr),
        "offsets": numbers(offsets),
        "causal": causal,
        **options,
    }
    return attend(
        "/v1/prefill",
        fields,
        {"q": q, "k": k, "v": v, **mask_tensor(mask)},
        lengths_after(sequences, offsets, qo_indptr),
    )


def ragged_prefill(
    q: Array,
    k: Array,
    v: Array,
    qo_indptr: Indices,
    kv_indptr: Indices,
    *,
    causal: bool = False,
    mask: Array | None = None,
    **options: Unpack[WindowOptions],
) -> Call[AttentionResult]:
    """Attention over the `k, v [nnz, num_kv_heads, head_dim]` sent along; touches no pool."""
    fields = {
        "qo_indptr": numbers(qo_indptr),
        "kv_indptr": numbers(kv_indptr),
        "causal": causal,
        **options,
    }
    return attend("/v1/ragged-prefill", fields, {"q": q, "k": k, "v": v, **mask_tensor(mask)}, {})


def cascade(
    layer: int,
    levels: Sequence[CascadeLevel],
    q: Array,
    *,
    causal: bool = False,
    return_levels: bool = False,
    **options: Unpack[ScoringOptions],
) -> Call[AttentionResult]:
    """Each row of `q [n, num_qo_heads, head_dim]` attends one whole sequence per level.

    `causal` applies to the last level. `return_levels` adds every level's own state. Levels that
    would show a row the same pages twice raise `InvalidRequest`.
    """
    fields = {
        "layer": layer,
        "levels": [
            {"sequences": list(level.sequences), "qo_indptr": numbers(level.qo_indptr)}
            for level in levels
        ],
        "causal": causal,
        "return_levels": return_levels,
        **options,
    }
    return attend("/v1/cascade", fields, {"q": q}, {})


def merge(
    o: Array, lse: ArrayLike, *, indptr: Indices | None = None, lse_base: LseBase = "e"
) -> Call[MergeResult]:
    """Merge states on the service (`merge_states` does it here).

    `o [T, n, H, D]` and `lse [T, n, H]` merge over n; with `indptr [T+1]`, `o [nnz, H, D]` and
    `lse [nnz, H]` merge rows `indptr[t]:indptr[t+1]`. Answers `o [T, H, D]`, `lse [T, H]`.
    """
    return tensor_call(
        "/v1/merge",
        {"indptr": numbers(indptr), "lse_base": lse_base},
        {"o": o, "lse": np.asarray(lse, dtype=np.float32)},
        lambda reply: MergeResult(
            reply.tensors["o"], reply.tensors["lse"], reply.fields["lse_base"], reply.meta
        ),
        repeatable=True,
    )


def gather(layer: int, sequences: Sequence[str], *, dtype: str | None = None) -> Call[GatherResult]:
    """All K and V of sequences at a layer, dequantised to `dtype`; raises `UnknownSequence`."""
    return tensor_call(
        "/v1/gather",
        {"layer": layer, "sequences": list(sequences), "dtype": dtype},
        {},
        lambda reply: GatherResult(
            reply.tensors["k"],
            reply.tensors["v"],
            indices(reply.fields["kv_indptr"]),
            reply.meta,
        ),
        repeatable=True,
    )


TENSOR_HEADERS: Final = {"content-type": tensors.MEDIA_TYPE, "accept": tensors.MEDIA_TYPE}


def tensor_call(
    path: str,
    fields: dict[str, Any],
    arrays: dict[str, Array | None],
    parse: Callable[[Reply], T],
    *,
    repeatable: bool,
    recover: Callable[[ServiceError], Settled[T] | Call[T] | None] = lambda error: None,
) -> Call[T]:
    """A POST of what was given: fields and arrays that are None are left out."""
    body = tensors.encode(
        {name: value for name, value in fields.items() if value is not None},
        {name: array for name, array in arrays.items() if array is not None},
    )
    headers = TENSOR_HEADERS
    return Call("POST", path, reads(parse), repeatable, headers=headers, body=body, recover=recover)


def attend(
    path: str, fields: dict[str, Any], arrays: dict[str, Array | None], after: dict[str, int]
) -> Call[AttentionResult]:
    """A call whose answer is attention, perhaps after an append that leaves lengths `after`."""
    appends = path != "/v1/ragged-prefill" and arrays.get("k") is not None

    def recover(error: ServiceError) -> Call[AttentionResult] | None:
        # The lost attempt appended k and v: only the attention is still wanted.
        if not landed(error, after):
            return None
        without = {name: value for name, value in fields.items() if name != "offsets"}
        return attend(path, without, {**arrays, "k": None, "v": None}, {})

    return tensor_call(
        path, fields, arrays, attention_of, repeatable=not appends or bool(after), recover=recover
    )


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
