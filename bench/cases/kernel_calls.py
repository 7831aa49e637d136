"""The rows of workloads.json on a device: pools, tensors, and the call to time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from bench.cases.kernel_plans import (
    SEED,
    Row,
    append_slots,
    config_of,
    geometry_of,
    merge_indptr,
    pool_plan,
    ragged_row_plan,
    rotation,
)
from kernels.backend import NUMPY_DTYPES, DType, Numerics
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.attention.steps import DevicePlan
from kernels.cuda.backend import CudaBackend
from kernels.cuda.kv.ragged import ragged_view


@dataclass(frozen=True, slots=True)
class KernelCall:
    """`call(i)` enqueues call i of `calls` on the current stream; `owners` keep its memory.

    `with_sinks(i)` is the same call of the same tensors, with a sink for each head.
    """

    call: Callable[[int], None]
    calls: int
    owners: tuple[Any, ...]
    with_sinks: Callable[[int], None] | None = None


def fill_random(address: int, count: int, dtype: np.dtype[Any], owner: Any) -> None:
    """Unit-normal values at a device address: a random block of 8 Mi values, repeated."""
    values = np.random.default_rng(SEED).standard_normal(min(count, 1 << 23), np.float32)
    block = cupy.asarray(values.astype(dtype).view(np.uint8))
    size = count * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address, size, owner)
    target = cupy.ndarray((size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    for start in range(0, size, block.size):
        stop = min(size, start + block.size)
        target[start:stop] = block[: stop - start]
    cupy.cuda.get_current_stream().synchronize()


def fill_pool(backend: CudaBackend) -> None:
    """Unit-normal K and V in all pages of all layers."""
    pool = backend.geometry
    kind = NUMPY_DTYPES[pool.dtype]
    values = pool.num_layers * pool.num_pages * pool.page_bytes // kind.itemsize
    fill_random(backend.kv.k, values, kind, backend)


def random_array(shape: Sequence[int], dtype: DType) -> Any:
    """Device bytes of unit-normal values."""
    kind, count = NUMPY_DTYPES[dtype], int(np.prod(shape))
    array = cupy.empty(count * kind.itemsize, cupy.uint8)
    fill_random(array.data.ptr, count, kind, array)
    return array


def build(row: Row, flat: bool = False, numerics: Numerics = "fast") -> KernelCall:
    """A row's call, with its tensors on the device."""
    if row["kind"] == "append":
        return append_case(row)
    if row["kind"] == "merge":
        return merge_case(row)
    if row.get("storage") == "ragged":
        return ragged_case(row, numerics)
    return pool_case(row, flat, numerics)


def pool_case(row: Row, flat: bool, numerics: Numerics) -> KernelCall:
    """Decode, cascade, paged prefill: each call reads another layer, which is not in the cache."""
    g, plan = pool_plan(row, flat)
    layers = g.num_layers
    backend = CudaBackend(g, numerics=numerics)
    fill_pool(backend)
    config = config_of(row, backend.kv)
    device_plan = backend.attention.make([(0, plan)], config)
    call, owners = attend_call(row, backend, config, device_plan, len(plan.positions))
    return KernelCall(
        lambda i: call(i % layers, False),
        max(6, layers),
        (backend, owners),
        lambda i: call(i % layers, True),
    )


def attend_call(
    row: Row,
    backend: CudaBackend,
    config: AttentionConfig,
    device_plan: DevicePlan,
    rows: int,
) -> tuple[Callable[[int, bool], None], Any]:
    """Attention in a layer, with sinks or without, and its tensors."""
    shape = (rows, row["num_qo_heads"], row["head_dim"])
    q, o = random_array(shape, "fp16"), cupy.empty(int(np.prod(shape)) * 2, cupy.uint8)
    lse = cupy.empty(rows * row["num_qo_heads"], cupy.float32)
    given = cupy.zeros(row["num_qo_heads"], cupy.float32)
    where = (q.data.ptr, o.data.ptr, lse.data.ptr)
    backend.transfers.finish()

    def call(layer: int, sinks: bool) -> None:
        how = (given.data.ptr, given.size) if sinks else (0, 0)
        backend.attention.enqueue(device_plan, config, layer, where, sinks=how)

    return call, (q, o, lse, given)


def ragged_case(row: Row, numerics: Numerics) -> KernelCall:
    backend = CudaBackend(geometry_of(row | {"page_size": 16}, 1, 1), numerics=numerics)
    heads, head_dim = row["num_kv_heads"], row["head_dim"]
    tokens, plan = ragged_row_plan(row)
    k = random_array((tokens, heads, head_dim), row["kv_dtype"])
    v = random_array((tokens, heads, head_dim), row["kv_dtype"])
    kv = ragged_view(heads, head_dim, row["kv_dtype"], k.data.ptr, v.data.ptr, tokens)
    config = config_of(row, kv)
    device_plan = backend.attention.make([(0, plan)], config)
    call, owners = attend_call(row, backend, config, device_plan, len(plan.positions))
    owners = (backend, k, v, owners)
    return KernelCall(lambda _: call(0, False), 6, owners, lambda _: call(0, True))


def append_case(row: Row) -> KernelCall:
    geometry, slots = append_slots(row)
    layers, rows = geometry.num_layers, len(slots)
    backend = CudaBackend(geometry)
    shape = (layers, rows, row["num_kv_heads"], row["head_dim"])
    k, v = random_array(shape, "fp16"), random_array(shape, "fp16")
    slots_at = cupy.asarray(slots)
    backend.transfers.finish()
    step = k.size // layers

    def call(i: int) -> None:
        at = i % layers * step
        given = k.data.ptr + at, v.data.ptr + at, slots_at.data.ptr
        backend.enqueue_rows("append_rows", i % layers, "fp16", rows, given)

    return KernelCall(call, max(6, layers), (backend, k, v, slots_at))


def merge_case(row: Row) -> KernelCall:
    geometry, lists = merge_indptr(row)
    backend = CudaBackend(geometry)
    rows, states, heads, dim = row["rows"], row["states"], row["num_heads"], row["head_dim"]
    copies = rotation(row["bytes"])
    o = [random_array((rows * states, heads, dim), "fp16") for _ in range(copies)]
    lse = random_array((rows * states, heads), "fp32")
    indptr = cupy.asarray(lists)
    out, out_lse = cupy.empty(rows * heads * dim * 2, cupy.uint8), cupy.empty(rows * heads * 4)
    given = cupy.zeros(heads, cupy.float32)
    backend.transfers.finish()

    def call(i: int, sinks: bool = False) -> None:
        backend.enqueue_merge(
            (rows, heads, dim),
            "fp16",
            (o[i % copies].data.ptr, lse.data.ptr, indptr.data.ptr),
            (out.data.ptr, out_lse.data.ptr),
            states,
            sinks=given.data.ptr if sinks else 0,
        )

    owners = (backend, o, lse, indptr, out, out_lse, given)
    return KernelCall(call, max(6, copies), owners, lambda i: call(i, True))
