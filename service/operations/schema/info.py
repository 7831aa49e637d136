"""The pool's geometry, the backend and the limits: answered by `info`, and checked against."""

from __future__ import annotations

from typing import Literal

from service.operations.schema.fields import Fields

PoolDType = Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]


class LimitsAnswer(Fields):
    max_body_bytes: int
    max_json_body_bytes: int
    max_answer_bytes: int
    max_sequences: int
    queue_depth: int
    deadline_s: float
    relative_score_error: float = 2e-6
    """A score is off by at most this part of its size, a soft-capped one near its cap included."""


class InfoAnswer(Fields):
    version: str
    instance_id: str
    """Changes when the process starts anew, and the pool with it."""
    backend: str
    device: str
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    layout: Literal["NHD", "HND"]
    dtype: PoolDType
    k_scale: float
    v_scale: float
    tensor_dtypes: list[str]
    """What q, k, v and o may be."""
    unsupported: list[str]
    """What this backend refuses."""
    limits: LimitsAnswer
