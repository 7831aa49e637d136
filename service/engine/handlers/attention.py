"""Attention over pages: decode, prefill and explicit cascades, short or in slices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kernels.backend import Attend, AttentionState, Mask, Scoring
from kernels.tensor import Array, host_array
from service.core.sequences.books import Batch
from service.core.values import Extension
from service.engine.handlers.masks import ragged_mask
from service.engine.handlers.rows import write_steps
from service.engine.loop.job import Cost, Counts, Grouped, Mode, Seconds, Sliced, Step, Steps, Work
from service.engine.loop.place import AnswerLayout, answer_bytes
from service.engine.loop.request import Request
from service.engine.loop.slices import cut_attend, paced_spans, row_keys
from service.engine.store.plan_cache import Planned
from service.engine.store.store import Store
from service.image.writing import Shaped

if TYPE_CHECKING:
    from service.engine.handlers.shards.batch import ShardBatch

LOG2_E: Final = math.log2(math.e)
TEXT_BYTES: Final = 128
"""Room for the fields of an attention answer."""
SEGMENT_BYTES: Final = 2**14
"""What a segment of a plan costs beside its keys, after the first `FEW_SEGMENTS`, as bytes: 4 us
on the CPU, 8 ns on a device."""
FEW_SEGMENTS: Final = 64
FLOAT32: Final = np.dtype(np.float32)
MOST_KINDS: Final = 8
"""Kinds of queries that a plan keeps what is repeated for."""


def decode(
    store: Store, request: Request, seconds: Seconds, shards: ShardBatch | None = None
) -> Work:
    return paged(store, request, seconds, False, shards)


def prefill(
    store: Store, request: Request, seconds: Seconds, shards: ShardBatch | None = None
) -> Work:
    return paged(store, request, seconds, request.fields.causal, shards)


def paged(
    store: Store, request: Request, seconds: Seconds, causal: bool, shards: ShardBatch | None
) -> Work:
    """Append the rows that came along, plan, and attend."""
    fields, tensors = request.fields, request.tensors
    q, qo_indptr, known = tensors["q"], fields.qo_indptr_array, known_of(request)
    request.place.require_bytes(known.answer_bytes)
    rows = (tensors["k"], tensors["v"]) if "k" in tensors else None
    batch = store.look_up(request)
    extension, writing = None, False
    if rows is not None:
        extend = store.extend if shards is None else shards.extend
        added = np.diff(qo_indptr)
        extension = extend(fields.layer, batch, added, fields.offset_array, seconds)
        writing = store.is_long_write(rows)
        if not writing:
            store.write(extension, rows, seconds)  # read before the attention behind it is done
    elif shards is None and fields.offset_array is not None:
        store.tree.check_lengths(batch, fields.layer, fields.offset_array)
    try:
        started = time.monotonic()
        view = None if shards is None else shards.view
        planned = store.plans.sequences(
            batch, fields.layer, qo_indptr, causal, fields.cascade, view
        )
        if shards is None:
            mask = pooled_mask(store, request, batch, planned)
        else:
            mask = shards.mask(planned)
        repeated = repeated_of(store, request, planned, known.kind)
        seconds.plan += time.monotonic() - started
        laid = request.place.lay_out(repeated.answer)
    except BaseException:
        if extension is not None:
            store.undo(extension)
        raise
    out, lse, base = AttentionState(laid["o"], laid["lse"]), laid["lse"], fields.lse_base
    attend = Attend(fields.layer, q, planned.plan, repeated.scoring, mask, out)
    counts, cost = repeated.counts, repeated.cost
    if extension is not None:
        counts = counts.with_appended(extension.num_stored)
    if writing or store.pace.is_long("attend", cost):
        steps = paged_steps(store, request, attend, extension if writing else None, cost)
        return Sliced(steps, undoing(store, extension), counts=counts)
    return Grouped((attend,), lambda _: in_base(lse, base), cost, extension, counts)


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What a header says of its queries: room for the answer, and the kind of query that it is."""

    answer_bytes: int
    kind: Hashable


