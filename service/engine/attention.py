"""Operations that make or merge attention states, and the one that reads K and V back."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Final, cast

import numpy as np

from kernels.backend import (
    Array,
    Attend,
    AttentionState,
    DType,
    Float32,
    Mask,
    Pending,
    RaggedAttend,
    Scoring,
)
from service.core.errors import InvalidRequest
from service.core.values import Extension
from service.engine import operations as ops
from service.engine.masks import ragged_mask
from service.engine.plans import Planned
from service.engine.store import Store
from service.engine.work import Alone, Counts, Grouped, Work
from service.metrics import Mode

LOG2_E: Final = math.log2(math.e)
LN_2: Final = math.log(2.0)


def attention(store: Store, operation: ops.Attention, timings: ops.Timings) -> Work:
    """Decode and prefill: append the rows that came along, plan, and attend."""
    extension = None
    if operation.k is not None and operation.v is not None:
        extension = append_first(store, operation, (operation.k, operation.v), timings)
    try:
        started = time.monotonic()
        options = operation.options
        planned = store.plans.sequences(
            operation.sequences,
            operation.layer,
            operation.qo_indptr,
            operation.causal,
            options.cascade,
        )
        mask = None if operation.mask is None else pooled_mask(store, operation, planned)
        timings.plan += time.monotonic() - started
    except BaseException:
        if extension is not None:
            store.undo(extension)
        raise
    attend = Attend(operation.layer, operation.q, planned.plan, scoring(operation.q, options), mask)
    mode: Mode = "cascade" if planned.is_cascade else "flat"
    appended = 0 if extension is None else extension.slots.size

    def finish(states: list[AttentionState]) -> ops.Attended:
        return attended(states[0], options.lse_base, planned.num_levels, planned.is_cascade)

    return Grouped((attend,), finish, extension, counts(store, planned, mode, appended))


def append_first(
    store: Store, operation: ops.Attention, rows: tuple[Array, Array], timings: ops.Timings
) -> Extension:
    qo_lens = np.diff(operation.qo_indptr)
    return store.append(
        operation.layer, operation.sequences, qo_lens, operation.offsets, rows, timings
    )


def pooled_mask(store: Store, operation: ops.Attention, planned: Planned) -> Mask | None:
    if operation.mask is None:
        return None
    kv_lens = store.tree.lengths(operation.sequences, operation.layer)
    order = planned.plan.order
    return ragged_mask(operation.mask, operation.mask_packed, operation.qo_indptr, kv_lens, order)


def ragged_prefill(store: Store, operation: ops.RaggedPrefill, _: ops.Timings) -> Work:
    options = operation.options
    refuse_cascade(options, "ragged prefill has no pages to share")
    mask = None
    if operation.mask is not None:
        kv_lens = np.diff(operation.kv_indptr)
        mask = ragged_mask(
            operation.mask, operation.mask_packed, operation.qo_indptr, kv_lens, None
        )
    request = RaggedAttend(
        q=operation.q,
        k=operation.k,
        v=operation.v,
        qo_indptr=operation.qo_indptr,
        kv_indptr=operation.kv_indptr,
        causal=operation.causal,
        scoring=scoring(operation.q, options),
        mask=mask,
    )

    def finish(state: AttentionState) -> ops.Attended:
        return attended(state, options.lse_base, 1, False)

    return Alone(lambda: store.backend.attend_ragged(request), finish)


def cascade(store: Store, operation: ops.Cascade, timings: ops.Timings) -> Work:
    """Explicit levels, merged by the backend; or each alone and then merged, when asked for."""
    options = operation.options
    refuse_cascade(options, "the levels of an explicit cascade are the caller's")
    if options.window_left >= 0:
        rule = "a row's position is known in one sequence only: no window over explicit levels"
        raise InvalidRequest("window_left", options.window_left, rule)
    started = time.monotonic()
    planned = store.plans.levels(
        operation.levels, operation.layer, operation.causal, operation.q.shape[0]
    )
    timings.plan += time.monotonic() - started
    whole = Attend(operation.layer, operation.q, planned.plan, scoring(operation.q, options))
    counted = counts(store, planned, "explicit")

    def finish(states: list[AttentionState]) -> ops.Attended:
        return attended(states[0], options.lse_base, planned.num_levels, planned.is_cascade)

    def finish_levels(states: list[AttentionState]) -> ops.Attended:
        merged = attended(
            merge_levels(store, states), options.lse_base, planned.num_levels, planned.is_cascade
        )
        told = tuple((state.o, from_natural(state.lse, options.lse_base)) for state in states)
        return replace(merged, level_states=told)

    if not operation.return_levels:
        return Grouped((whole,), finish, None, counted)
    return Grouped(one_per_level(whole), finish_levels, None, counted)


def one_per_level(whole: Attend) -> tuple[Attend, ...]:
    """The same rows, attending one level each."""
    plan = whole.plan
    return tuple(replace(whole, plan=replace(plan, levels=(level,))) for level in plan.levels)


def merge_levels(store: Store, states: list[AttentionState]) -> AttentionState:
    """Row by row the states of all levels."""
    num_levels, num_rows = len(states), states[0].o.shape[0]
    o = np.stack([state.o for state in states], axis=1)
    lse = np.stack([state.lse for state in states], axis=1)
    indptr = np.arange(num_rows + 1, dtype=np.int32) * np.int32(num_levels)
    o = o.reshape(num_rows * num_levels, *o.shape[2:])
    lse = lse.reshape(num_rows * num_levels, *lse.shape[2:])
    return store.backend.merge(o, lse, indptr).result()


def merge(store: Store, operation: ops.Merge, _: ops.Timings) -> Work:
    base = operation.lse_base
    lse = operation.lse * np.float32(LN_2) if base == "2" else operation.lse

    def start() -> Pending[AttentionState]:
        return store.backend.merge(operation.o, lse, operation.indptr)

    return Alone(start, lambda state: attended(state, base, 1, False))


def gather(store: Store, operation: ops.Gather, timings: ops.Timings) -> Work:
    started = time.monotonic()
    kv_indptr, slots = store.tree.slots(operation.sequences, operation.layer)
    timings.plan += time.monotonic() - started
    dtype = cast(DType, operation.dtype)

    def finish(rows: tuple[Array, Array]) -> ops.Gathered:
        return ops.Gathered(*rows, kv_indptr)

    return Alone(lambda: store.backend.gather(operation.layer, slots, dtype), finish)


def scoring(q: Array, options: ops.Options) -> Scoring:
    scale = options.sm_scale
    return Scoring(
        q.shape[-1] ** -0.5 if scale is None else scale,
        options.logits_soft_cap,
        options.window_left,
    )


def counts(store: Store, planned: Planned, mode: Mode, appended: int = 0) -> Counts:
    token_bytes = store.geometry.token_bytes
    saved = (planned.tokens_flat - planned.tokens_read) * token_bytes
    return Counts(appended, planned.tokens_read * token_bytes, saved, mode)


def attended(
    state: AttentionState, base: ops.LseBase, num_levels: int, is_cascade: bool
) -> ops.Attended:
    return ops.Attended(state.o, from_natural(state.lse, base), base, num_levels, is_cascade)


def from_natural(lse: Float32, base: ops.LseBase) -> Float32:
    """Natural log-sum-exp in the base asked for; -inf stays -inf."""
    return lse if base == "e" else lse * np.float32(LOG2_E)


def refuse_cascade(options: ops.Options, rule: str) -> None:
    if options.cascade != "auto":
        raise InvalidRequest("cascade", options.cascade, rule)
