"""What OpenAPI tells of each tensor route: its tensors in and out, in words, and an example.

Shapes are in words: B sequences, n query rows, Hq query heads, Hkv KV heads, D head dimension.
The examples are for a pool with num_kv_heads = 1 and head_dim = 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from service.http.checks import TENSOR_DTYPES

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TensorDoc:
    """One tensor. `{i}` in its name stands for a cascade level's number."""

    name: str
    dtypes: tuple[str, ...]
    shape: str
    rank: int
    words: str
    required: bool = True

    def told(self) -> Schema:
        """For safetensors: dtypes, shape and meaning."""
        return {
            "dtype": list(self.dtypes),
            "shape": self.shape,
            "description": self.words,
            "required": self.required,
        }

    def pattern(self) -> str:
        """The regular expression of a numbered tensor's names."""
        return "^" + self.name.replace(".", r"\.").replace("{i}", "[0-9]+") + "$"

    def schema(self) -> Schema:
        """For JSON: an object of dtype, shape and data."""
        return {
            "type": "object",
            "description": f"{self.shape}: {self.words}",
            "additionalProperties": False,
            "required": ["dtype", "shape", "data"],
            "properties": {
                "dtype": {"type": "string", "enum": list(self.dtypes)},
                "shape": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0},
                    "minItems": self.rank,
                    "maxItems": max(self.rank, 4) if self.name in {"o", "lse"} else self.rank,
                    "description": self.shape,
                },
                "data": {
                    "type": "array",
                    "items": element(self.dtypes),
                    "description": "flat, row-major",
                },
            },
        }


def element(dtypes: tuple[str, ...]) -> Schema:
    """One element of `data`."""
    if dtypes == ("BOOL",):
        return {"type": "boolean"}
    if dtypes == ("U8",):
        return {"type": "integer", "minimum": 0, "maximum": 255}
    spelled = {"type": "string", "enum": ["Infinity", "-Infinity", "NaN"]}
    return {"anyOf": [{"type": "number"}, spelled]}


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """One route: what it does, its tensors, an example in JSON."""

    summary: str
    description: str
    takes: tuple[TensorDoc, ...]
    gives: tuple[TensorDoc, ...]
    answer: str
    example: Any


def query(shape: str = "[n, Hq, D]") -> TensorDoc:
    return TensorDoc("q", TENSOR_DTYPES, shape, 3, "queries; Hq is a multiple of Hkv")


def pair(shape: str, words: str, *, required: bool) -> tuple[TensorDoc, TensorDoc]:
    return (
        TensorDoc("k", TENSOR_DTYPES, shape, 3, f"keys {words}", required),
        TensorDoc("v", TENSOR_DTYPES, shape, 3, f"values {words}, in k's dtype", required),
    )


def state(suffix: str = "", *, required: bool = True) -> tuple[TensorDoc, TensorDoc]:
    """`o` and `lse` of an answer."""
    return (
        TensorDoc(f"o{suffix}", TENSOR_DTYPES, "[n, Hq, D]", 3, "output, in q's dtype", required),
        TensorDoc(
            f"lse{suffix}",
            ("F32",),
            "[n, Hq]",
            2,
            "log-sum-exp in lse_base; -inf where a row sees nothing",
            required,
        ),
    )


MASKS: Final = (
    TensorDoc(
        "mask",
        ("BOOL",),
        "[sum of qo_len * kv_len]",
        1,
        "True = visible; each request's rows flattened, requests one after another",
        required=False,
    ),
    TensorDoc(
        "packed_mask",
        ("U8",),
        "[sum of ceil(qo_len * kv_len / 8)]",
        1,
        "the same as bits, little order, each request padded to a byte",
        required=False,
    ),
)


def row(name: str, heads: int) -> dict[str, Any]:
    """A tensor of one row for the examples, head_dim 2."""
    data = [round(0.5 - 0.25 * i, 2) for i in range(2 * heads)]
    return {name: {"dtype": "F32", "shape": [1, heads, 2], "data": data}}