def known_of(request: Request) -> Known:
    """Worked out once for a request that repeats."""
    known: Known | None = request.known.get("paged")
    if known is None:
        fields, q = request.fields, request.tensors["q"]
        options = (fields.sm_scale, fields.logits_soft_cap, fields.window_left, fields.lse_base)
        room = answer_bytes(TEXT_BYTES, state_shapes(q))
        known = request.known["paged"] = Known(room, (q.shape, q.dtype, options))
    return known


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """What is the same for one kind of query at every layer that a plan serves."""

    scoring: Scoring
    cost: Cost
    counts: Counts
    answer: AnswerLayout


def repeated_of(store: Store, request: Request, planned: Planned, kind: Hashable) -> Repeated:
    """Made once for a plan and a kind of query, and kept with the plan."""
    found: Repeated | None = planned.repeated.get(kind)
    if found is not None:
        return found
    fields, q = request.fields, request.tensors["q"]
    store.num_qo_heads = q.shape[1]
    text = answer_text(fields.lse_base, planned)
    mode: Mode = "cascade" if planned.is_cascade else "flat"
    made = Repeated(
        scoring(q, fields),
        paged_cost(store, q, planned, fields.window_left),
        counts_of(store, planned, mode),
        AnswerLayout.of(text, state_shapes(q)),
    )
    if len(planned.repeated) >= MOST_KINDS:
        planned.repeated.clear()
    planned.repeated[kind] = made
    return made


def pooled_mask(store: Store, request: Request, batch: Batch, planned: Planned) -> Mask | None:
    """The request's mask over the whole kv_len, appended rows included."""
    tensors, fields = request.tensors, request.fields
    packed = "packed_mask" in tensors
    given = tensors.get("packed_mask" if packed else "mask")
    if given is None:
        return None
    kv_lens = store.tree.lengths(batch, fields.layer)
    return ragged_mask(given, packed, fields.qo_indptr_array, kv_lens, planned.plan.order)


def undoing(store: Store, extension: Extension | None) -> Callable[[], None]:
    def undo() -> None:
        if extension is not None:
            store.undo(extension)

    return undo


def paged_steps(
    store: Store, request: Request, attend: Attend, unwritten: Extension | None, cost: Cost
) -> Steps:
    """The append and then the attention, each in pieces of about a slice."""
    if unwritten is not None:
        rows = (request.tensors["k"], request.tensors["v"])
        yield from write_steps(store, unwritten, rows)
    yield from attend_steps(store, attend, cost)
    if attend.out is not None:
        in_base(host_array(attend.out.lse), request.fields.lse_base)


def attend_steps(store: Store, attend: Attend, cost: Cost) -> Steps:
    """One attention, some plan rows at a time; its states go to `attend.out`."""
    keys = row_keys(attend.plan, store.geometry.page_size, attend.scoring.window_left)
    fixed = Cost(num_bytes=float(keys.max(initial=0)) * store.geometry.token_bytes)
    for span in paced_spans(store.pace, "attend", keys + 1, cost, fixed):
        piece, rows = cut_attend(attend, span)
        states = yield Step(partial(store.backend.attend, [piece]), "attend", span.cost)
        if piece.out is None and attend.out is not None:
            host_array(attend.out.o)[rows] = host_array(states[0].o)
            host_array(attend.out.lse)[rows] = host_array(states[0].lse)


