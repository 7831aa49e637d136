"""The operation that merges attention states over disjoint KV, without the pool."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import (
    TENSOR_DTYPES,
    Counts,
    Entries,
    Fields,
    Int32,
    LseBase,
    check_indptr,
    int32,
    refuse,
)
from service.operations.schema.info import InfoAnswer
from service.operations.schema.spec import Operation, TensorSpec

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


class MergeAnswer(Fields):
    lse_base: LseBase


def check_merge(fields: MergeFields, entries: Entries, info: InfoAnswer) -> None:
    """Lists without states take no bytes of the body, but each has a row in the reply."""
    shape, indptr = entries["o"].shape, fields.indptr_array
    lists = shape[0] if indptr is None else indptr.size - 1
    if lists * math.prod(shape[-2:]) > max(math.prod(shape), MAX_EMPTY_ELEMENTS):
        refuse("o.shape", list(shape), f"{lists} lists make too large an answer")
    if indptr is not None:
        check_indptr("indptr", indptr, shape[0])


MERGE: Final = Operation(
    name="merge",
    number=13,
    route="POST /v1/merge",
    summary="Merge attention states over disjoint KV",
    description="The merge is associative and commutative; the empty state is (0, -inf).",
    tag="tensors",
    fields=MergeFields,
    takes=(
        TensorSpec("o", TENSOR_DTYPES, ("T", "n", "H", "D"), "outputs", ragged=("nnz", "H", "D")),
        TensorSpec("lse", ("F32",), ("T", "n", "H"), "log-sum-exps", ragged=("nnz", "H")),
    ),
    gives=(
        TensorSpec("o", TENSOR_DTYPES, ("T", "H", "D"), "merged output, in the request's dtype"),
        TensorSpec("lse", ("F32",), ("T", "H"), "merged log-sum-exp"),
    ),
    answer=MergeAnswer,
    check=check_merge,
    scope="read",
    answer_text="One state per list.",
    example={
        "tensors": {
            "o": {"dtype": "F32", "shape": [1, 2, 1, 2], "data": [1.0, 0.0, 0.0, 1.0]},
            "lse": {"dtype": "F32", "shape": [1, 2, 1], "data": [0.0, "-Infinity"]},
        }
    },
    routing="anywhere",
)
