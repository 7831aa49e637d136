"""The calls with arrays: append, decode, prefill, cascade, merge, gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnd.calls.arguments import Indices, Int, instances, sequence_ids, whole_numbers
from attnd.calls.call import (
    Call,
    Reply,
    Settled,
    attend,
    landed,
    lengths_after,
    lens_of,
    mask_tensor,
    no_recovery,
    reads,
    state_bytes,
    tensor_call,
)
from attnd.calls.prefix import RowIds, row_ids
from attnd.errors import ServiceError
from attnd.wire.answers import AppendResult, AttentionResult, GatherResult, MergeResult
from attnd.wire.states import LseBase

Array = NDArray[Any]


class ScoringOptions(TypedDict, total=False):
    """What all attention takes; one that is not given is the service's default.

    `sm_scale` head_dim ** -0.5, `logits_soft_cap` 0 (off), `lse_base` "e". `sinks` float32
    `[num_qo_heads]`: a natural logit of each head that enters the softmax's denominator only.
    """

    sm_scale: float
    logits_soft_cap: float
    lse_base: LseBase
    sinks: Array


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


def appended(reply: Reply) -> AppendResult:
    fields, meta = reply.fields, reply.meta
    return AppendResult(tuple(fields["lengths"]), meta, *lens_of(fields))


def append(
    layer: Int | Indices,
    sequences: Sequence[str],
    k: Array,
    v: Array,
    *,
    append_indptr: Indices | None = None,
    offsets: Indices | None = None,
    token_ids: RowIds | None = None,
) -> Call[AppendResult]:
    """Append rows `append_indptr[b]:[b+1]` of `k, v [n, num_kv_heads, head_dim]` to sequence b.

    Without `append_indptr`, one row each. `layer` may be a list of layers: k and v are then
    `[L, n, num_kv_heads, head_dim]` in their order, and stored at all of them or at none. Every
    sequence must have the same length at each of these layers.

    `offsets` are the kv_len that each sequence is believed to have: a difference raises
    `LengthMismatch`, and with them a lost reply is retried safely.

    `token_ids` name tokens of sequences that were made with a `Prefix`, or of their forks: one id
    for each row, or a list for each sequence, which begins at its `known_len`, but at most at the
    first row. A full page is committed by itself once its ids are known and its rows are stored at
    every layer, unless an equal page is cached: page tables never change by that.
    Raises `UnknownSequence`, `LengthMismatch`, `OutOfPages`, `InvalidRequest`, and `KeyMismatch`
    for ids that contradict earlier ones.
    """
    sequences = sequence_ids(sequences)
    ids, sums = row_ids(token_ids)
    fields = {
        **layer_fields(layer),
        "sequences": sequences,
        "append_indptr": whole_numbers(append_indptr, "append_indptr"),
        "offsets": whole_numbers(offsets, "offsets"),
        "ids_indptr": sums,
    }

    def recover(error: ServiceError) -> Settled[AppendResult] | None:
        after = lengths_after(fields)
        if not landed(error, after):
            return None
        return Settled(AppendResult(tuple([after[name] for name in sequences]), error.meta))

    known, arrays = offsets is not None, {"k": k, "v": v, "token_ids": ids}
    recovery = recover if known else no_recovery
    return tensor_call("append", fields, arrays, appended, repeatable=known, recover=recovery)


def layer_fields(layer: Int | Indices) -> dict[str, Any]:
    """`layer` for one, `layers` for several."""
    given: Any = layer
    if isinstance(given, (Sequence, np.ndarray)) and np.ndim(given):
        return {"layers": whole_numbers(given, "layer")}
    return {"layer": layer}


def decode(
    layer: Int,
    sequences: Sequence[str],
    q: Array,
    *,
    k: Array | None = None,
    v: Array | None = None,
    offsets: Indices | None = None,
    token_ids: RowIds | None = None,
    **options: Unpack[Options],
) -> Call[AttentionResult]:
    """One query row per sequence, `q [B, num_qo_heads, head_dim]`, over all of its KV.

    With `k, v [B, num_kv_heads, head_dim]` they are appended first; then `offsets` are as in
    `append`. `token_ids` are as in `append`. Raises what `append` raises.
    """
    ids, sums = row_ids(token_ids)
    fields = {
        "layer": layer,
        "sequences": sequence_ids(sequences),
        "offsets": whole_numbers(offsets, "offsets"),
        "ids_indptr": sums,
        **options,
    }
    return attend("decode", fields, {"q": q, "k": k, "v": v, "token_ids": ids})


def prefill(
    layer: Int,
    sequences: Sequence[str],
    q: Array,
    qo_indptr: Indices,
    *,
    k: Array | None = None,
    v: Array | None = None,
    offsets: Indices | None = None,
    causal: bool = False,
    mask: Array | None = None,
    token_ids: RowIds | None = None,
    **options: Unpack[Options],
) -> Call[AttentionResult]:
    """Rows `qo_indptr[b]:qo_indptr[b+1]` of `q [n, num_qo_heads, head_dim]` attend sequence b.

    With `k, v` they are appended first by the same indptr. `causal` is aligned to the end of the
    sequence. `mask` is every request's `qo_len x kv_len` visibility, flattened and concatenated:
    bool elements, or uint8 bits (little order, each request padded to a byte). `token_ids`
    are as in `append`. Raises what `append` raises.
    """
    ids, sums = row_ids(token_ids)
    fields = {
        "layer": layer,
        "sequences": sequence_ids(sequences),
        "qo_indptr": whole_numbers(qo_indptr, "qo_indptr"),
        "offsets": whole_numbers(offsets, "offsets"),
        "causal": causal,
        "ids_indptr": sums,
        **options,
    }
    arrays = {"q": q, "k": k, "v": v, "token_ids": ids, **mask_tensor(mask)}
    return attend("prefill", fields, arrays)


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
        "qo_indptr": whole_numbers(qo_indptr, "qo_indptr"),
        "kv_indptr": whole_numbers(kv_indptr, "kv_indptr"),
        "causal": causal,
        **options,
    }
    return attend("ragged_prefill", fields, {"q": q, "k": k, "v": v, **mask_tensor(mask)})


def cascade(
    layer: Int,
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
    levels = instances(levels, CascadeLevel, "levels")
    fields = {
        "layer": layer,
        "levels": [
            {
                "sequences": sequence_ids(level.sequences, f"levels[{at}].sequences"),
                "qo_indptr": whole_numbers(level.qo_indptr, f"levels[{at}].qo_indptr"),
            }
            for at, level in enumerate(levels)
        ],
        "causal": causal,
        "return_levels": return_levels,
        **options,
    }
    return attend("cascade", fields, {"q": q}, states=1 + len(levels) * return_levels)


def merge(
    o: Array,
    lse: ArrayLike,
    *,
    indptr: Indices | None = None,
    lse_base: LseBase = "e",
    sinks: Array | None = None,
) -> Call[MergeResult]:
    """Merge states on the service (`merge_states` does it here).

    `o [T, n, H, D]` and `lse [T, n, H]` merge over n; with `indptr [T+1]`, `o [nnz, H, D]` and
    `lse [nnz, H]` merge rows `indptr[t]:indptr[t+1]`. Answers `o [T, H, D]`, `lse [T, H]`.
    `sinks` float32 `[H]` enter each list once: for states that were computed without them.
    """
    fields = {"indptr": whole_numbers(indptr, "indptr"), "lse_base": lse_base}
    arrays = {"o": o, "lse": np.asarray(lse, dtype=np.float32), "sinks": sinks}
    return tensor_call("merge", fields, arrays, reads("merge"), answer_bytes=state_bytes(o, "o"))


def gather(
    layer: Int,
    sequences: Sequence[str],
    *,
    start: Int | None = None,
    stop: Int | None = None,
    dtype: str | None = None,
) -> Call[GatherResult]:
    """K and V of sequences at a layer, dequantised to `dtype`: all, or tokens `start:stop` of each.

    Raises `UnknownSequence`, and `AnswerTooLarge` where less must be asked for at a time.
    """
    ids = sequence_ids(sequences)
    fields = {"layer": layer, "sequences": ids, "start": start, "stop": stop, "dtype": dtype}
    return tensor_call("gather", fields, {}, reads("gather"))
