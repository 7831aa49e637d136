"""Attention over pages: decode, prefill and explicit cascades, at once or in slices."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from attnd.wire.images import Shaped

from kernels.backend import Attend, AttentionState, Int32, Mask, Scoring
from kernels.masks import mask_row_offsets, packbits
from kernels.tensor import Array, host_array
from service.core.nodes import Leaf
from service.engine.handlers.rows import write_slices
from service.engine.handlers.slices import cut_attend, paced_spans, row_keys, shared_keys
from service.engine.handlers.token_ids import has_ids, learn, lens_text, room
from service.engine.store.plan_cache import Planned
from service.engine.store.store import Store, write_cost
from service.engine.work.request import AnswerLayout, Request, answer_bytes
from service.engine.work.work import (
    Cost,
    Counts,
    Seconds,
    SharedAttention,
    Slice,
    SlicedWork,
    Slices,
    Work,
)
from service.families import Mode
from service.operations.schema.fields import check_mask_length, check_sinks

LOG2_E: Final = math.log2(math.e)
TEXT_BYTES: Final = 128
"""Room for the fields of an attention answer."""
SEGMENT_BYTES: Final = 2**14
"""Cost of a segment of a plan beside its keys, after the first `FEW_SEGMENTS`, as bytes: 4 us on
the CPU, 8 ns on a device."""
FEW_SEGMENTS: Final = 64
FLOAT32: Final = np.dtype(np.float32)
MOST_KINDS: Final = 8
"""Maximum kinds of queries for which a plan keeps an `AttentionPlan`."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryFacts:
    """Facts that follow from a request's header: size of the answer, and the kind of query."""

    answer_bytes: int
    kind: Hashable


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Scoring, cost and answer of one kind of query, the same at every layer of a plan."""

    scoring: Scoring
    cost: Cost
    counts: Counts
    answer: AnswerLayout


def attend(store: Store, request: Request, seconds: Seconds) -> Work:
    """A decode or prefill: append the rows that came along, plan, and attend."""
    fields, tensors = request.fields, request.tensors
    q, qo_indptr = tensors["q"], fields.qo_indptr_array
    facts: QueryFacts = request.known.get("query") or query_facts(store, request)
    request.place.require_bytes(facts.answer_bytes)
    sinks = copied_sinks(tensors["sinks"]) if "sinks" in tensors else None
    batch = store.look_up(request)
    extension, writing, is_naming = None, False, has_ids(request)
    if is_naming and "k" not in tensors:
        none = np.zeros(qo_indptr.size - 1, np.int32)
        extension = store.extend(fields.layer, batch, none, fields.offset_array, seconds)
        learn(store, request, extension, qo_indptr)
    elif "k" in tensors:
        rows = (tensors["k"], tensors["v"])
        added = np.diff(qo_indptr)
        extension = store.extend(fields.layer, batch, added, fields.offset_array, seconds)
        if is_naming:
            learn(store, request, extension, qo_indptr)
        writing = store.pace.is_long("append", write_cost(rows))
        if not writing:
            store.write(extension, rows, seconds)  # read before the attention behind it is done
    elif fields.offset_array is not None:
        store.tree.check_lengths(batch, fields.layer, fields.offset_array)
    try:
        started = time.monotonic()
        causal = fields.causal
        planned = store.plans.sequences(batch, fields.layer, qo_indptr, causal, fields.cascade)
        mask = None
        if (given := tensors.get("packed_mask", tensors.get("mask"))) is not None:
            packed, kv_lens = "packed_mask" in tensors, store.tree.lengths(batch, fields.layer)
            mask = ragged_mask(given, packed, qo_indptr, kv_lens, planned.plan.order)
        plan: AttentionPlan = planned.by_kind.get(facts.kind) or attention_plan(
            store, request, planned, facts.kind
        )
        seconds.plan += time.monotonic() - started
        if is_naming and extension is not None:
            laid = lay_reporting(store, request, planned, extension.leaves)
        else:
            laid = request.place.lay_out(plan.answer)
    except BaseException:
        store.undo(extension)
        raise
    lse, base = laid["lse"], fields.lse_base
    out = AttentionState(laid["o"], lse)
    work = Attend(fields.layer, q, planned.plan, plan.scoring, mask, out, sinks)
    counts = plan.counts
    if extension is not None:
        counts = replace(counts, appended=extension.num_stored)
    if not writing and not store.pace.is_long("attend", plan.cost):
        finish = None if base == "e" else lambda _: in_base(lse, base)
        return SharedAttention((work,), finish, plan.cost, extension, counts)

    def slices() -> Slices:
        if writing and extension is not None:
            yield from write_slices(store, extension, rows)
        yield from attend_slices(store, work, plan.cost)
        in_base(lse, base)

    return SlicedWork(slices(), partial(store.undo, extension), counts=counts, rows=extension)


def lay_reporting(
    store: Store, request: Request, planned: Planned, leaves: Sequence[Leaf]
) -> dict[str, Array]:
    """The answer to a call with token ids; what is known of them then is filled in at the end."""
    place, start = request.place, answer_text(request.fields.lse_base, planned)[:-1]

    def text() -> str:
        return start + lens_text(store, leaves) + "}"

    request.report = lambda: place.lay_again(text())
    shapes = state_shapes(request.tensors["q"], value_dim(store, request.fields.layer))
    return place.lay_text(text(), shapes)


def query_facts(store: Store, request: Request) -> QueryFacts:
    """Made once for a request that repeats."""
    fields, q = request.fields, request.tensors["q"]
    options = (fields.sm_scale, fields.logits_soft_cap, fields.window_left, fields.lse_base)
    shapes = state_shapes(q, value_dim(store, fields.layer))
    needed = answer_bytes(TEXT_BYTES + room(request), shapes)
    facts = request.known["query"] = QueryFacts(needed, (q.shape, q.dtype, options))
    return facts


def attention_plan(
    store: Store, request: Request, planned: Planned, kind: Hashable
) -> AttentionPlan:
    """Made once for a plan and a kind of query, and kept with the plan."""
    fields, q = request.fields, request.tensors["q"]
    store.num_qo_heads = q.shape[1]
    plan = AttentionPlan(
        scoring(q, fields),
        paged_cost(store, q, planned, fields.window_left, fields.layer),
        counts_of(store, planned, "cascade" if planned.is_cascade else "flat", fields.layer),
        AnswerLayout.of(
            answer_text(fields.lse_base, planned),
            state_shapes(q, value_dim(store, fields.layer)),
        ),
    )
    if len(planned.by_kind) >= MOST_KINDS:
        planned.by_kind.clear()
    planned.by_kind[kind] = plan
    return plan


def attend_slices(store: Store, attend: Attend, cost: Cost) -> Slices:
    """One attention, some plan rows at a time; its states go to `attend.out`."""
    page_size = store.tree.page_size_at(attend.layer)
    keys = row_keys(attend.plan, page_size, attend.scoring.window_left)
    shared = shared_keys(attend.plan, page_size)
    again = min(shared, int(keys.max(initial=0)))
    fixed = Cost(num_bytes=float(again) * store.geometry.group_of(attend.layer).token_bytes)
    for span in paced_spans(store.pace, "attend", keys + 1, cost, fixed):
        piece, rows = cut_attend(attend, span)
        states = yield Slice(partial(store.backend.attend, [piece]), "attend", span.cost)
        if piece.out is None and attend.out is not None:
            host_array(attend.out.o)[rows] = host_array(states[0].o)
            host_array(attend.out.lse)[rows] = host_array(states[0].lse)


def cascade(store: Store, request: Request, seconds: Seconds) -> Work:
    """Explicit levels, merged by the backend; with `return_levels`, each alone and then merged."""
    fields, q = request.fields, request.tensors["q"]
    dim = value_dim(store, fields.layer)
    shapes = state_shapes(q, dim)
    if fields.return_levels:
        for index in range(len(fields.levels)):
            shapes += state_shapes(q, dim, f".{index}")
    request.place.require(TEXT_BYTES, shapes)
    given = request.tensors.get("sinks")
    sinks = None if given is None else copied_sinks(given)
    started = time.monotonic()
    levels = [(level.ids, level.qo_indptr_array) for level in fields.levels]
    planned = store.plans.levels(levels, fields.layer, fields.causal, q.shape[0])
    seconds.plan += time.monotonic() - started
    laid = request.place.lay_text(answer_text(fields.lse_base, planned), shapes)
    out = AttentionState(laid["o"], laid["lse"])
    whole = Attend(fields.layer, q, planned.plan, scoring(q, fields), None, out, sinks)
    counted = counts_of(store, planned, "explicit", fields.layer)
    cost = paged_cost(store, q, planned, -1, fields.layer)
    parts = each_level(whole, laid) if fields.return_levels else (whole,)

    def finish(states: list[AttentionState]) -> None:
        if fields.return_levels:
            merge_levels(store, states, out, sinks)
        for state in (out, *(states if fields.return_levels else ())):
            in_base(host_array(state.lse), fields.lse_base)

    def slices() -> Slices:
        for part in parts:
            yield from attend_slices(store, part, Cost(cost.num_bytes, cost.flops / len(parts)))
        finish([part.out for part in parts if part.out is not None])

    if store.pace.is_long("attend", cost):
        return SlicedWork(slices(), counts=counted)
    return SharedAttention(parts, finish, cost, None, counted)


def each_level(whole: Attend, laid: dict[str, Array]) -> tuple[Attend, ...]:
    """The same attention, one level at a time; sinks enter where these are merged."""
    return tuple(
        replace(
            whole,
            plan=replace(whole.plan, levels=(level,)),
            out=AttentionState(laid[f"o.{index}"], laid[f"lse.{index}"]),
            sinks=None,
        )
        for index, level in enumerate(whole.plan.levels)
    )


def merge_levels(
    store: Store, states: Sequence[AttentionState], out: AttentionState, sinks: Array | None
) -> None:
    """Merge the states of all levels, row by row, into `out`."""
    num_levels, num_rows = len(states), states[0].o.shape[0]
    o = np.stack([host_array(state.o) for state in states], axis=1)
    lse = np.stack([host_array(state.lse) for state in states], axis=1)
    indptr = np.arange(num_rows + 1, dtype=np.int32) * np.int32(num_levels)
    o = o.reshape(num_rows * num_levels, *o.shape[2:])
    lse = lse.reshape(num_rows * num_levels, *lse.shape[2:])
    store.backend.merge(o, lse, indptr, out=out, sinks=sinks).result()


def copied_sinks(given: Array) -> Array:
    """A request's sinks, copied, since the caller may write to them.

    Raises InvalidRequest for NaN and +inf.
    """
    sinks = np.array(given)
    check_sinks(sinks)
    return sinks


def scoring(q: Array, fields: Any) -> Scoring:
    """From the fields of an attention operation; a cascade has no window."""
    scale = fields.sm_scale
    return Scoring(
        q.shape[-1] ** -0.5 if scale is None else scale,
        fields.logits_soft_cap,
        getattr(fields, "window_left", -1),
    )


def value_dim(store: Store, layer: int) -> int:
    """Dimension of the heads of v and o at a layer."""
    return store.geometry.group_of(layer).v_head_dim


def state_shapes(q: Array, dim: int, suffix: str = "") -> tuple[Shaped, ...]:
    """The states of q, whose o has heads of `dim` values."""
    rows = q.shape[:2]
    return ((f"lse{suffix}", FLOAT32, rows), (f"o{suffix}", q.dtype, (*rows, dim)))


def answer_text(lse_base: str, planned: Planned) -> str:
    """The fields of an attention answer, as JSON."""
    cascade = "true" if planned.is_cascade else "false"
    return f'{{"lse_base":"{lse_base}","levels":{planned.num_levels},"cascade":{cascade}}}'


def paged_cost(store: Store, q: Array, planned: Planned, window_left: int, layer: int) -> Cost:
    """Bytes and flops of attention; keys are counted row by row where they may be many."""
    rows, heads, dim = q.shape
    token_bytes = store.geometry.group_of(layer).token_bytes
    num_bytes = float(planned.tokens_read) * token_bytes + 2.0 * q.nbytes
    num_bytes += SEGMENT_BYTES * max(planned.num_segments - FEW_SEGMENTS, 0)
    most = Cost(num_bytes, 4.0 * heads * dim * rows * planned.max_keys)
    if not store.pace.is_long("attend", most):
        return most
    keys = row_keys(planned.plan, planned.page_size, window_left)
    return Cost(num_bytes, 4.0 * heads * dim * float(keys.sum()))


def counts_of(store: Store, planned: Planned, mode: Mode, layer: int) -> Counts:
    """Bytes that a plan reads, and bytes that it saves compared with flat attention."""
    token_bytes = store.geometry.group_of(layer).token_bytes
    saved = (planned.tokens_flat - planned.tokens_read) * token_bytes
    return Counts(0, planned.tokens_read * token_bytes, max(saved, 0), mode)


def in_base(lse: Array, base: str) -> None:
    """Convert natural log-sum-exps to a base ("e" or "2"), in place; -inf stays -inf."""
    if base == "2":
        np.multiply(lse, np.float32(LOG2_E), out=lse)


def ragged_mask(
    mask: Array, packed: bool, qo_indptr: Int32, kv_lens: Int32, order: Int32 | None
) -> Mask:
    """Mask of requests with `qo_indptr` [B+1] rows and `kv_lens` [B] keys, for plan rows.

    `mask` is a BOOL per query and key, row-major, requests back to back; or, `packed`, those as
    bits (little order), each request's segment padded to a byte. `order` is the plan's (None: the
    identity). Raises `InvalidRequest` for a mask of another length.
    """
    qo_lens = np.diff(qo_indptr)
    check_mask_length(mask.size, packed, qo_lens, kv_lens)
    bits = mask.reshape(-1).view(np.uint8) if packed else packbits(mask)
    offsets = mask_row_offsets(qo_lens, kv_lens, padded=packed)
    return Mask(bits, offsets if order is None else offsets[order])
