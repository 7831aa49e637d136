"""What must hold before anything reaches a kernel; the first breach is named with its numbers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kernels.backend import (
    NUMPY_DTYPES,
    TENSOR_DTYPES,
    Attend,
    DType,
    Int32,
    LayerGroup,
    Level,
    PoolGeometry,
    RaggedAttend,
    Tensor,
    Unsupported,
)
from kernels.cuda.common.extremes import greatest, some
from kernels.cuda.common.kernel import HEAD_DIMS
from kernels.cuda.kv.view import row_unit

MOST_DIM: Final = 256
MOST_LATENT: Final = 1024
"""Values of a head's row of K or V, and of a latent row."""
MOST_ROWS: Final = 2**32 - 1
"""Rows of a pool, K and V of every layer: kernels number them in 32 bits, the last for none."""
_DTYPES: Final[dict[np.dtype[Any], DType]] = {NUMPY_DTYPES[name]: name for name in TENSOR_DTYPES}


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raise ValueError naming a field, its value and the rule it breaks."""
    if not holds:
        raise ValueError(f"{field} = {value}: {rule}")


def tensor_dtype(tensor: Tensor, field: str) -> DType:
    """The contract's name of a tensor's dtype. Raises Unsupported for any other."""
    name = _DTYPES.get(tensor.dtype)
    if name is None:
        raise Unsupported(field, tensor.dtype, f"tensors are {', '.join(TENSOR_DTYPES)}")
    return name


def check_dims(head_dim: int, v_head_dim: int, dtype: DType) -> None:
    """Raises Unsupported for rows of K and V that have no kernels."""
    if head_dim == v_head_dim and head_dim not in HEAD_DIMS:
        raise Unsupported("head_dim", head_dim, f"the CUDA backend has {HEAD_DIMS}")
    step = 16 if dtype.startswith("fp8") else 8
    for field, dim in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if dim % step or not 0 < dim <= MOST_DIM:
            rule = f"where both are not equal, multiples of {step} up to {MOST_DIM}"
            raise Unsupported(field, dim, rule)


def check_group(group: LayerGroup) -> None:
    """Raises Unsupported for a group of layers that has no kernels."""
    if group.dtype == "fp32":
        raise Unsupported("dtype", "fp32", "the CUDA backend stores fp16, bf16 or fp8")
    if group.kind == "attention":
        check_dims(group.head_dim, group.v_head_dim, group.dtype)
        return
    if group.dtype.startswith("fp8"):
        raise Unsupported("dtype", group.dtype, "the CUDA backend stores latents as fp16 or bf16")
    for field, dim in (("row", group.head_dim), ("latent_dim", group.v_head_dim)):
        if dim % 8 or not 0 < dim <= MOST_LATENT:
            raise Unsupported(field, dim, f"latents are multiples of 8 up to {MOST_LATENT}")


def check_pool(geometry: PoolGeometry) -> None:
    """Raises Unsupported for a pool that the kernels' row numbers of 32 bits do not reach, and for
    groups of layers that have no kernels."""
    for group in geometry.groups:
        check_group(group)
        unit = row_unit(group.head_dim, group.v_head_dim, group.kind == "latent")
        page = geometry.payload_bytes // NUMPY_DTYPES[group.dtype].itemsize // unit
        if page * geometry.num_pages >= MOST_ROWS:
            most = MOST_ROWS // page
            rule = f"the CUDA backend reaches 2^32 rows of {unit} values: at most {most} pages"
            raise Unsupported("pool.num_pages", geometry.num_pages, rule)


def check_layer(layer: int, geometry: PoolGeometry) -> None:
    require(0 <= layer < geometry.num_layers, "layer", layer, f"0..{geometry.num_layers - 1}")


def check_slots(slots: Int32, geometry: PoolGeometry, least: int = 0) -> None:
    """Check that every token slot is in the pool, or is `least`."""
    most = geometry.num_pages * geometry.page_size
    if len(slots):
        low, high = int(slots.min()), int(slots.max())
        require(low >= least and high < most, "slots", (low, high), f"{least}..{most - 1}")


def _most(values: Int32) -> int:
    """The greatest value, where any negative one counts as beyond all others: one pass for both."""
    return greatest(values.view(np.uint32))


def check_pages(pages: Int32, geometry: PoolGeometry, field: str) -> None:
    if len(pages) and _most(pages) >= geometry.num_pages:
        bad = (int(pages.min()), int(pages.max()))
        require(False, field, bad, f"pages are 0..{geometry.num_pages - 1}")


def check_kv(k: Tensor, v: Tensor, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    require((k.shape, v.shape) == shapes, "k, v", (k.shape, v.shape), f"{shapes[0]}, {shapes[1]}")
    require(k.dtype == v.dtype, "k, v", (k.dtype, v.dtype), "one dtype")


def check_indptr(indptr: Int32, end: int, field: str) -> None:
    """Starts at 0, never decreases, ends at `end`."""
    good = len(indptr) > 0 and indptr.item(0) == 0 and indptr.item(-1) == end
    if not good or (len(indptr) > 1 and some(indptr[1:] < indptr[:-1])):
        require(False, field, "indptr", f"0 .. {end}, rising")


def check_level(level: Level, rows: int, geometry: PoolGeometry) -> None:
    """Check that CSR arrays agree with each other and page ids are in the pool."""
    check_indptr(level.qo_indptr, rows, "qo_indptr")
    check_indptr(level.kv_indptr, len(level.kv_indices), "kv_indptr")
    last, segments = level.kv_last_page_len, len(level.qo_indptr) - 1
    lengths = (len(level.kv_indptr) - 1, len(last), len(level.kv_start))
    if lengths != (segments, segments, segments):
        fields = "kv_indptr, kv_last_page_len, kv_start"
        require(False, fields, lengths, f"of {segments} segments each, as qo_indptr")
    check_pages(level.kv_indices, geometry, "kv_indices")
    if segments:
        wrong = np.logical_xor(last, level.kv_indptr[1:] - level.kv_indptr[:-1])
        if _most(last) > geometry.page_size or some(wrong):
            wrong |= (last < 0) | (last > geometry.page_size)
            require(False, "kv_last_page_len", last[wrong][:4], "1..page_size, 0 if empty")


def check_attend(request: Attend, geometry: PoolGeometry) -> None:
    """Cheap checks for every call, by the layer's group; `check_plan` is for new plans."""
    q, heads = request.q, geometry.num_kv_heads
    good = q.ndim == 3 and q.shape[1] % heads == 0 and q.shape[2] == geometry.head_dim
    require(good and q.shape[1] > 0, "q", q.shape, f"[n, multiple of {heads}, {geometry.head_dim}]")
    require(len(request.plan.positions) == len(q), "q", len(q), "one row per plan row")
    require(len(q) * q.shape[1] < 2**31, "q", q.shape, "fewer than 2^31 rows and heads")
    if request.mask is not None:
        good = len(request.mask.row_offsets) == len(q)
        require(good, "mask.row_offsets", len(request.mask.row_offsets), "one per plan row")


