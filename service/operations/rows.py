"""Operations on rows of K and V in the pool: append writes, gather reads."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import (
    BatchFields,
    Count,
    Counts,
    DType,
    Entries,
    Epochs,
    ExpectingFields,
    Fields,
    Indptr,
    Int32,
    check_batch,
    check_indptr,
    check_layer,
    int32,
    one_each,
    pool_sizes,
    refuse,
)
from service.operations.schema.info import InfoAnswer
from service.operations.schema.spec import Operation
from service.operations.schema.tensors import pair, row


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
        return pool_sizes(info) | rows | layers

    def is_ragged(self) -> bool:
        return self.layers is not None

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


class GatherFields(BatchFields):
    layer: Count
    dtype: DType | None = None
    """Dtype of k and v in the reply. Absent: the pool's, or fp16 for an fp8 pool."""
    start: Count = 0
    """First token of each sequence to read."""
    stop: Count | None = None
    """End of the tokens to read, exclusive; absent or beyond a sequence's length: its length."""
    epochs: Epochs | None = None
    """Of shards that were claimed: the epoch of each sequence. In another it is a 409."""


class AppendAnswer(Fields):
    lengths: Counts
    """kv_len after the append, in the request's order."""


class GatherAnswer(Fields):
    kv_indptr: Counts
    """Sequence b has rows `kv_indptr[b]:kv_indptr[b+1]` of k and v (tokens, not pages)."""


def check_append(fields: AppendFields, entries: Entries, info: InfoAnswer) -> None:
    if (fields.layer is None) == (fields.layers is None):
        given = fields.layer is not None
        refuse(
            "layer", fields.layer, "give layer or layers, not both" if given else "must be given"
        )
    for layer in fields.every_layer:
        check_layer(layer, info, "layer" if fields.layers is None else "layers")
    if len(set(fields.every_layer)) < len(fields.every_layer):
        refuse("layers", fields.layers, "duplicate layer")
    check_batch(fields)
    batch = len(fields.sequences)
    rows = entries["k"].shape[0 if fields.layers is None else 1]
    check_indptr("append_indptr", fields.indptr(rows), rows, batch)


def check_gather(fields: GatherFields, entries: Entries, info: InfoAnswer) -> None:
    check_layer(fields.layer, info)
    check_batch(fields)
    if fields.stop is not None and fields.stop < fields.start:
        refuse("stop", fields.stop, f"must not be below start = {fields.start}")


operation = partial(Operation, tag="tensors")

APPEND: Final = operation(
    name="append",
    number=7,
    route="POST /v1/append",
    summary="Append rows of K and V to sequences",
    description="Each layer has its own length; pages are allocated when the first layer needs "
    "them. With `offsets`, a repeated append is rejected with the stored lengths instead of "
    "executed twice. `layers` instead of `layer` appends at many layers, with k and v "
    "`[L, n, Hkv, D]`.",
    fields=AppendFields,
    takes=pair("n", "to append", ragged=("L", "n", "Hkv", "D")),
    answer=AppendAnswer,
    check=check_append,
    scope="append",
    answer_text="The lengths after the append.",
    example={"layer": 0, "sequences": ["chat-1"], "tensors": row("k", 1) | row("v", 1)},
)

GATHER: Final = operation(
    name="gather",
    number=8,
    route="POST /v1/gather",
    summary="K and V of sequences at one layer, dequantised",
    description="The request has no tensors. A reply above the service's limit is rejected (413) "
    "with its size: read it in pieces, with `start` and `stop`.",
    fields=GatherFields,
    gives=pair("tokens", "in `dtype`"),
    answer=GatherAnswer,
    check=check_gather,
    scope="read",
    answer_text="The rows of all sequences, in the request's order.",
    example={"layer": 0, "sequences": ["chat-1"], "dtype": "fp32"},
)
