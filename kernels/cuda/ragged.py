"""Ragged keys as the kernels see them: a pool of one-token pages whose ids are their indices."""

from __future__ import annotations

import numpy as np

from kernels.backend import DType, Int32, Level, Plan
from kernels.cuda import wide
from kernels.cuda.scene import Store


def ragged_store(heads: int, head_dim: int, compute: DType, k: int, v: int, tokens: int) -> Store:
    """Ragged keys at device addresses, as a pool of one-token pages whose ids are their indices."""
    return Store(
        k=k,
        v=v,
        layer_bytes=0,
        layer_rows=0,
        page_rows=heads,
        token_rows=heads,
        head_rows=1,
        page_size=1,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=compute,
        k_scale=1.0,
        v_scale=1.0,
        num_pages=tokens,
        contiguous=True,
        maps=lambda layer: ragged_maps(k, v, tokens, heads, head_dim, compute),
    )


def ragged_maps(
    k: int, v: int, tokens: int, heads: int, head_dim: int, compute: DType
) -> wide.TensorMaps:
    """Hopper's tensor maps of ragged keys."""
    shape = wide.variant(head_dim, "bf16" if compute == "bf16" else "fp16", 0)
    return wide.ragged_maps(shape, k, v, tokens, heads)


def ragged_plan(qo_indptr: Int32, kv_indptr: Int32, causal: bool) -> Plan:
    """One level, one segment per request, pages of one token."""
    rows = np.diff(qo_indptr)
    keys = np.diff(kv_indptr)
    level = Level(
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=np.zeros(0, np.int32),
        kv_last_page_len=(keys > 0).astype(np.int32),
        kv_start=np.zeros(len(keys), np.int32),
        causal=causal,
    )
    inside = np.arange(int(qo_indptr[-1])) - np.repeat(qo_indptr[:-1], rows)
    positions = np.repeat(keys - rows, rows) + inside
    return Plan((level,), positions.astype(np.int32))
