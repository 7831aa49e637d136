"""`CudaBackend`: the pool on one device, behind the contract of `kernels.backend`.

Numerics: scores, softmax and accumulation are float32; products take 16-bit operands. An fp16 or
bf16 pool computes in its own dtype and q is rounded to it; an fp8 pool computes in q's dtype (fp16
for float32 q). Ragged float32 is rounded to fp16. o comes back in q's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from cupy_backends.cuda.api.driver import CUDADriverError

from kernels.backend import (
    NUMPY_DTYPES,
    Array,
    Attend,
    AttentionState,
    DeviceLost,
    Done,
    DType,
    Float32,
    Int32,
    Mask,
    Pending,
    PoolGeometry,
    RaggedAttend,
    StageSeconds,
    Unsupported,
)
from kernels.compile import DEFAULT_CACHE
from kernels.cuda import checks
from kernels.cuda.attention import Attention, PoolMaps, Resident, Scene, Store
from kernels.cuda.launch import MERGE_PARAMS, POOL_ROWS, Library, device_arch, params
from kernels.cuda.pending import First, Mixed, Result
from kernels.cuda.ragged import ragged_plan, ragged_store
from kernels.cuda.shapes import HEAD_DIMS, merge_launch, rows_spec, service_specs
from kernels.cuda.transfer import Transfers, aligned, pinned

_DTYPE_NAMES: dict[np.dtype[Any], DType] = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
MASK_PADDING = 32
"""Readable bytes that kernels may touch past a mask's last bit."""


