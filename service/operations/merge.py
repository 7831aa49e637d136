"""The operation that merges attention states over disjoint KV; it touches no pool."""

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
"""Largest answer of a merge whose lists are empty: it takes memory that no body paid for."""


class MergeFields(Fields):
    lse_base: LseBase = "e"
    """Base of the log-sum-exp given and answered."""
    indptr: Annotated[Counts, Field(min_length=1)] | None = None
    """int32 [T+1] over ragged states; absent: dense `o [T, n, H, D]`, `lse [T, n, H]`."""

    def is_ragged(self) -> bool:
        return self.indptr is not None

    @cached_property
    def indptr_array(self) -> Int32 | None:
        return None if self.indptr is None else int32(self.indptr)


class MergeAnswer(Fields):
    lse_base: LseBase


def check_merge(fields: MergeFields, entries: Entries, info: InfoAnswer) -> None:
    """Lists without states take no bytes of the body, but a row of the answer each."""
    shape, indptr = entries["o"].shape, fields.indptr_array
    lists = shape[0] if indptr is None else indptr.size - 1
    if lists * math.prod(shape[-2:]) > max(math.prod(shape), MAX_EMPTY_ELEMENTS):
        refuse("o.shape", list(shape), f"{lists} lists make too large an answer")
    if indptr is not None:
        check_indptr("indptr", indptr, shape[0])


MERGE: Final = Operation(
    name="merge",
    number=13,
    method="POST",
    path="/v1/merge",
    summary="Merge attention states over disjoint KV",
    description="Associative and commutative; the empty state is (0, -inf).",
    tag="tensors",
    fields=MergeFields,
    takes=(
        TensorSpec("o", TENSOR_DTYPES, ("T", "n", "H", "D"), "outputs", ragged=("nnz", "H", "D")),
        TensorSpec("lse", ("F32",), ("T", "n", "H"), "log-sum-exps", ragged=("nnz", "H")),
    ),
    gives=(
        TensorSpec("o", TENSOR_DTYPES, ("T", "H", "D"), "merged output, in the dtype given"),
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