def cascade(store: Store, request: Request, seconds: Seconds) -> Work:
    """Explicit levels, merged by the backend; or each alone and then merged, when asked for."""
    fields, q = request.fields, request.tensors["q"]
    shapes = state_shapes(q)
    if fields.return_levels:
        for index in range(len(fields.levels)):
            shapes += state_shapes(q, f".{index}")
    request.place.require(TEXT_BYTES, shapes)
    started = time.monotonic()
    levels = [(level.ids, level.qo_indptr_array) for level in fields.levels]
    planned = store.plans.levels(levels, fields.layer, fields.causal, q.shape[0])
    seconds.plan += time.monotonic() - started
    laid = request.place.lay_text(answer_text(fields.lse_base, planned), shapes)
    out = AttentionState(laid["o"], laid["lse"])
    whole = Attend(fields.layer, q, planned.plan, scoring(q, fields), None, out)
    counted = counts_of(store, planned, "explicit")
    cost = paged_cost(store, q, planned, -1)
    parts = each_level(whole, laid) if fields.return_levels else (whole,)

    def finish(states: list[AttentionState]) -> None:
        if fields.return_levels:
            merge_levels(store, states, out)
        for state in (out, *(states if fields.return_levels else ())):
            in_base(host_array(state.lse), fields.lse_base)

    def steps() -> Steps:
        for part in parts:
            yield from attend_steps(store, part, Cost(cost.num_bytes, cost.flops / len(parts)))
        finish([part.out for part in parts if part.out is not None])

    if store.pace.is_long("attend", cost):
        return Sliced(steps(), lambda: None, counts=counted)
    return Grouped(parts, finish, cost, None, counted)


def each_level(whole: Attend, laid: dict[str, Array]) -> tuple[Attend, ...]:
    """The same rows, attending one level each."""
    return tuple(
        replace(
            whole,
            plan=replace(whole.plan, levels=(level,)),
            out=AttentionState(laid[f"o.{index}"], laid[f"lse.{index}"]),
        )
        for index, level in enumerate(whole.plan.levels)
    )


def merge_levels(store: Store, states: Sequence[AttentionState], out: AttentionState) -> None:
    """Row by row the states of all levels, into `out`."""
    num_levels, num_rows = len(states), states[0].o.shape[0]
    o = np.stack([host_array(state.o) for state in states], axis=1)
    lse = np.stack([host_array(state.lse) for state in states], axis=1)
    indptr = np.arange(num_rows + 1, dtype=np.int32) * np.int32(num_levels)
    o = o.reshape(num_rows * num_levels, *o.shape[2:])
    lse = lse.reshape(num_rows * num_levels, *lse.shape[2:])
    store.backend.merge(o, lse, indptr, out=out).result()


def scoring(q: Array, fields: Any) -> Scoring:
    """`fields` are those of an attention operation; a cascade has no window."""
    scale = fields.sm_scale
    return Scoring(
        q.shape[-1] ** -0.5 if scale is None else scale,
        fields.logits_soft_cap,
        getattr(fields, "window_left", -1),
    )


def state_shapes(q: Array, suffix: str = "") -> tuple[Shaped, ...]:
    """`o` and `lse` of the rows of `q`."""
    return ((f"lse{suffix}", FLOAT32, q.shape[:2]), (f"o{suffix}", q.dtype, q.shape))


def answer_text(lse_base: str, planned: Planned) -> str:
    """The fields of an attention answer, as JSON."""
    cascade = "true" if planned.is_cascade else "false"
    return f'{{"lse_base":"{lse_base}","levels":{planned.num_levels},"cascade":{cascade}}}'


def paged_cost(store: Store, q: Array, planned: Planned, window_left: int) -> Cost:
    """What attention moves and computes; keys are counted row by row where they may be many."""
    rows, heads, dim = q.shape
    num_bytes = float(planned.tokens_read) * store.geometry.token_bytes + 2.0 * q.nbytes
    num_bytes += SEGMENT_BYTES * max(planned.num_segments - FEW_SEGMENTS, 0)
    most = Cost(num_bytes, 4.0 * heads * dim * rows * planned.max_keys)
    if not store.pace.is_long("attend", most):
        return most
    keys = row_keys(planned.plan, store.geometry.page_size, window_left)
    return Cost(num_bytes, 4.0 * heads * dim * float(keys.sum()))


def counts_of(store: Store, planned: Planned, mode: Mode, appended: int = 0) -> Counts:
    token_bytes = store.geometry.token_bytes
    saved = (planned.tokens_flat - planned.tokens_read) * token_bytes
    return Counts(appended, planned.tokens_read * token_bytes, max(saved, 0), mode)


def in_base(lse: Array, base: str) -> None:
    """Turn natural log-sum-exps into those of the base asked for, in place; -inf stays -inf."""
    if base == "2":
        np.multiply(lse, np.float32(LOG2_E), out=lse)