class CudaBackend:
    """One device's pool and kernels, used by one thread; calls take effect in call order.

    Raises Unsupported for a geometry it has no kernels for, CompileError when a kernel does not
    compile, MemoryError when the pool does not fit the device.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        device: int = 0,
        *,
        poison: bool = False,
        cache: Path = DEFAULT_CACHE,
    ) -> None:
        if geometry.dtype == "fp32":
            raise Unsupported("dtype", "fp32", "the CUDA backend stores fp16, bf16 or fp8")
        if geometry.head_dim not in HEAD_DIMS:
            raise Unsupported("head_dim", geometry.head_dim, f"the CUDA backend has {HEAD_DIMS}")
        self._geometry = geometry
        self._lost: str | None = None
        with self.guarded():
            cupy.cuda.Device(device).use()
            properties = runtime.getDeviceProperties(device)
            self._device: str = properties["name"].decode()
            self.multiprocessors = int(properties["multiProcessorCount"])
            self.library = Library(device_arch(device), cache)
            self.transfers = Transfers()
            self._pool = self._allocate(poison)
            self.store = self._pool_store()
            self.attention = Attention(self.library, self.transfers, self.multiprocessors)
            self.library.prepare(
                service_specs(
                    self.library.arch, geometry.head_dim, geometry.dtype, geometry.page_size
                )
            )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn a failure of the device into `DeviceLost`, now and for every later call."""
        if self._lost is not None:
            raise DeviceLost(self._lost)
        try:
            yield
        except (runtime.CUDARuntimeError, CUDADriverError) as error:
            self._lost = f"the device failed and its pool cannot be trusted: {error}"
            raise DeviceLost(self._lost) from error

    def _allocate(self, poison: bool) -> Any:
        geometry = self._geometry
        size = geometry.num_layers * geometry.num_pages * geometry.page_bytes
        try:
            pool = self.transfers.scratch(size)
        except cupy.cuda.memory.OutOfMemoryError as error:
            free, total = runtime.memGetInfo()
            raise MemoryError(
                f"the pool needs {size} bytes, {free} of {total} are free on {self._device}: "
                "lower pool.num_pages or pool.memory_fraction"
            ) from error
        if poison:
            pool.memset_async(0xFF, size, self.transfers.compute)
        return pool

    def _pool_store(self) -> Store:
        g = self._geometry
        half = g.page_size * g.num_kv_heads
        nhd = g.layout == "NHD"
        k_scale, v_scale = g.scales
        return Store(
            k=self._pool.ptr,
            v=self._pool.ptr + g.page_bytes // 2,
            layer_bytes=g.num_pages * g.page_bytes,
            layer_rows=g.num_pages * 2 * half,
            page_rows=2 * half,
            token_rows=g.num_kv_heads if nhd else 1,
            head_rows=1 if nhd else g.page_size,
            page_size=g.page_size,
            num_kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            dtype=g.dtype,
            k_scale=k_scale,
            v_scale=v_scale,
            num_pages=g.num_pages,
            contiguous=False,
            maps=PoolMaps(g, self._pool.ptr),
        )

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def device(self) -> str:
        return self._device

    @property
    def geometry(self) -> PoolGeometry:
        return self._geometry

    @property
    def unsupported(self) -> tuple[str, ...]:
        return (
            "pools of fp32",
            f"head_dim other than {', '.join(map(str, HEAD_DIMS))}",
            "ragged keys of fp8",
            "gather into fp8",
        )

    # rows

    def append(self, layer: int, k: Array, v: Array, slots: Int32) -> None:
        checks.check_layer(layer, self._geometry)
        checks.check_kv(k, v, self._geometry, len(slots))
        checks.check_slots(slots, self._geometry)
        dtype = tensor_dtype(k, "k")
        if len(slots) == 0:
            return
        with self.guarded():
            buffer, (k_at, v_at, slots_at) = self.transfers.upload((k, v, slots))
            count = np.int32(len(slots))
            with self.transfers.compute:
                self.enqueue_rows(
                    "append_rows",
                    layer,
                    dtype,
                    len(slots),
                    (address(k_at), address(v_at), address(slots_at), count),
                )
            self.transfers.retire(buffer)

    def enqueue_rows(
        self, entry: str, layer: int, dtype: DType, rows: int, arguments: tuple[Any, ...]
    ) -> None:
        """Launch append_rows or gather_rows on the current stream: 8 or 16 values a thread."""
        g = self._geometry
        if rows * g.num_kv_heads * g.head_dim >= 2**32:
            raise Unsupported("rows", rows, "fewer than 2^32 values of k at a time")
        function = self.library.function(rows_spec(g.head_dim, dtype, g.dtype), entry)
        threads = rows * g.num_kv_heads * (g.head_dim // 8)
        per_block = 512 if entry == "append_rows" else 256
        function((-(-threads // per_block),), (256,), (self._pool_rows(layer), *arguments))

    def _pool_rows(self, layer: int) -> Any:
        store = self.store
        shift = layer * store.layer_bytes
        return params(
            POOL_ROWS,
            k=store.k + shift,
            v=store.v + shift,
            layer_rows=store.layer_rows,
            page_rows=store.page_rows,
            token_rows=store.token_rows,
            head_rows=store.head_rows,
            page_size=store.page_size,
            num_kv_heads=store.num_kv_heads,
            k_scale=store.k_scale,
            v_scale=store.v_scale,
        )

    def copy_rows(self, src_pages: Int32, dst_pages: Int32, num_rows: Int32) -> None:
        g = self._geometry
        checks.check_pages(src_pages, g, "src_pages")
        checks.check_pages(dst_pages, g, "dst_pages")
        same = len(src_pages) == len(dst_pages) == len(num_rows)
        checks.require(same, "num_rows", len(num_rows), "one per source and destination page")
        if len(num_rows) == 0:
            return
        low, high = int(num_rows.min()), int(num_rows.max())
        checks.require(low >= 0 and high <= g.page_size, "num_rows", (low, high), "0..page_size")
        with self.guarded():
            buffer, at = self.transfers.upload((src_pages, dst_pages, num_rows))
            function = self.library.function(rows_spec(g.head_dim, "fp16", g.dtype), "copy_rows")
            with self.transfers.compute:
                function(
                    (len(num_rows), g.num_layers), (256,), (self._pool_rows(0), *map(address, at))
                )
            self.transfers.retire(buffer)

    def gather(self, layer: int, slots: Int32, dtype: DType) -> Pending[tuple[Array, Array]]:
        g = self._geometry
        checks.check_layer(layer, g)
        checks.check_slots(slots, g)
        if dtype.startswith("fp8"):
            raise Unsupported("dtype", dtype, "gather gives fp16, bf16 or fp32")
        shape = (len(slots), g.num_kv_heads, g.head_dim)
        with self.guarded():
            k, v = pinned(shape, NUMPY_DTYPES[dtype]), pinned(shape, NUMPY_DTYPES[dtype])
            if len(slots) == 0:
                return Done((k, v))
            buffer, (slots_at,) = self.transfers.upload((slots,))
            second = aligned(k.nbytes)
            out = self.transfers.scratch(2 * second)
            with self.transfers.compute:
                self.enqueue_rows(
                    "gather_rows",
                    layer,
                    dtype,
                    len(slots),
                    (
                        address(out.ptr),
                        address(out.ptr + second),
                        address(slots_at),
                        np.int32(len(slots)),
                    ),
                )
            self.transfers.retire(buffer)
            done = self.transfers.download(out.ptr, ((k, 0), (v, second)), out)
            return Result(self.guarded, done, lambda: (k, v), StageSeconds())

    # attention

    def attend(self, requests: Sequence[Attend]) -> Pending[list[AttentionState]]:
        for request in requests:
            checks.check_attend(request, self._geometry)
        if not requests:
            return Done([])
        masked = [request.mask is not None for request in requests]
        if any(masked) and not all(masked):
            return self._attend_mixed(requests, masked)
        with self.guarded():
            return self._attend(requests)

    def _attend_mixed(
        self, requests: Sequence[Attend], masked: Sequence[bool]
    ) -> Pending[list[AttentionState]]:
        """Masked and unmasked requests need different kernels: two launches, answers in order."""
        parts = [
            self.attend([r for r, m in zip(requests, masked, strict=True) if m is kind])
            for kind in (False, True)
        ]
        return Mixed(parts, masked)

    def _attend(self, requests: Sequence[Attend]) -> Pending[list[AttentionState]]:
        seconds, start = StageSeconds(), perf_counter()
        q, first = [request.q for request in requests], requests[0]
        dtype = tensor_dtype(first.q, "q")
        fp8 = self._geometry.dtype.startswith("fp8")
        compute = ("fp16" if dtype == "fp32" else dtype) if fp8 else self._geometry.dtype
        scene = Scene(self.store, first.q.shape[1], compute, first.scoring, first.mask is not None)
        plans = [(request.layer, request.plan) for request in requests]
        resident = self.attention.find(plans, scene)
        if resident is None:
            for request in requests:
                checks.check_plan(request, self._geometry)
            resident = self.attention.make(plans, scene)
        seconds.plan = perf_counter() - start
        layers = {layer for layer, _ in plans}
        layer = layers.pop() if len(layers) == 1 else None
        mask = joined_masks([r.mask for r in requests if r.mask is not None])
        return self._run(resident, scene, layer, q, mask, seconds)

    def _run(
        self,
        resident: Resident,
        scene: Scene,
        layer: int | None,
        q: Sequence[Array],
        mask: tuple[Array, ...],
        seconds: StageSeconds,
    ) -> Pending[list[AttentionState]]:
        """Upload q and mask, launch, and start the download of o and lse."""
        start = perf_counter()
        transfers, rows, heads = self.transfers, resident.num_rows, scene.num_qo_heads
        dtype, compute = q[0].dtype, NUMPY_DTYPES[scene.compute]
        shape = (rows, heads, scene.store.head_dim)
        o, lse = pinned(shape, compute), pinned(shape[:2], np.dtype(np.float32))
        if rows == 0:
            return Done([AttentionState(o.astype(dtype), lse) for _ in q])
        queries = q[0] if len(q) == 1 else np.concatenate(q)
        buffer, at = transfers.upload((queries.astype(compute, copy=False), *mask))
        second = aligned(o.nbytes)
        out = transfers.scratch(second + lse.nbytes)
        seconds.copy_in = perf_counter() - start
        with transfers.compute:
            self.attention.enqueue(
                resident,
                scene,
                layer,
                at[0],
                out.ptr,
                out.ptr + second,
                (at[1], at[2]) if mask else (0, 0),
            )
        transfers.retire(buffer)
        done = transfers.download(out.ptr, ((o, 0), (lse, second)), out)

        def states() -> list[AttentionState]:
            whole = o.astype(dtype, copy=False)
            bounds = np.cumsum([0, *(len(part) for part in q)])
            return [AttentionState(whole[a:b], lse[a:b]) for a, b in pairwise(bounds)]

        return Result(self.guarded, done, states, seconds)

    def attend_ragged(self, request: RaggedAttend) -> Pending[AttentionState]:
        checks.check_ragged(request)
        if request.k.shape[2] not in HEAD_DIMS:
            raise Unsupported("head_dim", request.k.shape[2], f"the CUDA backend has {HEAD_DIMS}")
        with self.guarded():
            start = perf_counter()
            compute = tensor_dtype(request.k, "k")
            compute = "fp16" if compute == "fp32" else compute
            kind = NUMPY_DTYPES[compute]
            k, v = request.k.astype(kind, copy=False), request.v.astype(kind, copy=False)
            buffer, (k_at, v_at) = self.transfers.upload((k, v))
            store = ragged_store(k.shape[1], k.shape[2], compute, k_at, v_at, len(k))
            scene = Scene(
                store, request.q.shape[1], compute, request.scoring, request.mask is not None
            )
            plan = ragged_plan(request.qo_indptr, request.kv_indptr, request.causal)
            resident = self.attention.make([(0, plan)], scene)
            seconds = StageSeconds(plan=perf_counter() - start)
            mask = joined_masks([request.mask] if request.mask is not None else [])
            states = self._run(resident, scene, 0, [request.q], mask, seconds)
            self.transfers.retire(buffer)
            return First(states)

    # merge

    def merge(
        self, o: Array, lse: Float32, indptr: Int32, into: AttentionState | None = None
    ) -> Pending[AttentionState]:
        dtype = tensor_dtype(o, "o")
        checks.require(o.ndim == 3, "o", o.shape, "[nnz, heads, head_dim]")
        checks.require(lse.shape == o.shape[:2], "lse", lse.shape, f"{o.shape[:2]}")
        checks.check_indptr(indptr, len(o), "indptr")
        rows, (_, heads, head_dim) = len(indptr) - 1, o.shape
        shape = (rows, heads, head_dim)
        if into is not None:
            good = into.o.shape == shape and into.o.dtype == o.dtype
            checks.require(good, "into.o", into.o.shape, f"{shape} of {o.dtype}")
        with self.guarded():
            if rows * heads * head_dim == 0:
                return Done(into or AttentionState(np.zeros(shape, o.dtype), empty_lse(shape)))
            members = (o, lse, indptr) if into is None else (o, lse, indptr, into.o, into.lse)
            buffer, at = self.transfers.upload(members)
            if into is None:
                size = rows * heads * head_dim * o.dtype.itemsize
                out = self.transfers.scratch(aligned(size) + rows * heads * 4)
                where = [out.ptr, out.ptr + aligned(size)]
            else:
                out, where = buffer, at[3:]
            longest = int(np.diff(indptr).max())
            with self.transfers.compute:
                self.enqueue_merge(shape, dtype, at[:3], where, longest, into is not None)
            host = (pinned(shape, o.dtype), pinned(shape[:2], np.dtype(np.float32)))
            done = self.transfers.download(
                where[0], ((host[0], 0), (host[1], where[1] - where[0])), (out, buffer)
            )

        def state() -> AttentionState:
            if into is None:
                return AttentionState(*host)
            np.copyto(into.o, host[0])
            np.copyto(into.lse, host[1])
            return into

        return Result(self.guarded, done, state, StageSeconds())

    def enqueue_merge(
        self,
        shape: tuple[int, int, int],
        dtype: DType,
        members: Sequence[int],
        where: Sequence[int],
        longest: int,
        into: bool = False,
    ) -> None:
        """Launch a public merge of device addresses (o, lse, indptr) -> (o, lse) of `shape`."""
        rows, heads, head_dim = shape
        special = head_dim if head_dim == self._geometry.head_dim else 0
        how = merge_launch(special, False, dtype, rows * heads, longest, self.multiprocessors)
        block = params(
            MERGE_PARAMS,
            o_in=members[0],
            lse_in=members[1],
            indptr=members[2],
            o=where[0],
            lse=where[1],
            num_rows=rows,
            num_heads=heads,
            group_size=1,
            chunk_rows=1,
            head_dim=head_dim,
            split=how.split,
            into=int(into),
        )
        function = self.library.function(how.spec, "merge_states")
        function((how.grid,), (how.threads,), (block,))

    def close(self) -> None:
        if self._lost is None:
            self.transfers.finish()
        self._pool = None
        self._lost = "the backend is closed"


def address(value: int) -> np.uint64:
    """A device address as a kernel argument."""
    return np.uint64(value)


def empty_lse(shape: tuple[int, int, int]) -> Float32:
    """lse of states over nothing."""
    return np.full(shape[:2], -np.inf, np.float32)


def tensor_dtype(array: Array, field: str) -> DType:
    """The contract's name of a tensor's dtype. Raises Unsupported for any other."""
    name = _DTYPE_NAMES.get(array.dtype)
    if name not in ("fp16", "bf16", "fp32"):
        raise Unsupported(field, array.dtype, "tensors are fp16, bf16 or fp32")
    return name


def joined_masks(masks: Sequence[Mask]) -> tuple[Array, ...]:
    """(bits, row_offsets) of several masks back to back, padded for wide reads; () for none."""
    if not masks:
        return ()
    starts = np.cumsum([0, *(len(mask.bits) for mask in masks)])
    bits = np.zeros(int(starts[-1]) + MASK_PADDING, np.uint8)
    for mask, start in zip(masks, starts[:-1], strict=True):
        bits[start : start + len(mask.bits)] = mask.bits
    offsets = [m.row_offsets + 8 * s for m, s in zip(masks, starts[:-1], strict=True)]
    return bits, np.concatenate(offsets).astype(np.int64, copy=False)