DOCS: Final[dict[str, RouteDoc]] = {
    "/v1/append": RouteDoc(
        "Write K and V rows at the end of sequences",
        "Lengths are kept per layer; pages are taken when the first layer needs them. With "
        "`offsets`, a repeated append is refused with the true lengths instead of done twice.",
        pair("[n, Hkv, D]", "to append", required=True),
        (),
        "The lengths after the append.",
        {"layer": 0, "sequences": ["chat-1"], "tensors": row("k", 1) | row("v", 1)},
    ),
    "/v1/decode": RouteDoc(
        "One query row per sequence over all of its KV",
        "With k and v, those are appended first, all or nothing. KV that forked sequences share is "
        "read once when `cascade` allows.",
        (query("[B, Hq, D]"), *pair("[B, Hkv, D]", "to append first", required=False)),
        state(),
        "The attention state of each row.",
        {"layer": 0, "sequences": ["chat-1"], "tensors": row("q", 2)},
    ),
    "/v1/prefill": RouteDoc(
        "Many query rows per sequence over all of its KV",
        "With k and v, those are appended first by the same qo_indptr. A mask is over the whole "
        "kv_len, appended rows included, and is applied on top of causal and window_left.",
        (query(), *pair("[n, Hkv, D]", "to append first", required=False), *MASKS),
        state(),
        "The attention state of each row.",
        {
            "layer": 0,
            "sequences": ["chat-1"],
            "qo_indptr": [0, 1],
            "causal": True,
            "tensors": row("q", 2) | row("k", 1) | row("v", 1),
        },
    ),
    "/v1/ragged-prefill": RouteDoc(
        "Attention over K and V sent along; touches no pool",
        "Heads and head_dim are the request's own. q, k and v have one dtype.",
        (query(), *pair("[nnz, Hkv, D]", "of all requests", required=True), *MASKS),
        state(),
        "The attention state of each row.",
        {
            "qo_indptr": [0, 1],
            "kv_indptr": [0, 1],
            "tensors": row("q", 2) | row("k", 1) | row("v", 1),
        },
    ),
    "/v1/cascade": RouteDoc(
        "Explicit levels: each row attends one whole sequence per level",
        "The states of the levels are merged. Levels by which a row would see a page twice are "
        "refused.",
        (query(),),
        (*state(), *state(".{i}", required=False)),
        "The merged state of each row, and with return_levels each level's own.",
        {
            "layer": 0,
            "levels": [{"sequences": ["chat-1"], "qo_indptr": [0, 1]}],
            "tensors": row("q", 2),
        },
    ),
    "/v1/merge": RouteDoc(
        "Merge attention states over disjoint KV",
        "Associative and commutative; the empty state is (0, -inf).",
        (
            TensorDoc("o", TENSOR_DTYPES, "[T, n, H, D], or [nnz, H, D] with indptr", 3, "outputs"),
            TensorDoc("lse", ("F32",), "[T, n, H], or [nnz, H] with indptr", 2, "log-sum-exps"),
        ),
        (
            TensorDoc("o", TENSOR_DTYPES, "[T, H, D]", 3, "merged output, in the dtype given"),
            TensorDoc("lse", ("F32",), "[T, H]", 2, "merged log-sum-exp"),
        ),
        "One state per list.",
        {
            "tensors": {
                "o": {"dtype": "F32", "shape": [1, 2, 1, 2], "data": [1.0, 0.0, 0.0, 1.0]},
                "lse": {"dtype": "F32", "shape": [1, 2, 1], "data": [0.0, "-Infinity"]},
            }
        },
    ),
    "/v1/gather": RouteDoc(
        "All K and V of sequences at a layer, dequantised",
        "Send a body without tensors.",
        (),
        (
            TensorDoc("k", TENSOR_DTYPES, "[tokens, Hkv, D]", 3, "keys, in `dtype`"),
            TensorDoc("v", TENSOR_DTYPES, "[tokens, Hkv, D]", 3, "values, in `dtype`"),
        ),
        "Rows of all the sequences, one after another.",
        {"layer": 0, "sequences": ["chat-1"], "dtype": "fp32"},
    ),
}
