"""The reply of `info`: geometry, backend and limits, against which requests are checked."""

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
    """Maximum relative error of a score, also of a soft-capped one near its cap."""


class TierAnswer(Fields):
    name: Literal["host", "disk"]
    total_bytes: int
    """Size of the tier; 0: it is off since a failure, see the log."""
    page_bytes: int
    """Bytes that one page takes."""
    store_s: float | None
    """Measured seconds to write one page to the tier; null: not measured yet."""
    load_s: float | None
    """Measured seconds to load one page from the tier."""


class InfoAnswer(Fields):
    version: str
    instance_id: str
    """Id of this run of the process; a restart, which empties the pool, changes it."""
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
    """Dtypes of q, k, v and o."""
    unsupported: list[str]
    """Features that this backend does not support."""
    numerics: Literal["fast", "invariant"] = "fast"
    """`invariant`: the bits of a row's result do not depend on the rest of its batch."""
    limits: LimitsAnswer
    tiers: list[TierAnswer] | None = None
    """Tiers below the pool. Their seconds change while the process runs."""
