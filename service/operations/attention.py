"""Attention operations: decode, prefill, ragged prefill, and cascade with explicit levels."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Annotated, ClassVar, Final, Literal

import numpy as np
from attnd.wire.bounds import MAX_SEQUENCES
from pydantic import Field

from service.operations.schema.fields import (
    INT32_MAX,
    BatchFields,
    Cap,
    Count,
    Entries,
    ExpectingFields,
    Fields,
    Indptr,
    InfoAnswer,
    Int32,
    LseBase,
    Scale,
    check_batch,
    check_ids,
    check_ids_given,
    check_indptr,
    check_layer,
    check_mask_length,
    check_one_mask,
    check_window,
    int32,
    one_each,
    pool_sizes,
    refuse,
)
from service.operations.schema.spec import Operation
from service.operations.schema.tensors import MASKS, ROW_IDS, pair, query, sinks, state

MAX_LEVELS: Final = 16


class ScoringFields(Fields):
    """Fields of every attention operation."""

    sm_scale: Scale | None = None
    """Factor of q·k; absent: head_dim ** -0.5."""
    logits_soft_cap: Cap = 0.0
    """Soft cap: scores become cap * tanh(score / cap); 0: off."""
    lse_base: LseBase = "e"
    """Base of the log-sum-exp in the reply: e or 2."""


class WindowFields(ScoringFields):
    window_left: Annotated[int, Field(ge=-1, le=INT32_MAX)] = -1
    """Window size: number of keys before its own position that a query sees; -1: all. Absent at a
    layer of a group with a window: that window, and no other is accepted."""


class PagedFields(ExpectingFields, WindowFields):
    layer: Count
    cascade: Literal["auto", "always", "never"] = "auto"
    """Whether KV that several of the sequences share is read once for all of them."""

    def sizes(self, info: InfoAnswer) -> dict[str, int]:
        return pool_sizes(info, self.layer) | {"B": len(self.sequences)}

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        """Rules that decode and prefill share."""
        check_layer(self.layer, info)
        if (own := info.shapes[self.layer].window) is not None:
            if "window_left" in self.model_fields_set:
                check_window(self.layer, self.window_left, info)
            self.__dict__["window_left"] = own - 1
        check_batch(self)
        check_ids_given(self, entries, entries["q"].shape[0], len(self.sequences))
        missing = [name for name in ("k", "v") if name not in entries]
        if len(missing) == 1:
            refuse(f"tensors.{missing[0]}", None, "k and v are given together or not at all")


class DecodeFields(PagedFields):
    causal: ClassVar[bool] = False
    """Its one row per sequence has no later keys."""

    @cached_property
    def qo_indptr_array(self) -> Int32:
        return one_each(len(self.sequences))


class PrefillFields(PagedFields):
    qo_indptr: Indptr
    """int32 [B+1]: sequence b has rows `qo_indptr[b]:qo_indptr[b+1]` of q, o (and k, v)."""
    causal: bool = False
    """Whether keys after a query's own position are hidden; queries are the sequence's last
    tokens."""

    @cached_property
    def qo_indptr_array(self) -> Int32:
        return int32(self.qo_indptr)

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        super().check(entries, info)
        rows, batch = entries["q"].shape[0], len(self.sequences)
        check_indptr("qo_indptr", self.qo_indptr_array, rows, batch)
        check_one_mask(entries)


class RaggedPrefillFields(WindowFields):
    qo_indptr: Indptr
    """int32 [B+1] over rows of q."""
    kv_indptr: Indptr
    """int32 [B+1] over rows of k and v."""
    causal: bool = False
    """Whether keys after a query's own position are hidden (aligned bottom-right)."""

    @cached_property
    def qo_indptr_array(self) -> Int32:
        return int32(self.qo_indptr)

    @cached_property
    def kv_indptr_array(self) -> Int32:
        return int32(self.kv_indptr)

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        qo, kv = self.qo_indptr_array, self.kv_indptr_array
        if qo.size > MAX_SEQUENCES + 1:
            rule = f"at most {MAX_SEQUENCES} requests in a call: send more calls"
            refuse("qo_indptr", f"{qo.size - 1} requests", rule)
        check_indptr("qo_indptr", qo, entries["q"].shape[0])
        check_indptr("kv_indptr", kv, entries["k"].shape[0], qo.size - 1)
        check_one_mask(entries)
        for name in entries.keys() & {"mask", "packed_mask"}:
            size, packed = entries[name].shape[0], name == "packed_mask"
            check_mask_length(size, packed, np.diff(qo), np.diff(kv), f"{name}.shape")


