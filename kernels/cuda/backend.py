"""`CudaBackend`: the pool on one device, behind the contract of `kernels.backend`.

It checks requests, brings q and masks to the device, has attention launched there, and starts the
answers on their way to where they belong. Rows and merges have files of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from time import perf_counter

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
    Mixed,
    Numerics,
    Pending,
    PoolGeometry,
    RaggedAttend,
    StageSeconds,
    Tensor,
    split_keys,
)
from kernels.compile import DEFAULT_CACHE
from kernels.cuda import checks
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.attention.kernel_sets import SPLIT_KEYS
from kernels.cuda.attention.runner import AttentionRunner
from kernels.cuda.attention.steps import DevicePlan
from kernels.cuda.common.kernel import HEAD_DIMS
from kernels.cuda.device.answers import Answers, states_made
from kernels.cuda.device.inputs import Uploaded, Wanted, as_is, upload
from kernels.cuda.device.launch import Library, device_arch
from kernels.cuda.device.pending import First, Result
from kernels.cuda.device.transfer import Transfers, mark
from kernels.cuda.kv.pool import allocate, pool_view
from kernels.cuda.kv.ragged import ragged_plan, ragged_view
from kernels.cuda.kv.view import KvView
from kernels.cuda.masks.expand import PADDING
from kernels.cuda.merge.merger import Merger
from kernels.cuda.pages.copies import CudaPageCopies
from kernels.cuda.rows.mover import RowMover
from kernels.cuda.specs import group_specs
from kernels.outputs import check_outs


@dataclass(frozen=True, slots=True, eq=False)
class GroupKernels:
    """A group of layers: its own geometry (`PoolGeometry.alone`), where its pages are, and what
    moves its rows."""

    geometry: PoolGeometry
    kv: KvView
    rows: RowMover


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
        numerics: Numerics = "fast",
        cache: Path = DEFAULT_CACHE,
    ) -> None:
        checks.check_pool(geometry)
        self._geometry = geometry
        self._lost: str | None = None
        self._page_copies: CudaPageCopies | None = None
        with self.guarded():
            cupy.cuda.Device(device).use()
            properties = runtime.getDeviceProperties(device)
            self._device: str = properties["name"].decode()
            self.multiprocessors = int(properties["multiProcessorCount"])
            self.library = Library(device_arch(device), cache)
            self.transfers = Transfers()
            self._pool = allocate(geometry, self.transfers, poison)
            self._split_keys = split_keys(numerics, SPLIT_KEYS, geometry.page_size)
            here = (self.library, self.transfers, self.multiprocessors)
            how = (self._split_keys, geometry.page_size)
            self.attention = AttentionRunner(*here, *how)
            shared = (self.library, self.transfers, self.guarded)
            self.groups = []
            for group in geometry.groups:
                alone, kv = geometry.alone(group), pool_view(geometry, group, self._pool.ptr)
                self.groups.append(GroupKernels(alone, kv, RowMover(alone, kv, *shared)))
            self.kv = self.groups[geometry.leading].kv
            in_order = self._split_keys > 0
            self._merging = Merger(self.kv.v_head_dim, self.multiprocessors, *shared, in_order)
            specs = (group_specs(self.library.arch, one, numerics) for one in geometry.groups)
            self.library.prepare(tuple(dict.fromkeys(chain.from_iterable(specs))))
        # timed by the benchmarks, as is attention.enqueue
        self.enqueue_rows = self.groups[geometry.leading].rows.enqueue
        self.enqueue_merge = self._merging.enqueue

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
    def split_keys(self) -> int:
        return self._split_keys

    @property
    def unsupported(self) -> tuple[str, ...]:
        return (
            "pools of fp32",
            f"head_dim other than {', '.join(map(str, HEAD_DIMS))}, where v_head_dim is the same",
            "head_dim and v_head_dim that are not equal, and no multiples of 8 up to 256",
            "latents of fp8",
            "ragged keys of fp8",
            "gather into fp8",
        )

    def register(self, address: int, size: int) -> bool:
        with self.guarded():
            return self.transfers.register(address, size)

    def unregister(self, address: int) -> None:
        if self._lost is None:
            with self.guarded():
                self.transfers.unregister(address)

    def append(self, layer: int, k: Tensor, v: Tensor, slots: Int32) -> Pending[None]:
        group, at = self._place(layer)
        return group.rows.append(at, k, v, slots)

    def copy_rows(
        self, src_pages: Int32, dst_pages: Int32, num_rows: Int32, group: int = 0
    ) -> None:
        self.groups[group].rows.copy(src_pages, dst_pages, num_rows)

    def gather(
        self, layer: int, slots: Int32, dtype: DType, out: tuple[Tensor, Tensor] | None = None
    ) -> Pending[tuple[Tensor, Tensor]]:
        group, at = self._place(layer)
        return group.rows.gather(at, slots, dtype, out)

    def read_stored(
        self, layer: int, slots: Int32, out: tuple[Tensor, Tensor]
    ) -> Pending[tuple[Tensor, Tensor]]:
        group, at = self._place(layer)
        return group.rows.read_stored(at, slots, out)

    def write_stored(self, layer: int, k: Tensor, v: Tensor, slots: Int32) -> Pending[None]:
        group, at = self._place(layer)
        return group.rows.write_stored(at, k, v, slots)

    def _place(self, layer: int) -> tuple[GroupKernels, int]:
        """The group of a layer, and the layer's place there."""
        checks.check_layer(layer, self._geometry)
        group, at = self._geometry.places[layer]
        return self.groups[group], at

    def merge(
        self,
        o: Tensor,
        lse: Tensor,
        indptr: Int32,
        into: AttentionState | None = None,
        out: AttentionState | None = None,
        sinks: Float32 | None = None,
    ) -> Pending[AttentionState]:
        return self._merging.merge(o, lse, indptr, into, out, sinks)

    def attend(self, requests: Sequence[Attend]) -> Pending[list[AttentionState]]:
        for request in requests:
            group, _ = self._place(request.layer)
            checks.check_attend(request, group.geometry)
        if not requests:
            return Done([])
        apart = len(self.groups) > 1
        kinds = [(r.mask is not None, r.layer if apart else 0) for r in requests]
        if kinds.count(kinds[0]) < len(kinds):
            return self._attend_mixed(requests, kinds)
        check_outs(requests, self._place(requests[0].layer)[0].kv.v_head_dim)
        with self.guarded():
            return self._attend(requests)

    def _attend_mixed(
        self, requests: Sequence[Attend], kinds: Sequence[tuple[bool, int]]
    ) -> Pending[list[AttentionState]]:
        """Masked and unmasked requests need different kernels, and tensor maps of pages whose
        layers are together are of one layer: several launches, answers in order."""
        every = sorted(set(kinds))
        parts = [
            self.attend([r for r, one in zip(requests, kinds, strict=True) if one == kind])
            for kind in every
        ]
        return Mixed(parts, [every.index(kind) for kind in kinds])

    def _attend(self, requests: Sequence[Attend]) -> Pending[list[AttentionState]]:
        seconds, start = StageSeconds(), perf_counter()
        q, first = [request.q for request in requests], requests[0]
        group, _ = self._place(first.layer)
        compute = compute_dtype(checks.tensor_dtype(first.q, "q"), group.geometry.dtype)
        config = AttentionConfig(
            group.kv, first.q.shape[1], compute, first.scoring, first.mask is not None
        )
        plans = [(self._geometry.places[one.layer][1], one.plan) for one in requests]
        device_plan = self.attention.find(plans, config)
        if device_plan is None:
            for request in requests:
                checks.check_plan(request, group.geometry)
            device_plan = self.attention.make(plans, config)
        seconds.plan = perf_counter() - start
        layers = {layer for layer, _ in plans}
        layer = layers.pop() if len(layers) == 1 else None
        sinks = _sinks(requests)
        wanted = [Wanted(q, NUMPY_DTYPES[compute]), *_masks(r.mask for r in requests)]
        uploaded = upload(self.transfers, [*wanted, *as_is(*sinks)])
        seconds.copy_in = perf_counter() - start - seconds.plan
        return self._launch(device_plan, config, layer, requests, uploaded, sinks, seconds)

    def _launch(
        self,
        device_plan: DevicePlan,
        config: AttentionConfig,
        layer: int | None,
        requests: Sequence[Attend | RaggedAttend],
        uploaded: Uploaded,
        sinks: Sequence[Float32],
        seconds: StageSeconds,
    ) -> Pending[list[AttentionState]]:
        """Launch attention of the last `uploaded` arrays, q, mask and sinks, and start the result
        copies."""
        outs, values = [request.out for request in requests], config.kv.v_head_dim
        if device_plan.num_rows == 0:
            empty = [out or _empty(r.q, values) for out, r in zip(outs, requests, strict=True)]
            return Done(empty)
        shapes = [((*r.q.shape[:2], values), r.q.dtype, r.out) for r in requests]
        answers = Answers(self.transfers, states_made(shapes, NUMPY_DTYPES[config.compute]))
        at = uploaded.at[-1 - 2 * config.masked - len(sinks) :]
        mask = (at[1], at[2]) if config.masked else (0, 0)
        given = (at[-1], sinks[0].size) if sinks else (0, 0)
        o, lse = answers.at
        with self.transfers.compute:
            self.attention.enqueue(device_plan, config, layer, (at[0], o, lse), mask, given)
        launched = mark(self.transfers.compute)
        uploaded.release(launched, device_plan)
        done = answers.send(launched)

        def states() -> list[AttentionState]:
            taken = answers.take()
            made = map(AttentionState, taken[: len(outs)], taken[len(outs) :])
            return [out or state for out, state in zip(outs, made, strict=True)]

        return Result(self.guarded, done, states, seconds)

    def attend_ragged(self, request: RaggedAttend) -> Pending[AttentionState]:
        checks.check_ragged(request)
        check_outs([request], request.v.shape[2])
        dtypes = checks.tensor_dtype(request.q, "q"), checks.tensor_dtype(request.k, "k")
        compute = compute_dtype(*dtypes)
        with self.guarded():
            start = perf_counter()
            kind = NUMPY_DTYPES[compute]
            wanted = [Wanted((tensor,), kind) for tensor in (request.k, request.v, request.q)]
            sinks = _sinks([request])
            wanted += [*_masks([request.mask]), *as_is(*sinks)]
            uploaded = upload(self.transfers, wanted)
            seconds = StageSeconds(copy_in=perf_counter() - start)
            tokens, heads, head_dim = request.k.shape
            k, v = uploaded.at[:2]
            values: int = request.v.shape[2]
            kv = ragged_view(heads, head_dim, compute, k, v, tokens, values)
            masked = request.mask is not None
            config = AttentionConfig(kv, request.q.shape[1], compute, request.scoring, masked)
            ends = request.qo_indptr, request.kv_indptr
            plan = ragged_plan(*ends, request.causal, request.row_positions)
            device_plan = self.attention.make([(0, plan)], config)
            seconds.plan = perf_counter() - start - seconds.copy_in
            made = self._launch(device_plan, config, 0, [request], uploaded, sinks, seconds)
            return First(made)

    @property
    def page_copies(self) -> CudaPageCopies:
        if self._page_copies is None:
            with self.guarded():
                here = (self.library, self.transfers, self.guarded)
                self._page_copies = CudaPageCopies(self._geometry, self.kv.k, *here)
        return self._page_copies

    @property
    def num_copy_streams(self) -> int:
        """Streams of the copies of pages, where there are any."""
        return 0 if self._page_copies is None else self._page_copies.num_streams

    def close(self) -> None:
        if self._lost is None:
            if self._page_copies is not None:
                self._page_copies.close()
            self.transfers.close()
        self._page_copies = None
        self._pool = None
        cupy.get_default_memory_pool().free_all_blocks()  # the process may go on
        self._lost = "the backend is closed"


