"""Ragged keys as the kernels see them: a pool of one-token pages whose ids are their indices."""

from __future__ import annotations

import numpy as np

from kernels.backend import DType, Int32, Level, Plan, last_positions
from kernels.cuda.kv.tensor_maps import TensorMaps, ragged_maps, ragged_shape
from kernels.cuda.kv.view import KvView, row_unit


def ragged_view(
    heads: int,
    head_dim: int,
    compute: DType,
    k: int,
    v: int,
    tokens: int,
    v_head_dim: int | None = None,
) -> KvView:
    """Ragged keys at device addresses, as a pool of one-token pages whose ids are their indices.

    `v_head_dim` None: as `head_dim`.
    """
    dims = head_dim, v_head_dim or head_dim

    def maps(_: int | None, tile_keys: int) -> TensorMaps:
        shapes = [ragged_shape(tokens, heads, dim, tile_keys) for dim in dims]
        return ragged_maps((shapes[0], shapes[1]), (k, v), compute)

    return KvView(
        k=k,
        v=v,
        layer_bytes=0,
        layer_rows=0,
        page_rows=heads * dims[0] // row_unit(*dims, False),
        token_rows=heads,
        head_rows=1,
        page_size=1,
        num_kv_heads=heads,
        head_dim=dims[0],
        v_head_dim=dims[1],
        dtype=compute,
        k_scale=1.0,
        v_scale=1.0,
        num_pages=tokens,
        contiguous=True,
        maps=maps,
    )


def ragged_plan(
    qo_indptr: Int32, kv_indptr: Int32, causal: bool, positions: Int32 | None = None
) -> Plan:
    """One level, one segment per request, pages of one token.

    Without `positions` a request's rows are the last of its sequence.
    """
    keys = np.diff(kv_indptr)
    level = Level(
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=np.zeros(0, np.int32),
        kv_last_page_len=(keys > 0).astype(np.int32),
        kv_start=np.zeros(len(keys), np.int32),
        causal=causal,
    )
    if positions is None:
        positions = last_positions(qo_indptr, kv_indptr)
    return Plan((level,), positions)