class CascadeLevelFields(BatchFields):
    qo_indptr: Indptr
    """int32 [S+1]: rows `qo_indptr[s]:qo_indptr[s+1]` of q attend all of sequence s. Rows before
    the first and after the last attend nothing at this level."""

    @cached_property
    def qo_indptr_array(self) -> Int32:
        return int32(self.qo_indptr)


class CascadeFields(ScoringFields):
    layer: Count
    levels: Annotated[
        list[CascadeLevelFields], Field(min_length=1, max_length=MAX_LEVELS, fail_fast=True)
    ]
    """Levels, the most shared one first."""
    causal: bool = False
    """Whether keys after a query's own position are hidden at the last level."""
    return_levels: bool = False
    """Whether the reply also has each level's own state: `o.0`, `lse.0`, ..."""

    def sizes(self, info: InfoAnswer) -> dict[str, int]:
        return pool_sizes(info, self.layer)

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        check_layer(self.layer, info)
        rows = entries["q"].shape[0]
        named = sum(len(level.sequences) for level in self.levels)
        if named > MAX_SEQUENCES:
            rule = f"all together at most {MAX_SEQUENCES} in a call: send more calls"
            refuse("levels", f"{named} sequences", rule)
        for index, level in enumerate(self.levels):
            field = f"levels.{index}"
            check_ids(level.sequences, f"{field}.sequences")
            batch = len(level.sequences)
            check_indptr(f"{field}.qo_indptr", level.qo_indptr_array, rows, batch, partial=True)


operation = partial(Operation, tag="tensors")

DECODE: Final = operation(
    name="decode",
    summary="One query row per sequence over all of its KV",
    description="k and v, if given, are appended first; all or none. KV that forked sequences "
    "share is read once if `cascade` allows.",
    fields=DecodeFields,
    takes=(query("B"), *pair("B", "to append first", optional=True), sinks(), ROW_IDS),
    gives=state(),
    scope="read",
    appended_with="k",
    answer_text="The attention state of each row.",
)

PREFILL: Final = operation(
    name="prefill",
    summary="Many query rows per sequence over all of its KV",
    description="k and v, if given, are appended first, by the same qo_indptr. A mask covers the "
    "whole kv_len, appended rows included, and applies in addition to causal and window_left.",
    fields=PrefillFields,
    takes=(query(), *pair("n", "to append first", optional=True), *MASKS, sinks(), ROW_IDS),
    gives=state(),
    scope="read",
    appended_with="k",
    answer_text="The attention state of each row.",
)

RAGGED_PREFILL: Final = operation(
    name="ragged_prefill",
    summary="Attention over the request's own K and V, without the pool",
    description="The tensors decide heads and head_dim. q, k and v have one dtype.",
    fields=RaggedPrefillFields,
    takes=(*pair("nnz", "of all requests", like="q"), query(), *MASKS, sinks()),
    gives=state(),
    scope="read",
    answer_text="The attention state of each row.",
    routing="anywhere",
)

CASCADE: Final = operation(
    name="cascade",
    summary="Attention over explicit levels: each row attends one whole sequence per level",
    description="The states of all levels are merged. Levels at which a row would see a page twice "
    "are rejected (422).",
    fields=CascadeFields,
    takes=(query(), sinks()),
    gives=(*state(), *state(".{i}", optional=True)),
    scope="read",
    answer_text="The merged state of each row; with return_levels also each level's own.",
    routing="together",
)
