"""Builds the rows of workloads.json on a device: pool, plans, and what each call launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import cupy
import numpy as np
from numpy.typing import NDArray

from kernels.backend import NUMPY_DTYPES, DType, Int32, Level, Plan, PoolGeometry, Scoring
from kernels.cuda.backend import CudaBackend
from kernels.cuda.kit import Resident
from kernels.cuda.ragged import ragged_plan, ragged_store
from kernels.cuda.scene import Scene

COLD_BYTES: Final = 400_000_000
"""Consecutive calls go over at least this much, several times the L2 cache."""
SEED: Final = 7
Row = dict[str, Any]
Pages = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Case:
    """`call(i)` enqueues the i-th of `calls` calls on the current stream; `owners` live with it."""

    call: Callable[[int], None]
    calls: int
    owners: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A run of pages that rows `first:stop` share, from position `start` of their sequences."""

    first: int
    stop: int
    pages: Pages
    keys: int
    start: int


def rotation(num_bytes: int) -> int:
    """Copies of a working set that make it colder than the cache."""
    return min(32, max(1, ceil(COLD_BYTES / num_bytes)))


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


def random_array(shape: Sequence[int], dtype: DType) -> Any:
    """Device bytes of unit-normal values."""
    kind, count = NUMPY_DTYPES[dtype], int(np.prod(shape))
    array = cupy.empty(count * kind.itemsize, cupy.uint8)
    fill_random(array.data.ptr, count, kind, array)
    return array


def int32(values: Any) -> Int32:
    return np.ascontiguousarray(values, dtype=np.int32)


def level_of(nodes: Sequence[Node], page_size: int, causal: bool = False) -> Level:
    """A level from its nodes, in row order."""
    return Level(
        qo_indptr=int32([0, *(node.stop for node in nodes)]),
        kv_indptr=int32(np.cumsum([0, *(len(node.pages) for node in nodes)])),
        kv_indices=int32(np.concatenate([node.pages for node in nodes])),
        kv_last_page_len=int32([(node.keys - 1) % page_size + 1 for node in nodes]),
        kv_start=int32([node.start for node in nodes]),
        causal=causal,
    )


def row_levels(row: Row) -> tuple[list[list[Node]], NDArray[np.int32], int]:
    """(nodes per level, positions, pages used) of a decode, cascade or prefill row."""
    size = row["page_size"]
    if row["kind"] == "cascade":
        batch, shape, causal_rows = row["batch"], row["levels"], None
    else:
        batch, shape = len(row["kv_lens"]), None
        causal_rows = row.get("qo_lens", [1] * batch)
    counts = (
        [[level["tokens_per_node"]] * level["nodes"] for level in shape]
        if shape
        else [row["kv_lens"]]
    )
    total = sum(ceil(keys / size) for level in counts for keys in level)
    ids = np.random.default_rng(SEED).permutation(total)
    levels, used, start = [], 0, 0
    bounds = np.cumsum([0, *causal_rows]) if causal_rows else np.arange(batch + 1)
    for keys_of in counts:
        step = (len(bounds) - 1) // len(keys_of)
        nodes = []
        for index, keys in enumerate(keys_of):
            pages = ids[used : used + ceil(keys / size)]
            used += len(pages)
            first, stop = int(bounds[index * step]), int(bounds[(index + 1) * step])
            nodes.append(Node(first, stop, pages, keys, start))
        levels.append(nodes)
        start += keys_of[0]
    if causal_rows:
        positions = np.concatenate(
            [np.arange(k - q, k) for q, k in zip(causal_rows, row["kv_lens"], strict=True)]
        )
    else:
        positions = np.full(batch, start - 1)
    return levels, int32(positions), total


def flat_plan(levels: Sequence[Sequence[Node]], positions: Int32, page_size: int) -> Plan:
    """The same attention with no sharing: every row its own run over all its nodes' pages."""
    nodes = []
    for r in range(len(positions)):
        mine = [n for level in levels for n in level if n.first <= r < n.stop]
        pages = np.concatenate([n.pages for n in mine])
        nodes.append(Node(r, r + 1, pages, sum(n.keys for n in mine), 0))
    return Plan((level_of(nodes, page_size),), positions)


def build(row: Row, flat: bool = False) -> Case:
    """Put a row on the device."""
    if row["kind"] == "append":
        return append_case(row)
    if row["kind"] == "merge":
        return merge_case(row)
    if row.get("storage") == "ragged":
        return ragged_case(row)
    return pool_case(row, flat)


def backend_for(row: Row, pages: int, layers: int) -> CudaBackend:
    return CudaBackend(
        PoolGeometry(
            num_layers=layers,
            num_pages=pages,
            page_size=row["page_size"],
            num_kv_heads=row["num_kv_heads"],
            head_dim=row["head_dim"],
            layout=row.get("layout", "NHD"),
            dtype=row["kv_dtype"],
        )
    )


