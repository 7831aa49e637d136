"""Opens a step: extends sequences at all its layers, makes one plan, and starts its lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import DTYPES

from kernels.backend import Attend, Scoring
from kernels.lanes.lane import FLAG_BYTES, LAYER_FLAGS, Lane, Slot, StepWork
from kernels.masks import OwnMask, own_sizes
from kernels.tensor import host_array
from service.core.sequences.books import Batch
from service.core.values import Extension
from service.engine.handlers.attention import LOG2_E, attend_slices, counts_of, paged_cost
from service.engine.handlers.token_ids import has_ids, learn, lens_of
from service.engine.store.plan_cache import Planned
from service.engine.store.store import Store
from service.engine.work.request import Request
from service.engine.work.work import Counts, OpenedStep, Seconds
from service.errors import InvalidRequest
from service.families import Mode
from service.operations.step import StepFields

MOST_MASK_BYTES: Final = 2**24
"""Maximum size of a step's mask once it has a bit for each row and key."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlace:
    """The lane of a step, and the replies to its caller: it is accepted, a layer is done."""

    lane: Lane
    send_opened: Callable[[dict[str, Any]], None]
    send_done: Callable[[int], None]


def step(store: Store, request: Request, seconds: Seconds) -> OpenedStep:
    """Extend, plan, and start; the layers then follow their caller."""
    fields, where = request.fields, request.step
    if not isinstance(where, StepPlace):
        raise RuntimeError("a step came without a lane: this is a bug")
    check_places(store, fields, where.lane.arena_bytes)
    started = time.monotonic()
    if fields.op == "echo":
        run = where.lane.begin(step_work(fields, None, None))
        where.send_opened({"levels": 0, "cascade": False})
        return OpenedStep(run, lambda: None, where.lane, where.send_done)
    batch = store.tree.books.look_up(fields.ids)
    mask = own_mask(store, fields, batch)
    extension = extend(store, fields, batch)
    report: dict[str, list[int]] = {}
    if has_ids(request) and extension is not None:
        learn(store, request, extension, fields.qo_indptr_array)
        report = lens_of(store, extension.leaves)
    try:
        planned = store.plans.sequences(
            batch,
            fields.layers[0],
            fields.qo_indptr_array,
            fields.causal and fields.op == "prefill",
            fields.cascade,
        )
        slots = extension.slots if extension is not None and fields.append else None
        work = step_work(fields, planned, slots, store.geometry.group_of(fields.layers[0]).head_dim)
        pieces = partial(attend_in_pieces, store, planned)
        run = where.lane.begin(replace(work, mask=mask, attend=pieces))
    except BaseException:
        store.undo(extension)
        raise
    seconds.plan += time.monotonic() - started
    where.send_opened({"levels": planned.num_levels, "cascade": planned.is_cascade} | report)
    return OpenedStep(
        run,
        partial(store.undo, extension),
        where.lane,
        where.send_done,
        counts_of_step(store, fields, planned, extension),
        rows=extension,
    )


def extend(store: Store, fields: StepFields, batch: Batch) -> Extension | None:
    """Reserve pages for the new tokens at every layer; None where there are neither tokens nor
    ids. Raises `InvalidRequest` for layers of several groups."""
    groups = sorted({store.tree.group_of(layer) for layer in fields.layers})
    if len(groups) > 1:
        rule = f"they are of the layer groups {groups}, and a step has one plan: a step for each"
        raise InvalidRequest("layers", fields.layers, rule)
    if fields.append or fields.token_ids is not None:
        counts = fields.counts if fields.append else np.zeros_like(fields.counts)
        return store.tree.extend_layers(fields.layers, batch, counts, fields.offset_array)
    store.tree.check_level(fields.layers, batch)
    if fields.offset_array is not None:
        store.tree.check_lengths(batch, fields.layers[0], fields.offset_array)
    return None


