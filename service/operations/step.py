"""The step operation: one decode or prefill of a batch through many layers; road only."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from service.operations.attention import ScoringFields
from service.operations.schema.fields import (
    INT32_MAX,
    Count,
    Entries,
    Fields,
    Ids,
    Indptr,
    InfoAnswer,
    Int32,
    NamingFields,
    Offsets,
    TokenIds,
    check_ids,
    check_ids_given,
    check_indptr,
    check_one_each,
    check_window,
    int32,
    one_each,
    refuse,
)
from service.operations.schema.spec import Operation, check_heads

MAX_STEP_LAYERS: Final = 4096
MAX_SLOTS: Final = 4096
ALIGNMENT: Final = 64
Place = Annotated[int, Field(ge=0, le=2**62, multiple_of=ALIGNMENT)]
"""Offset in the arena, in bytes."""
Window = Annotated[int, Field(ge=-1, le=INT32_MAX)]


class SlotFields(Fields):
    """Offsets of a layer's tensors in the arena; only steps that append read k and v."""

    q: Place
    k: Place
    v: Place
    o: Place
    lse: Place


class StepFields(ScoringFields):
    op: Literal["decode", "prefill", "echo"]
    """Operation; `echo` computes nothing and measures the time of passing layers back and forth."""
    layers: Annotated[list[Count], Field(min_length=1, max_length=MAX_STEP_LAYERS, fail_fast=True)]
    """Layers of the pool in order of execution."""
    flags: Place = 0
    """Offset of the flags: two 32-bit words, ready and done, for each layer of the pool."""
    slots: Annotated[list[SlotFields], Field(max_length=MAX_SLOTS, fail_fast=True)] | None = None
    """Slots; layer l of the pool uses slot l modulo their number."""
    sinks: Place | None = None
    """Offset of the sinks, F32 `[layers of the pool, num_qo_heads]`; absent: none."""
    mask: Place | None = None
    """Prefill: offset of a mask over each sequence's own rows, BOOL `[sum(rows^2)]`."""
    packed_mask: Place | None = None
    """As `mask`, bits in little order, each sequence padded to a byte."""
    sequences: Ids | None = None
    num_qo_heads: Annotated[int, Field(ge=1)] = 1
    dtype: Literal["F32", "F16", "BF16"] = "F16"
    """Dtype of q, k, v and o."""
    append: bool = True
    """Whether k and v are appended first, at every layer."""
    offsets: Offsets | None = None
    """Expected kv_len of each sequence, at every layer."""
    qo_indptr: Indptr | None = None
    """Prefill: sequence b has rows `qo_indptr[b]:qo_indptr[b+1]`."""
    causal: bool = False
    """Prefill: whether keys after a query's own position are hidden."""
    window_left: Window | Annotated[list[Window], Field(min_length=1, fail_fast=True)] = -1
    """Window size as in decode: one for all layers, or one for each of `layers`."""
    cascade: Literal["auto", "always", "never"] = "auto"
    token_ids: TokenIds | None = None
    """Ids of tokens, as in decode."""
    ids_indptr: Indptr | None = None
    """int32 [B+1], as in decode."""

    ids_array = NamingFields.ids_array
    ids_indptr_array = NamingFields.ids_indptr_array

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.sequences or ())

    @cached_property
    def qo_indptr_array(self) -> Int32:
        if self.qo_indptr is None:
            return one_each(len(self.ids))
        return int32(self.qo_indptr)

    @cached_property
    def counts(self) -> Int32:
        """Query rows of each sequence, which are also its new tokens if k and v are appended."""
        counts: Int32 = np.diff(self.qo_indptr_array)
        return counts

    @cached_property
    def offset_array(self) -> Int32 | None:
        return None if self.offsets is None else int32(self.offsets)

    @property
    def mask_place(self) -> int | None:
        return self.packed_mask if self.mask is None else self.mask

    @property
    def rows(self) -> int:
        return int(self.qo_indptr_array[-1])

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """`window_left` of each layer."""
        if isinstance(self.window_left, int):
            return (self.window_left,) * len(self.layers)
        return tuple(self.window_left)

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        """All rules that do not depend on the pool's state or the arena's size."""
        if max(self.layers) >= info.num_layers:
            refuse("layers", max(self.layers), f"must be below num_layers = {info.num_layers}")
        if len(set(self.layers)) != len(self.layers):
            refuse("layers", self.layers, "duplicate layer")
        if self.op == "echo":
            return
        if self.sequences is None:
            refuse("sequences", None, "must be given")
        check_ids(self.ids)
        check_one_each("offsets", self.offsets, len(self.ids))
        if not self.slots:
            refuse("slots", self.slots, "at least one slot is required")
        for layer in self.layers:
            heads = info.shapes[layer].num_kv_heads
            check_heads("num_qo_heads", self.num_qo_heads, self.num_qo_heads, heads)
        if len(self.windows) != len(self.layers):
            given = f"{len(self.windows)} numbers"
            refuse("window_left", given, f"must be one, or {len(self.layers)}, one per layer")
        if info.groups is not None:
            self.set_windows(info)
        if (self.op == "prefill") != (self.qo_indptr is not None):
            refuse("qo_indptr", self.qo_indptr, "must be given for prefill, and only there")
        if self.qo_indptr is not None:
            check_indptr("qo_indptr", self.qo_indptr_array, self.rows, len(self.ids))
        if self.mask is not None and self.packed_mask is not None:
            refuse("packed_mask", self.packed_mask, "mask and packed_mask cannot be combined")
        if self.qo_indptr is None and (place := self.mask_place) is not None:
            refuse("mask", place, "must be absent from a decode: send a prefill of one row each")
        check_ids_given(self, entries, self.rows, len(self.ids))

    def set_windows(self, info: InfoAnswer) -> None:
        """Give layers of groups with a window that one; no other is accepted."""
        windows = list(self.windows)
        for place, layer in enumerate(self.layers):
            if (own := info.shapes[layer].window) is not None:
                if "window_left" in self.model_fields_set:
                    check_window(layer, windows[place], info)
                windows[place] = own - 1
        self.__dict__["windows"] = tuple(windows)


STEP: Final = Operation(
    name="step",
    summary="One decode or prefill through many layers, over a device arena",
    description="A frame of the road and no route: see docs/road.md.",
    tag="road",
    fields=StepFields,
    scope="read",
    routing="together",
)
"""Has no route; no other operation has the number 0."""