def pool_case(row: Row, flat: bool) -> Case:
    """Decode, cascade, paged prefill: each call reads another layer, so that nothing is cached."""
    levels, positions, pages = row_levels(row)
    causal = bool(row.get("causal", False))
    size = row["page_size"]
    plan = Plan(tuple(level_of(nodes, size, causal) for nodes in levels), positions)
    if flat:
        plan = flat_plan(levels, positions, size)
    layers = rotation(row["bytes"])
    backend = backend_for(row, pages, layers)
    g = backend.geometry
    fill_random(
        backend.store.k,
        layers * g.num_pages * g.page_bytes // NUMPY_DTYPES[g.dtype].itemsize,
        NUMPY_DTYPES[g.dtype],
        backend,
    )
    scene = scene_for(row, backend, backend.store)
    resident = backend.attention.make([(0, plan)], scene)
    call, owners = attend_call(row, backend, scene, resident, len(positions))
    return Case(lambda i: call(i % layers), max(6, layers), (backend, owners))


def scene_for(row: Row, backend: CudaBackend, store: Any) -> Scene:
    compute: DType = "fp16" if row["kv_dtype"].startswith("fp8") else row["kv_dtype"]
    scoring = Scoring(row["head_dim"] ** -0.5)
    return Scene(store, row["num_qo_heads"], compute, scoring, False)


def attend_call(
    row: Row, backend: CudaBackend, scene: Scene, resident: Resident, rows: int
) -> tuple[Callable[[int], None], Any]:
    shape = (rows, row["num_qo_heads"], row["head_dim"])
    q, o = random_array(shape, "fp16"), cupy.empty(int(np.prod(shape)) * 2, cupy.uint8)
    lse = cupy.empty(rows * row["num_qo_heads"], cupy.float32)
    backend.transfers.finish()

    def call(layer: int) -> None:
        backend.attention.enqueue(resident, scene, layer, q.data.ptr, o.data.ptr, lse.data.ptr)

    return call, (q, o, lse)


def ragged_case(row: Row) -> Case:
    backend = backend_for(row | {"page_size": 16}, 1, 1)
    heads, head_dim = row["num_kv_heads"], row["head_dim"]
    tokens = sum(row["kv_lens"])
    k = random_array((tokens, heads, head_dim), row["kv_dtype"])
    v = random_array((tokens, heads, head_dim), row["kv_dtype"])
    store = ragged_store(heads, head_dim, row["kv_dtype"], k.data.ptr, v.data.ptr, tokens)
    plan = ragged_plan(
        int32(np.cumsum([0, *row["qo_lens"]])), int32(np.cumsum([0, *row["kv_lens"]])), True
    )
    scene = scene_for(row, backend, store)
    resident = backend.attention.make([(0, plan)], scene)
    call, owners = attend_call(row, backend, scene, resident, sum(row["qo_lens"]))
    return Case(lambda i: call(0), 6, (backend, k, v, owners))


def append_case(row: Row) -> Case:
    rows, pages = row["rows"], ceil(row["rows"] / row["page_size"])
    layers = rotation(row["bytes"])
    backend = backend_for(row, pages, layers)
    shape = (layers, rows, row["num_kv_heads"], row["head_dim"])
    k, v = random_array(shape, "fp16"), random_array(shape, "fp16")
    ids = np.random.default_rng(SEED).permutation(pages)
    slots = (ids[:, None] * row["page_size"] + np.arange(row["page_size"])).ravel()[:rows]
    slots_at = cupy.asarray(int32(slots))
    backend.transfers.finish()
    step = k.size // layers

    def call(i: int) -> None:
        at = i % layers * step
        backend.enqueue_rows(
            "append_rows",
            i % layers,
            "fp16",
            rows,
            (k.data.ptr + at, v.data.ptr + at, slots_at.data.ptr),
        )

    return Case(call, max(6, layers), (backend, k, v, slots_at))


def merge_case(row: Row) -> Case:
    backend = backend_for(row | {"page_size": 16, "num_kv_heads": 1, "kv_dtype": "fp16"}, 1, 1)
    rows, states, heads, dim = row["rows"], row["states"], row["num_heads"], row["head_dim"]
    copies = rotation(row["bytes"])
    o = [random_array((rows * states, heads, dim), "fp16") for _ in range(copies)]
    lse = random_array((rows * states, heads), "fp32")
    indptr = cupy.asarray(int32(np.arange(rows + 1) * states))
    out, out_lse = cupy.empty(rows * heads * dim * 2, cupy.uint8), cupy.empty(rows * heads * 4)
    backend.transfers.finish()

    def call(i: int) -> None:
        backend.enqueue_merge(
            (rows, heads, dim),
            "fp16",
            (o[i % copies].data.ptr, lse.data.ptr, indptr.data.ptr),
            (out.data.ptr, out_lse.data.ptr),
            states,
        )

    return Case(call, max(6, copies), (backend, o, lse, indptr, out, out_lse))