@cache
def compute_dtype(q: DType, keys: DType) -> DType:
    """The 16-bit format that q and keys meet in: the keys' own, else q's, else fp16."""
    return next((dtype for dtype in (keys, q) if dtype in ("fp16", "bf16")), "fp16")


def _empty(q: Tensor, v_head_dim: int) -> AttentionState:
    """States of no rows."""
    shape = q.shape[:2]
    return AttentionState(np.zeros((*shape, v_head_dim), q.dtype), np.zeros(shape, np.float32))


def _sinks(requests: Sequence[Attend | RaggedAttend]) -> tuple[Float32, ...]:
    """The sinks of a launch: none, one for each head, or one for each head of each row."""
    if len(requests) == 1:
        return () if requests[0].sinks is None else (requests[0].sinks,)
    if all(request.sinks is None for request in requests):
        return ()
    return (np.concatenate([_sinks_of_rows(request) for request in requests]),)


def _sinks_of_rows(request: Attend | RaggedAttend) -> Float32:
    """A request's sinks for each of its rows, -inf for none."""
    sinks = np.float32(-np.inf) if request.sinks is None else request.sinks
    return np.broadcast_to(sinks, request.q.shape[:2])


def _masks(masks: Iterable[Mask | None]) -> list[Wanted]:
    """Custom masks as the kernels want them on the device."""
    return as_is(*joined_masks([mask for mask in masks if mask is not None]))


def joined_masks(masks: Sequence[Mask]) -> tuple[Array, ...]:
    """(bits, row_offsets) of several masks back to back, padded for wide reads; () for none."""
    if not masks:
        return ()
    starts = np.cumsum([0, *(len(mask.bits) for mask in masks)])
    bits = np.zeros(int(starts[-1]) + PADDING, np.uint8)
    for mask, start in zip(masks, starts[:-1], strict=True):
        bits[start : start + len(mask.bits)] = mask.bits
    offsets = [m.row_offsets + 8 * s for m, s in zip(masks, starts[:-1], strict=True)]
    return bits, np.concatenate(offsets).astype(np.int64, copy=False)
