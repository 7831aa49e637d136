"""From the fields and tensors of a request to an engine operation: one function per tensor route.

Everything that can be checked from the request and `ServiceInfo` alone is checked here, before the
engine hears of it. NaN or infinity inside q, k or v is the client's business: it stays in the rows
and sequences it was given for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from service.engine.operations import (
    Append,
    Array,
    Attention,
    Cascade,
    CascadeLevel,
    Gather,
    Ids,
    Merge,
    Options,
    RaggedPrefill,
    ServiceInfo,
)
from service.errors import InvalidRequest
from service.http import checks
from service.schemas import (
    AppendFields,
    CascadeFields,
    DecodeFields,
    GatherFields,
    MergeFields,
    PagedFields,
    PrefillFields,
    RaggedPrefillFields,
    WindowFields,
)
from service.wire import DTYPES, Tensors

KV = frozenset({"k", "v"})
Q = frozenset({"q"})
QKV = Q | KV
MASKS = frozenset({"mask", "packed_mask"})
STATE = frozenset({"o", "lse"})
NONE: frozenset[str] = frozenset()


def build_append(fields: AppendFields, tensors: Tensors, info: ServiceInfo) -> Append:
    """`k`, `v [n, num_kv_heads, head_dim]`."""
    checks.check_names(tensors, KV)
    checks.check_layer(fields.layer, info)
    ids = checks.check_ids("sequences", fields.sequences)
    k, v = tensors["k"], tensors["v"]
    rows = k.shape[0] if k.ndim else 0
    if fields.append_indptr is None:
        rows = len(ids)
        indptr = np.arange(rows + 1, dtype=np.int32)
    else:
        indptr = checks.prefix_sums("append_indptr", fields.append_indptr, len(ids), rows)
    checks.check_pair(k, v, (rows, info.num_kv_heads, info.head_dim))
    offsets = checks.read_offsets(fields.offsets, len(ids))
    return Append(fields.layer, ids, indptr, offsets, k, v)


def build_decode(fields: DecodeFields, tensors: Tensors, info: ServiceInfo) -> Attention:
    """`q [B, num_qo_heads, head_dim]`, optional `k`, `v [B, num_kv_heads, head_dim]`."""
    checks.check_names(tensors, Q, KV)
    ids = checks.check_ids("sequences", fields.sequences)
    checks.check_query(tensors["q"], info, rows=len(ids))
    indptr = np.arange(len(ids) + 1, dtype=np.int32)
    return Attention("decode", qo_indptr=indptr, causal=False, **paged(fields, ids, tensors, info))


def build_prefill(fields: PrefillFields, tensors: Tensors, info: ServiceInfo) -> Attention:
    """`q [n, num_qo_heads, head_dim]`, optional k and v of n rows, optional mask."""
    checks.check_names(tensors, Q, KV | MASKS)
    ids = checks.check_ids("sequences", fields.sequences)
    q = tensors["q"]
    checks.check_query(q, info)
    indptr = checks.prefix_sums("qo_indptr", fields.qo_indptr, len(ids), q.shape[0])
    mask, packed = checks.read_mask(tensors)
    return Attention(
        "prefill",
        qo_indptr=indptr,
        causal=fields.causal,
        mask=mask,
        mask_packed=packed,
        **paged(fields, ids, tensors, info),
    )


def paged(fields: PagedFields, ids: Ids, tensors: Tensors, info: ServiceInfo) -> dict[str, Any]:
    """What decode and prefill have in common, as `Attention`'s arguments."""
    checks.check_layer(fields.layer, info)
    q, k, v = tensors["q"], tensors.get("k"), tensors.get("v")
    offsets = checks.read_offsets(fields.offsets, len(ids))
    if k is not None and v is not None:
        checks.check_pair(k, v, (q.shape[0], info.num_kv_heads, info.head_dim))
    elif k is not None or v is not None:
        missing = "k" if k is None else "v"
        raise InvalidRequest(f"tensors.{missing}", None, "k and v are given together or not at all")
    elif offsets is not None:
        raise InvalidRequest("offsets", fields.offsets, "says where k and v go: give them as well")
    return {
        "layer": fields.layer,
        "sequences": ids,
        "q": q,
        "k": k,
        "v": v,
        "offsets": offsets,
        "options": options(fields, fields.cascade),
    }


def options(fields: WindowFields, cascade: Any = "auto") -> Options:
    return Options(
        fields.sm_scale, fields.logits_soft_cap, fields.window_left, fields.lse_base, cascade
    )


