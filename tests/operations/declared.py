"""Helpers of the operations' tests: a geometry, and requests prepared by their headers."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
from attnd.wire.images import header

from service.image.writing import in_order, shaped, size
from service.operations.schema.fields import InfoAnswer, LimitsAnswer
from service.operations.schema.spec import Prepared, prepare
from service.operations.table import BY_NAME
from service.tenants import OPEN, Tenant

LAYERS, KV_HEADS, QO_HEADS, HEAD_DIM = 2, 2, 4, 64
LIMITS: Final = LimitsAnswer(
    max_body_bytes=2**28,
    max_json_body_bytes=2**19,
    max_answer_bytes=2**28,
    max_sequences=65536,
    queue_depth=256,
    deadline_s=30.0,
)
INFO: Final = InfoAnswer(
    version="0",
    instance_id="test",
    backend="cpu",
    device="cpu",
    num_layers=LAYERS,
    num_pages=64,
    page_size=4,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    layout="NHD",
    dtype="fp32",
    k_scale=1.0,
    v_scale=1.0,
    tensor_dtypes=["F32", "F16", "BF16"],
    unsupported=[],
    limits=LIMITS,
)


def prepared(
    name: str, fields: Any, tensors: dict[str, Any] | None = None, tenant: Tenant = OPEN
) -> Prepared:
    """A request of `tenant` with these fields and tensors, by its header."""
    shapes = in_order(shaped(tensors or {}))
    head = header("request", json.dumps(fields), shapes)
    return prepare(BY_NAME[name], head[8:], size(b"", shapes), INFO, tenant)


def rows(n: int, heads: int = KV_HEADS, dtype: Any = np.float32) -> Any:
    return np.zeros((n, heads, HEAD_DIM), dtype)


def queries(n: int) -> Any:
    return rows(n, QO_HEADS)
