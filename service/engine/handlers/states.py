"""Attention without the pool: over keys in the request, and merges of attention states."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from kernels.backend import AttentionState, Pending, RaggedAttend
from service.engine.handlers.attention import (
    FLOAT32,
    TEXT_BYTES,
    copied_sinks,
    in_base,
    ragged_mask,
    scoring,
    state_shapes,
)
from service.engine.handlers.slices import cut_ragged, paced_spans, ragged_keys
from service.engine.store.store import Store
from service.engine.work.request import Request
from service.engine.work.work import Cost, Seconds, Slice, SlicedWork, Slices, SoloLaunch, Work

LN_2: Final = math.log(2.0)


def ragged_prefill(store: Store, request: Request, _: Seconds) -> Work:
    fields, tensors = request.fields, request.tensors
    q = tensors["q"]
    shapes = state_shapes(q, request.tensors["v"].shape[2])
    request.place.require(TEXT_BYTES, shapes)
    packed = "packed_mask" in tensors
    given, mask = tensors.get("packed_mask" if packed else "mask"), None
    if given is not None:
        kv_lens = np.diff(fields.kv_indptr_array)
        mask = ragged_mask(given, packed, fields.qo_indptr_array, kv_lens, None)
    laid = request.place.lay({"lse_base": fields.lse_base, "levels": 1, "cascade": False}, shapes)
    out = AttentionState(laid["o"], laid["lse"])
    whole = RaggedAttend(
        q=q,
        k=tensors["k"],
        v=tensors["v"],
        qo_indptr=fields.qo_indptr_array,
        kv_indptr=fields.kv_indptr_array,
        causal=fields.causal,
        scoring=scoring(q, fields),
        mask=mask,
        out=out,
        sinks=copied_sinks(tensors["sinks"]) if "sinks" in tensors else None,
    )
    keys = ragged_keys(whole)
    moved = 2.0 * q.nbytes + whole.k.nbytes + whole.v.nbytes
    cost = Cost(moved, 4.0 * q.shape[1] * q.shape[2] * float(keys.sum()))

    def slices() -> Slices:
        """Some rows at a time, with the keys that they can see."""
        positions = whole.row_positions
        row_bytes = (whole.k.nbytes + whole.v.nbytes) / max(whole.k.shape[0], 1)
        fixed = Cost(num_bytes=row_bytes * float(keys.max(initial=0)))
        for span in paced_spans(store.pace, "ragged", keys + 1, cost, fixed):
            piece = cut_ragged(whole, positions, span)
            yield Slice(partial(store.backend.attend_ragged, piece), "ragged", span.cost)
        in_base(laid["lse"], fields.lse_base)

    if store.pace.is_long("ragged", cost):
        return SlicedWork(slices())
    finish = partial(in_base, laid["lse"], fields.lse_base)
    return SoloLaunch(
        partial(store.backend.attend_ragged, whole), lambda _: finish(), "ragged", cost
    )


def merge(store: Store, request: Request, _: Seconds) -> Work:
    fields = request.fields
    o, lse = request.tensors["o"], request.tensors["lse"]
    indptr = fields.indptr_array
    if indptr is None:
        lists, members = o.shape[:2]
        indptr = np.arange(lists + 1, dtype=np.int32) * np.int32(members)
        o, lse = (state.reshape(lists * members, *state.shape[2:]) for state in (o, lse))
    num_lists, (heads, dim) = indptr.size - 1, o.shape[1:]
    shapes = (("lse", FLOAT32, (num_lists, heads)), ("o", o.dtype, (num_lists, heads, dim)))
    request.place.require(TEXT_BYTES, shapes)
    laid = request.place.lay({"lse_base": fields.lse_base}, shapes)
    out = AttentionState(laid["o"], laid["lse"])
    given = request.tensors.get("sinks")
    sinks = None if given is None else copied_sinks(given)
    natural = lse * np.float32(LN_2) if fields.lse_base == "2" else lse
    cost = Cost(num_bytes=float(o.nbytes + out.o.nbytes), flops=4.0 * o.size)

    def start(first: int, last: int) -> Pending[Any]:
        rows = slice(int(indptr[first]), int(indptr[last]))
        part = indptr[first : last + 1] - indptr[first]
        into = replace(out, o=out.o[first:last], lse=out.lse[first:last])
        return store.backend.merge(o[rows], natural[rows], part, out=into, sinks=sinks)

    def slices() -> Slices:
        weights = np.diff(indptr).astype(np.int64) + 1
        for span in paced_spans(store.pace, "merge", weights, cost):
            yield Slice(partial(start, span.first, span.last), "merge", span.cost)
        in_base(laid["lse"], fields.lse_base)

    if store.pace.is_long("merge", cost):
        return SlicedWork(slices())
    finish = partial(in_base, laid["lse"], fields.lse_base)
    return SoloLaunch(partial(start, 0, num_lists), lambda _: finish(), "merge", cost)