def build_ragged_prefill(
    fields: RaggedPrefillFields, tensors: Tensors, info: ServiceInfo
) -> RaggedPrefill:
    """`q [n, Hq, D]`, `k`, `v [nnz, Hkv, D]`, heads and dimension the request's own."""
    checks.check_names(tensors, QKV, MASKS)
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    for name, array in (("q", q), ("k", k)):
        checks.check_dtype(name, array)
        if array.ndim != 3 or 0 in array.shape[1:]:
            rule = "must be [rows, heads, head_dim], with at least 1 head and dimension"
            raise InvalidRequest(f"{name}.shape", list(array.shape), rule)
    if q.shape[2] != k.shape[2]:
        raise InvalidRequest("q.shape", list(q.shape), f"k has head_dim {k.shape[2]}")
    checks.check_heads(q.shape[1], k.shape[1])
    checks.check_same_dtype("k", k, "q", q)
    checks.check_pair(k, v, k.shape)
    qo_indptr = checks.prefix_sums("qo_indptr", fields.qo_indptr, None, q.shape[0])
    batch = len(fields.qo_indptr) - 1
    kv_indptr = checks.prefix_sums("kv_indptr", fields.kv_indptr, batch, k.shape[0])
    mask, packed = checks.read_mask(tensors)
    if mask is not None:
        checks.check_mask_length(mask, packed, qo_indptr, kv_indptr)
    return RaggedPrefill(
        q, k, v, qo_indptr, kv_indptr, fields.causal, options(fields), mask, packed
    )


def build_cascade(fields: CascadeFields, tensors: Tensors, info: ServiceInfo) -> Cascade:
    """`q [n, num_qo_heads, head_dim]`; a level may leave out rows at either end."""
    checks.check_names(tensors, Q)
    checks.check_layer(fields.layer, info)
    q = tensors["q"]
    checks.check_query(q, info)
    levels: list[CascadeLevel] = []
    for index, level in enumerate(fields.levels):
        field = f"levels.{index}"
        ids = checks.check_ids(f"{field}.sequences", level.sequences)
        indptr = checks.prefix_sums(
            f"{field}.qo_indptr", level.qo_indptr, len(ids), q.shape[0], partial=True
        )
        levels.append(CascadeLevel(ids, indptr))
    chosen = Options(fields.sm_scale, fields.logits_soft_cap, -1, fields.lse_base)
    return Cascade(fields.layer, tuple(levels), q, fields.causal, fields.return_levels, chosen)


def build_merge(fields: MergeFields, tensors: Tensors, info: ServiceInfo) -> Merge:
    """Dense `o [T, n, H, D]`, `lse [T, n, H]`; or ragged `[nnz, H, D]`, `[nnz, H]` by indptr."""
    checks.check_names(tensors, STATE)
    o, lse = tensors["o"], tensors["lse"]
    checks.check_dtype("o", o)
    if lse.dtype != DTYPES["F32"]:
        raise InvalidRequest("lse.dtype", str(lse.dtype), "must be F32")
    form = "[T, n, H, D]" if fields.indptr is None else "[nnz, H, D]"
    if o.ndim != form.count(",") + 1 or 0 in o.shape[-2:]:
        raise InvalidRequest("o.shape", list(o.shape), f"must be {form}, H and D at least 1")
    if lse.shape != o.shape[:-1]:
        raise InvalidRequest("lse.shape", list(lse.shape), f"must be {list(o.shape[:-1])}")
    if fields.indptr is not None:
        check_answer(len(fields.indptr) - 1, o)
        indptr = checks.prefix_sums("indptr", fields.indptr, None, o.shape[0])
        return Merge(o, lse, indptr, fields.lse_base)
    lists, members, heads, dim = o.shape
    check_answer(lists, o)
    indptr = np.arange(lists + 1, dtype=np.int32) * np.int32(members)
    rows = lists * members
    return Merge(o.reshape(rows, heads, dim), lse.reshape(rows, heads), indptr, fields.lse_base)


def check_answer(lists: int, o: Array) -> None:
    """Lists without states take no bytes of the body, but a row of the answer each."""
    elements = lists * math.prod(o.shape[-2:])
    if elements > max(o.size, checks.MAX_EMPTY_ELEMENTS):
        raise InvalidRequest("o.shape", list(o.shape), f"{lists} lists make too large an answer")


def build_gather(fields: GatherFields, tensors: Tensors, info: ServiceInfo) -> Gather:
    """No tensors in."""
    checks.check_names(tensors, NONE)
    checks.check_layer(fields.layer, info)
    ids = checks.check_ids("sequences", fields.sequences)
    own = "fp16" if info.dtype.startswith("fp8") else info.dtype
    return Gather(fields.layer, ids, fields.dtype or own)
