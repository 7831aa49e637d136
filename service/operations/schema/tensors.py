"""Tensor declarations that several operations share."""

from __future__ import annotations

from typing import Final

from service.operations.schema.fields import TENSOR_DTYPES
from service.operations.schema.spec import Symbols, TensorSpec


def query(rows: str = "n", like: str = "") -> TensorSpec:
    shape = (rows, "Hq", "D")
    return TensorSpec("q", TENSOR_DTYPES, shape, "queries; Hq is a multiple of Hkv", like=like)


def pair(
    rows: str, words: str, *, optional: bool = False, like: str = "", ragged: Symbols | None = None
) -> tuple[TensorSpec, TensorSpec]:
    """`k` and `v`; `ragged` is k's ragged shape. Like `q`, both have its head dimension."""
    values = None if ragged is None else (*ragged[:-1], "Dv")
    shape, words_v = (rows, "Hkv", "D" if like else "Dv"), f"values {words}, in k's dtype"
    return (
        TensorSpec("k", TENSOR_DTYPES, (rows, "Hkv", "D"), f"keys {words}", optional, like, ragged),
        TensorSpec("v", TENSOR_DTYPES, shape, words_v, optional, "k", values),
    )


def state(suffix: str = "", *, optional: bool = False) -> tuple[TensorSpec, TensorSpec]:
    """`o` and `lse` of a reply."""
    shape: Symbols = ("n", "Hq", "Dv")
    lse = "log-sum-exp in lse_base; -inf for a row that sees no key"
    return (
        TensorSpec(f"o{suffix}", TENSOR_DTYPES, shape, "output, in q's dtype", optional),
        TensorSpec(f"lse{suffix}", ("F32",), shape[:2], lse, optional),
    )


MASKS: Final = (
    TensorSpec(
        "mask",
        ("BOOL",),
        ("sum of qo_len * kv_len",),
        "True = visible; each sequence's rows flattened, sequences concatenated",
        optional=True,
    ),
    TensorSpec(
        "packed_mask",
        ("U8",),
        ("sum of ceil(qo_len * kv_len / 8)",),
        "the same as bits, least significant first, each sequence padded to a byte",
        optional=True,
    ),
)


ROW_IDS: Final = TensorSpec(
    "token_ids", ("U32",), ("t",), "token ids, instead of the field", optional=True
)


def sinks(heads: str = "Hq") -> TensorSpec:
    """One sink for each head."""
    words = "logit of each head that enters the softmax's denominator only, natural; -inf: none"
    return TensorSpec("sinks", ("F32",), (heads,), words, optional=True)