def own_mask(store: Store, fields: StepFields, batch: Batch) -> OwnMask | None:
    """The mask of a step, None without. Raises `InvalidRequest` for one that becomes too large."""
    if (place := fields.mask_place) is None:
        return None
    lens = store.tree.lengths(batch, fields.layers[0])
    lens = lens + fields.counts if fields.append else lens
    mask = OwnMask(place, fields.mask is None, fields.counts, lens)
    if (size := 4 * mask.stride * fields.rows) > MOST_MASK_BYTES:
        rule = f"a bit for each row and key takes {size} bytes, at most {MOST_MASK_BYTES}: "
        raise InvalidRequest("mask", place, rule + "send fewer rows in a step")
    return mask


def step_work(
    fields: StepFields, planned: Planned | None, slots: Any, head_dim: int = 1
) -> StepWork:
    scale = head_dim**-0.5 if fields.sm_scale is None else fields.sm_scale
    return StepWork(
        layers=tuple(fields.layers),
        slots=tuple(Slot(one.q, one.k, one.v, one.o, one.lse) for one in fields.slots or ()),
        flags=fields.flags,
        rows=fields.rows,
        num_qo_heads=fields.num_qo_heads,
        dtype=DTYPES[fields.dtype],
        append_slots=slots,
        plan=None if planned is None else planned.plan,
        scorings=tuple(Scoring(scale, fields.logits_soft_cap, window) for window in fields.windows),
        lse_scale=LOG2_E if fields.lse_base == "2" else 1.0,
        sinks=fields.sinks,
    )


def attend_in_pieces(store: Store, planned: Planned, attend: Attend) -> Iterator[None]:
    """Run a layer's attention, a slice at a time."""
    pace = store.pace
    cost = paged_cost(
        store, host_array(attend.q), planned, attend.scoring.window_left, attend.layer
    )
    if not pace.is_long("attend", cost):
        store.backend.attend([attend]).result()
        return
    slices, states = attend_slices(store, attend, cost), None
    while True:
        try:
            piece = slices.send(states)
        except StopIteration:
            return
        started = time.monotonic()
        states = piece.start().result()
        pace.correct(piece.kind, piece.cost, time.monotonic() - started)
        yield


def check_places(store: Store, fields: StepFields, arena_bytes: int) -> None:
    """Raises `InvalidRequest` unless the flags and every slot are inside the arena."""
    flags = LAYER_FLAGS * FLAG_BYTES * store.geometry.num_layers
    check_place("flags", fields.flags, flags, arena_bytes)
    if fields.op == "echo":
        for slot in fields.slots or ():
            check_place("slots", slot.lse, 4, arena_bytes)
        return
    g, width = store.geometry, DTYPES[fields.dtype].itemsize
    group, rows = g.group_of(fields.layers[0]), fields.rows * width
    stored = rows * group.num_kv_heads if fields.append else 0
    lse = 4 * fields.rows * fields.num_qo_heads
    if fields.sinks is not None:
        check_place("sinks", fields.sinks, 4 * g.num_layers * fields.num_qo_heads, arena_bytes)
    if (place := fields.mask_place) is not None:
        size = int(own_sizes(fields.counts, fields.mask is None).sum())
        check_place("packed_mask" if fields.mask is None else "mask", place, size, arena_bytes)
    sizes = {
        "q": rows * fields.num_qo_heads * group.head_dim,
        "k": stored * group.head_dim,
        "v": stored * group.v_head_dim,
        "o": rows * fields.num_qo_heads * group.v_head_dim,
        "lse": lse,
    }
    for number, slot in enumerate(fields.slots or ()):
        for name, num_bytes in sizes.items():
            check_place(f"slots.{number}.{name}", getattr(slot, name), num_bytes, arena_bytes)


def check_place(field: str, place: int, num_bytes: int, arena_bytes: int) -> None:
    if place + num_bytes > arena_bytes:
        rule = f"its {num_bytes} bytes must be inside the arena of {arena_bytes} bytes"
        raise InvalidRequest(field, place, rule)


def counts_of_step(
    store: Store, fields: StepFields, planned: Planned, extension: Extension | None
) -> Counts:
    """Counts of all layers together."""
    mode: Mode = "cascade" if planned.is_cascade else "flat"
    one, layers = counts_of(store, planned, mode, fields.layers[0]), len(fields.layers)
    added = 0 if extension is None else extension.num_stored
    return replace(
        one,
        appended=added * layers,
        read_bytes=one.read_bytes * layers,
        saved_bytes=one.saved_bytes * layers,
    )
