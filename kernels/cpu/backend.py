"""`Backend` on the CPU with torch: reads requests, runs the loop, hands back numpy."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from kernels.backend import (
    Array,
    Attend,
    AttentionState,
    Done,
    DType,
    Float32,
    Int32,
    Level,
    Pending,
    Plan,
    PoolGeometry,
    RaggedAttend,
    StageSeconds,
)
from kernels.cpu import state
from kernels.cpu.attention import attention
from kernels.cpu.pool import Pool, allocate, pair
from kernels.cpu.tensors import dtype_name, to_numpy, to_torch
from kernels.cpu.work import check_range, inverse, lay_out

T = TypeVar("T")


class CpuBackend:
    """The reference, and a real backend: see `kernels.backend.Backend`."""

    def __init__(self, geometry: PoolGeometry, *, device: int = 0, poison: bool = False) -> None:
        self._geometry = geometry
        self._pool = allocate(geometry)
        if poison:
            self._pool.fill_with_nan()

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def device(self) -> str:
        return f"{platform.machine()}, {torch.get_num_threads()} threads"

    @property
    def geometry(self) -> PoolGeometry:
        return self._geometry

    @property
    def unsupported(self) -> tuple[str, ...]:
        return ()

    def append(self, layer: int, k: Array, v: Array, slots: Int32) -> None:
        page, offset = self._split(slots)
        self._pool.k.write(layer, page, offset, k)
        self._pool.v.write(layer, page, offset, v)

    def copy_rows(self, src_pages: Int32, dst_pages: Int32, num_rows: Int32) -> None:
        check_range("src_pages", src_pages, self._geometry.num_pages)
        check_range("dst_pages", dst_pages, self._geometry.num_pages)
        first = np.cumsum(num_rows) - num_rows
        offset = torch.from_numpy(np.arange(int(num_rows.sum())) - np.repeat(first, num_rows))
        src, dst = (
            torch.from_numpy(np.repeat(pages.astype(np.int64), num_rows))
            for pages in (src_pages, dst_pages)
        )
        self._pool.k.copy(src, dst, offset)
        self._pool.v.copy(src, dst, offset)

    def attend(self, requests: Sequence[Attend]) -> Pending[list[AttentionState]]:
        seconds = StageSeconds()
        if not requests:
            return Done([], seconds)
        clock = time.perf_counter()
        per_page = self._geometry.page_size * self._geometry.num_kv_heads * self._geometry.head_dim
        work = lay_out(requests, self._geometry.num_pages, self._geometry.page_size, per_page)
        seconds.plan, clock = _lap(clock)
        q = torch.cat([_in_plan_order(request) for request in requests])
        seconds.copy_in, clock = _lap(clock)
        o, lse = attention(self._pool, work, q, requests[0].scoring).finish(self._pool.v.scale)
        seconds.kernel, clock = _lap(clock)
        states = _split_states(requests, o, lse)
        seconds.copy_out, clock = _lap(clock)
        return Done(states, seconds)

    def attend_ragged(self, request: RaggedAttend) -> Pending[AttentionState]:
        seconds = StageSeconds()
        clock = time.perf_counter()
        pool, paged = _as_paged(request)
        work = lay_out([paged], request.k.shape[0], 1, request.k.shape[1] * request.k.shape[2])
        seconds.plan, clock = _lap(clock)
        o, lse = attention(pool, work, to_torch(request.q), request.scoring).finish(1.0)
        seconds.kernel, clock = _lap(clock)
        states = _split_states([paged], o, lse)
        seconds.copy_out, clock = _lap(clock)
        return Done(states[0], seconds)

    def merge(
        self, o: Array, lse: Float32, indptr: Int32, into: AttentionState | None = None
    ) -> Pending[AttentionState]:
        return _timed(lambda: state.merge(o, lse, indptr, into))

    def gather(self, layer: int, slots: Int32, dtype: DType) -> Pending[tuple[Array, Array]]:
        page, offset = self._split(slots)

        def read() -> tuple[Array, Array]:
            k, v = (s.read(layer, page, offset) for s in (self._pool.k, self._pool.v))
            return to_numpy(k, dtype), to_numpy(v, dtype)

        return _timed(read)

    def close(self) -> None:
        self._pool = allocate(PoolGeometry(1, 0, 1, 1, 1))

    def _split(self, slots: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        num_slots = self._geometry.num_pages * self._geometry.page_size
        check_range("slots", slots, num_slots)
        page, offset = np.divmod(slots.astype(np.int64), self._geometry.page_size)
        return torch.from_numpy(page), torch.from_numpy(offset)


def _in_plan_order(request: Attend) -> torch.Tensor:
    q, order = to_torch(request.q), request.plan.order
    return q if order is None else q[torch.from_numpy(order.astype(np.int64))]


def _split_states(
    requests: Sequence[Attend], o: torch.Tensor, lse: torch.Tensor
) -> list[AttentionState]:
    """Each request's rows, in its own order and q's dtype."""
    states, begin = [], 0
    for request in requests:
        rows = slice(begin, begin + request.plan.positions.size)
        begin = rows.stop
        back, own_o, own_lse = inverse(request.plan), o[rows], lse[rows]
        if back is not None:
            own_o, own_lse = own_o[torch.from_numpy(back)], own_lse[torch.from_numpy(back)]
        name = dtype_name(request.q.dtype)
        states.append(AttentionState(to_numpy(own_o, name), to_numpy(own_lse, "fp32")))
    return states


def _as_paged(request: RaggedAttend) -> tuple[Pool, Attend]:
    """The request's own k and v as a pool of one-token pages, in paired 4-D storage."""
    k, v = to_torch(request.k)[:, None], to_torch(request.v)[:, None]
    kv_lens, qo_lens = np.diff(request.kv_indptr), np.diff(request.qo_indptr)
    within = np.arange(request.q.shape[0]) - np.repeat(request.qo_indptr[:-1], qo_lens)
    level = Level(
        qo_indptr=request.qo_indptr,
        kv_indptr=request.kv_indptr,
        kv_indices=np.arange(request.k.shape[0], dtype=np.int32),
        kv_last_page_len=np.minimum(kv_lens, 1),
        kv_start=np.zeros_like(kv_lens),
        causal=request.causal,
    )
    plan = Plan((level,), (np.repeat(kv_lens - qo_lens, qo_lens) + within).astype(np.int32))
    paged = Attend(0, request.q, plan, request.scoring, request.mask)
    return pair(k, v, "NHD", dtype_name(request.k.dtype)), paged


def _timed(run: Callable[[], T]) -> Done[T]:
    clock = time.perf_counter()
    value = run()
    return Done(value, StageSeconds(kernel=time.perf_counter() - clock))


def _lap(clock: float) -> tuple[float, float]:
    now = time.perf_counter()
    return now - clock, now
