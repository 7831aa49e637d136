"""Operations on rows: append and gather K and V, page tables of where they are, and merge."""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import (
    TENSOR_DTYPES,
    BatchFields,
    Count,
    Counts,
    DType,
    Entries,
    ExpectingFields,
    Fields,
    Indptr,
    InfoAnswer,
    Int32,
    LseBase,
    check_batch,
    check_ids,
    check_ids_given,
    check_indptr,
    check_layer,
    int32,
    one_each,
    pool_sizes,
    refuse,
)
from service.operations.schema.spec import Operation, TensorSpec
from service.operations.schema.tensors import ROW_IDS, pair, sinks


class AppendFields(ExpectingFields):
    layer: Count | None = None
    """Layer to append at; required without `layers`."""
    layers: Annotated[Counts, Field(min_length=1)] | None = None
    """Layers to append at, with k and v `[L, n, Hkv, D]` in their order; all or none. A sequence
    must have one length at all of them."""
    append_indptr: Indptr | None = None
    """int32 [B+1]: sequence b gets rows `append_indptr[b]:append_indptr[b+1]` of k and v. Absent:
    one row per sequence."""

    def sizes(self, info: InfoAnswer) -> dict[str, int]:
        rows = {"n": len(self.sequences)} if self.append_indptr is None else {}
        layers = {} if self.layers is None else {"L": len(self.layers)}
        return pool_sizes(info, self.every_layer[0]) | rows | layers

    def is_ragged(self) -> bool:
        return self.layers is not None

    def group_words(self, info: InfoAnswer) -> str:
        shape = info.shape_of(self.every_layer[0])
        return "" if shape.group is None else f" (layer group {shape.group})"

    @property
    def every_layer(self) -> list[int]:
        return self.layers or [self.layer or 0]

    def indptr(self, rows: int) -> Int32:
        """The prefix sums over `rows` rows of k and v."""
        given = self.append_indptr_array
        return one_each(rows) if given is None else given

    @cached_property
    def append_indptr_array(self) -> Int32 | None:
        return None if self.append_indptr is None else int32(self.append_indptr)

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        if (self.layer is None) == (self.layers is None):
            given = self.layer is not None
            refuse(
                "layer", self.layer, "give layer or layers, not both" if given else "must be given"
            )
        for layer in self.every_layer:
            check_layer(layer, info, "layer" if self.layers is None else "layers")
        shapes = [info.shapes[layer][:3] for layer in self.every_layer]
        if shapes.count(shapes[0]) < len(shapes):
            rule = "they are of layer groups of several shapes: append to each group by itself"
            refuse("layers", self.layers, rule)
        if len(set(self.every_layer)) < len(self.every_layer):
            refuse("layers", self.layers, "duplicate layer")
        check_batch(self)
        batch = len(self.sequences)
        rows = entries["k"].shape[0 if self.layers is None else 1]
        check_indptr("append_indptr", self.indptr(rows), rows, batch)
        check_ids_given(self, entries, rows, batch)


class GatherFields(BatchFields):
    layer: Count
    dtype: DType | None = None
    """Dtype of k and v in the reply. Absent: the pool's, or fp16 for an fp8 pool."""
    start: Count = 0
    """First token of each sequence to read."""
    stop: Count | None = None
    """End of the tokens to read, exclusive; absent or beyond a sequence's length: its length."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        check_layer(self.layer, info)
        check_batch(self)
        if self.stop is not None and self.stop < self.start:
            refuse("stop", self.stop, f"must not be below start = {self.start}")


class PageTableFields(BatchFields):
    layer: Count = 0

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        check_layer(self.layer, info)
        check_ids(self.sequences)


operation = partial(Operation, tag="tensors")

APPEND: Final = operation(
    name="append",
    summary="Append rows of K and V to sequences",
    description="Each layer has its own length; pages are allocated when the first layer needs "
    "them. With `offsets`, a repeated append is rejected with the stored lengths instead of "
    "executed twice. `layers` instead of `layer` appends at many layers, with k and v "
    "`[L, n, Hkv, D]`.",
    fields=AppendFields,
    takes=(*pair("n", "to append", ragged=("L", "n", "Hkv", "D")), ROW_IDS),
    scope="append",
    answer_text="The lengths after the append.",
)

GATHER: Final = operation(
    name="gather",
    summary="K and V of sequences at one layer, dequantised",
    description="The request has no tensors. A reply above the service's limit is rejected (413) "
    "with its size: read it in pieces, with `start` and `stop`.",
    fields=GatherFields,
    gives=pair("tokens", "in `dtype`"),
    scope="read",
    answer_text="The rows of all sequences, in the request's order.",
)

PAGE_TABLE: Final = Operation(
    tag="sequences",
    name="page_table",
    summary="CSR page table of sequences, and their cascade levels",
    fields=PageTableFields,
    scope="read",
    routing="together",
)


MAX_EMPTY_ELEMENTS: Final = 2**24
"""Maximum elements of the reply to a merge of empty lists, which a small body could make huge."""


class MergeFields(Fields):
    lse_base: LseBase = "e"
    """Base of the log-sum-exps in request and reply."""
    indptr: Annotated[Counts, Field(min_length=1)] | None = None
    """int32 [T+1]: prefix sums over ragged states; absent: dense `o [T, n, H, D]`,
    `lse [T, n, H]`."""

    def is_ragged(self) -> bool:
        return self.indptr is not None

    @cached_property
    def indptr_array(self) -> Int32 | None:
        return None if self.indptr is None else int32(self.indptr)

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        """Lists without states take no bytes of the body, but each has a row in the reply."""
        shape, indptr = entries["o"].shape, self.indptr_array
        lists = shape[0] if indptr is None else indptr.size - 1
        if lists * math.prod(shape[-2:]) > max(math.prod(shape), MAX_EMPTY_ELEMENTS):
            refuse("o.shape", list(shape), f"{lists} lists make too large an answer")
        if indptr is not None:
            check_indptr("indptr", indptr, shape[0])


MERGE: Final = operation(
    name="merge",
    summary="Merge attention states over disjoint KV",
    description="The merge is associative and commutative; the empty state is (0, -inf). "
    "Sinks enter each list once.",
    fields=MergeFields,
    takes=(
        TensorSpec("o", TENSOR_DTYPES, ("T", "n", "H", "D"), "outputs", ragged=("nnz", "H", "D")),
        TensorSpec("lse", ("F32",), ("T", "n", "H"), "log-sum-exps", ragged=("nnz", "H")),
        sinks("H"),
    ),
    gives=(
        TensorSpec("o", TENSOR_DTYPES, ("T", "H", "D"), "merged output, in the request's dtype"),
        TensorSpec("lse", ("F32",), ("T", "H"), "merged log-sum-exp"),
    ),
    scope="read",
    answer_text="One state per list.",
    routing="anywhere",
)