def check_plan(request: Attend, geometry: PoolGeometry) -> None:
    """Everything a kernel reads through a plan's indices."""
    plan, rows = request.plan, len(request.q)
    for level in plan.levels:
        check_level(level, rows, geometry)
    if plan.order is not None:
        counts = np.bincount(plan.order, minlength=rows) if rows else np.zeros(0, np.int64)
        good = len(plan.order) == rows and len(counts) == rows and bool((counts == 1).all())
        require(good, "order", len(plan.order), f"a permutation of {rows} rows")


def check_ragged(request: RaggedAttend) -> None:
    """Shapes and indptr of a ragged request, whose head_dims need not be the pool's."""
    q, k, v = request.q, request.k, request.v
    dims = (q.ndim, k.ndim, v.ndim)
    require(dims == (3, 3, 3), "q, k, v", dims, "three dimensions")
    alike = k.shape[:2] == v.shape[:2] and k.dtype == v.dtype
    require(alike, "k, v", (k.shape, v.shape), "as many rows and heads, of one dtype")
    good = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2]
    require(good and q.shape[1] > 0, "q", q.shape, f"heads and head_dim to go with {k.shape}")
    check_indptr(request.qo_indptr, len(q), "qo_indptr")
    check_indptr(request.kv_indptr, len(k), "kv_indptr")
    good = len(request.qo_indptr) == len(request.kv_indptr)
    require(good, "kv_indptr", len(request.kv_indptr), "as many requests as qo_indptr")
    check_dims(k.shape[2], v.shape[2], tensor_dtype(k, "k"))


def check_states(o: Tensor, lse: Tensor, indptr: Int32) -> DType:
    """Shapes of states to merge; the dtype of o."""
    require(o.ndim == 3, "o", o.shape, "[nnz, heads, head_dim]")
    require(lse.shape == o.shape[:2], "lse", lse.shape, f"{o.shape[:2]}")
    require(lse.dtype == np.float32, "lse", lse.dtype, "float32")
    check_indptr(indptr, len(o), "indptr")
    return tensor_dtype(o, "o")
