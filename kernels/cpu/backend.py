"""`Backend` on the CPU with torch: reads requests, runs the loop, hands back numpy."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kernels.backend import (
    LEFT_OUT,
    NUMPY_DTYPES,
    POISON,
    Array,
    Attend,
    AttentionState,
    Done,
    DType,
    Float32,
    Int32,
    LayerGroup,
    Level,
    Mixed,
    Numerics,
    Pending,
    Plan,
    PoolGeometry,
    RaggedAttend,
    Scoring,
    StageSeconds,
    Tensor,
    split_keys,
)
from kernels.cpu import invariant, state
from kernels.cpu.attention import attention
from kernels.cpu.pool import HostPageCopies, Pool, allocate, pair, pool_of
from kernels.cpu.prepared import Order, Preparer, prepare
from kernels.cpu.steps import Step
from kernels.cpu.tensors import dtype_name, on_host, to_numpy, to_torch, write
from kernels.cpu.work import PagedShape, check_range
from kernels.outputs import check_gathered, check_outs, check_sinks, merge_place
from kernels.tensor import host_array


class GroupPool:
    """The pages of one group of layers, and the work that was prepared over them."""

    def __init__(
        self, geometry: PoolGeometry, group: LayerGroup, memory: torch.Tensor, split_keys: int
    ) -> None:
        self.group, self.pool = group, pool_of(memory, geometry, group)
        self._num_slots = geometry.num_pages * group.page_size
        page_step, layer_step = geometry.block_steps(group)
        blocks = {layer: at * layer_step for at, layer in enumerate(group.layers)}
        elements = group.page_size * max(group.row_elements)
        shape = PagedShape(geometry.num_pages, group.page_size, elements, page_step, blocks)
        self.prepare = Preparer(shape, split_keys)

    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of k and v of `count` tokens."""
        heads, dims = self.group.num_kv_heads, self.group.stored_dims
        return (count, heads, dims[0]), (count, heads, dims[1])

    def check_rows(self, k: Array, v: Array, count: int) -> None:
        """Raise `ValueError` unless k and v are rows of `count` tokens."""
        if (k.shape, v.shape) != (wanted := self.shapes(count)):
            raise ValueError(f"k, v = {k.shape}, {v.shape}: must be {wanted[0]}, {wanted[1]}")

    def split(self, slots: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of token slots, and the tokens before them there."""
        check_range("slots", slots, self._num_slots)
        page, offset = np.divmod(slots.astype(np.int64), self.group.page_size)
        return torch.from_numpy(page), torch.from_numpy(offset)


class CpuBackend:
    """The reference, and a real backend: see `kernels.backend.Backend`."""

    def __init__(
        self,
        geometry: PoolGeometry,
        *,
        device: int = 0,
        poison: bool = False,
        numerics: Numerics = "fast",
    ) -> None:
        self._geometry = geometry
        self._split_keys = split_keys(numerics, invariant.SPLIT_KEYS, geometry.page_size)
        self._memory = allocate(geometry)
        self._pools = [
            GroupPool(geometry, group, self._memory, self._split_keys) for group in geometry.groups
        ]
        self._inference = torch.inference_mode()
        if poison:
            self._memory.fill_(POISON)

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
    def split_keys(self) -> int:
        return self._split_keys

    @property
    def unsupported(self) -> tuple[str, ...]:
        return ()

    def register(self, address: int, size: int) -> bool:
        return False

    def unregister(self, address: int) -> None:
        """Nothing is ever registered."""

    def append(self, layer: int, k: Tensor, v: Tensor, slots: Int32) -> Pending[None]:
        rows = on_host(k, "k"), on_host(v, "v")
        if slots.min(initial=0) == LEFT_OUT:
            stored = slots != LEFT_OUT
            slots, rows = slots[stored], (rows[0][stored], rows[1][stored])
        own, at = self._place(layer)
        own.check_rows(*rows, len(slots))
        page, offset = own.split(slots)
        own.pool.k.write(at, page, offset, rows[0])
        own.pool.v.write(at, page, offset, rows[1])
        return Done(None)

    def copy_rows(
        self, src_pages: Int32, dst_pages: Int32, num_rows: Int32, group: int = 0
    ) -> None:
        check_range("src_pages", src_pages, self._geometry.num_pages)
        check_range("dst_pages", dst_pages, self._geometry.num_pages)
        first = np.cumsum(num_rows) - num_rows
        offset = torch.from_numpy(np.arange(int(num_rows.sum())) - np.repeat(first, num_rows))
        src, dst = (
            torch.from_numpy(np.repeat(pages.astype(np.int64), num_rows))
            for pages in (src_pages, dst_pages)
        )
        pool = self._pools[group].pool
        pool.k.copy(src, dst, offset)
        pool.v.copy(src, dst, offset)

    def attend(self, requests: Sequence[Attend]) -> Pending[list[AttentionState]]:
        seconds, started = StageSeconds(), time.perf_counter()
        if not requests:
            return Done([], seconds)
        if len(self._pools) > 1 and len(set(groups := self._groups(requests))) > 1:
            return self._attend_apart(requests, groups)
        own, _ = self._place(requests[0].layer)
        with self._inference:  # as a decorator it costs twice as much
            states = self._attend(own, requests, seconds, started)
        before = seconds.plan + seconds.copy_in + seconds.kernel
        seconds.copy_out = time.perf_counter() - started - before
        return Done(states, seconds)

    def _place(self, layer: int) -> tuple[GroupPool, int]:
        """The pool of a layer's group, and the layer's place there."""
        group, at = self._geometry.places[layer]
        return self._pools[group], at

    def _groups(self, requests: Sequence[Attend]) -> list[int]:
        return [self._geometry.places[request.layer][0] for request in requests]

    def _attend_apart(
        self, requests: Sequence[Attend], groups: Sequence[int]
    ) -> Pending[list[AttentionState]]:
        """Requests of several groups of layers, one group after another."""
        kinds = sorted(set(groups))
        parts = [
            self.attend([one for one, group in zip(requests, groups, strict=True) if group == kind])
            for kind in kinds
        ]
        return Mixed(parts, [kinds.index(group) for group in groups])

    def _attend(
        self, own: GroupPool, requests: Sequence[Attend], seconds: StageSeconds, clock: float
    ) -> list[AttentionState]:
        """States of the requests' rows; all stages but the last are timed, from `clock` on."""
        _check_outs(requests, own.group.v_head_dim)
        prepared, first_page = own.prepare(requests)
        seconds.plan, clock = _lap(clock)
        given = map(_in_plan_order, requests, prepared.orders)
        q = next(given) if len(requests) == 1 else torch.cat(list(given))
        seconds.copy_in, clock = _lap(clock)
        o, lse = self._states(own.pool, prepared.steps, first_page, q, requests[0].scoring)
        seconds.kernel, _ = _lap(clock)
        return _states(requests, prepared.orders, o, lse)

    @torch.inference_mode()
    def attend_ragged(self, request: RaggedAttend) -> Pending[AttentionState]:
        seconds = StageSeconds()
        clock = time.perf_counter()
        _check_outs([request], request.v.shape[2])
        pool, paged = _as_paged(request)
        tokens, heads, dim = request.k.shape
        shape = PagedShape(tokens, 1, heads * dim, 1, {0: 0})
        prepared, _ = prepare([paged], shape, split_keys=self._split_keys)
        seconds.plan, clock = _lap(clock)
        q = to_torch(on_host(request.q, "q"))
        o, lse = self._states(pool, prepared.steps, 0, q, request.scoring)
        seconds.kernel, clock = _lap(clock)
        states = _states([paged], prepared.orders, o, lse)
        seconds.copy_out, clock = _lap(clock)
        return Done(states[0], seconds)

    def _states(
        self,
        pool: Pool,
        steps: Iterable[Step],
        first_page: int,
        q: torch.Tensor,
        scoring: Scoring,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of all rows of q."""
        if self._split_keys:
            return invariant.attention(pool, steps, first_page, q, scoring)
        return attention(pool, steps, first_page, q, scoring).finish(pool.v.scale)

    def merge(
        self,
        o: Tensor,
        lse: Tensor,
        indptr: Int32,
        into: AttentionState | None = None,
        out: AttentionState | None = None,
        sinks: Float32 | None = None,
    ) -> Pending[AttentionState]:
        states = on_host(o, "o"), on_host(lse, "lse")
        check_sinks(sinks, o)
        place = merge_place(o, indptr, into, out)
        if place is not None:
            on_host(place.o, "out.o")
            on_host(place.lse, "out.lse")
        clock = time.perf_counter()
        merged = state.merge(*states, indptr, into)
        if sinks is not None:
            merged = state.add_sinks(*merged, sinks)
        answer = _state(*merged, place, dtype_name(o.dtype))
        return Done(answer, StageSeconds(kernel=time.perf_counter() - clock))

    def gather(
        self, layer: int, slots: Int32, dtype: DType, out: tuple[Tensor, Tensor] | None = None
    ) -> Pending[tuple[Tensor, Tensor]]:
        own, at = self._place(layer)
        page, offset = own.split(slots)
        places = check_gathered(out, own.shapes(len(slots)), NUMPY_DTYPES[dtype])
        for place, field in zip(places, ("out.k", "out.v"), strict=True):
            if place is not None:
                on_host(place, field)
        clock = time.perf_counter()
        k = _array(own.pool.k.read(at, page, offset), places[0], dtype)
        v = _array(own.pool.v.read(at, page, offset), places[1], dtype)
        return Done((k, v), StageSeconds(kernel=time.perf_counter() - clock))

    def read_stored(
        self, layer: int, slots: Int32, out: tuple[Tensor, Tensor]
    ) -> Pending[tuple[Tensor, Tensor]]:
        own, at = self._place(layer)
        page, offset = own.split(slots)
        places = (on_host(out[0], "out.k"), on_host(out[1], "out.v"))
        check_gathered(out, own.shapes(len(slots)), NUMPY_DTYPES[own.group.dtype])
        clock = time.perf_counter()
        for pages, place in zip((own.pool.k, own.pool.v), places, strict=True):
            bits = pages.by_token[at, page, offset]
            place[...] = bits.numpy().view(place.dtype)
        return Done(out, StageSeconds(kernel=time.perf_counter() - clock))

    def write_stored(self, layer: int, k: Tensor, v: Tensor, slots: Int32) -> Pending[None]:
        rows = on_host(k, "k"), on_host(v, "v")
        own, at = self._place(layer)
        own.check_rows(*rows, len(slots))
        page, offset = own.split(slots)
        for pages, part in zip((own.pool.k, own.pool.v), rows, strict=True):
            pages.write_bits(at, page, offset, to_torch(part))
        return Done(None)

    @property
    def page_copies(self) -> HostPageCopies:
        return HostPageCopies(self._memory, self._geometry)

    def close(self) -> None:
        self._memory, self._pools = torch.empty(0, dtype=torch.uint8), []


def _check_outs(requests: Sequence[Attend | RaggedAttend], v_head_dim: int) -> None:
    """Places of the right shapes, on the host."""
    check_outs(requests, v_head_dim)
    for request in requests:
        if request.out is not None:
            on_host(request.out.o, "out.o")
            on_host(request.out.lse, "out.lse")


def _in_plan_order(request: Attend, order: Order | None) -> torch.Tensor:
    q = to_torch(on_host(request.q, "q"))
    return q if order is None else q[order.forth]


def _states(
    requests: Sequence[Attend],
    orders: Sequence[Order | None],
    o: torch.Tensor,
    lse: torch.Tensor,
) -> list[AttentionState]:
    """Each request's rows, in its own order and q's dtype."""
    states, begin = [], 0
    for request, order in zip(requests, orders, strict=True):
        rows = slice(begin, begin + request.plan.positions.size)
        begin = rows.stop
        own_o, own_lse = (o, lse) if len(requests) == 1 else (o[rows], lse[rows])
        if request.sinks is not None:
            own_o, own_lse = state.add_sinks(own_o, own_lse, request.sinks)
        if order is not None:
            own_o, own_lse = own_o[order.back], own_lse[order.back]
        states.append(_state(own_o, own_lse, request.out, dtype_name(request.q.dtype)))
    return states


def _state(
    o: torch.Tensor, lse: torch.Tensor, place: AttentionState | None, dtype: DType
) -> AttentionState:
    """States rounded to `dtype`, written to `place` if there is one."""
    if place is None:
        return AttentionState(to_numpy(o, dtype), to_numpy(lse, "fp32"))
    write(o, host_array(place.o))
    write(lse, host_array(place.lse))
    return place


def _array(values: torch.Tensor, place: Tensor | None, dtype: DType) -> Tensor:
    """Values rounded to `dtype`, written to `place` if there is one."""
    if place is None:
        return to_numpy(values, dtype)
    write(values, host_array(place))
    return place


def _as_paged(request: RaggedAttend) -> tuple[Pool, Attend]:
    """The request's own k and v as a pool of one-token pages, in paired 4-D storage."""
    k, v = (to_torch(on_host(x, f))[:, None] for x, f in ((request.k, "k"), (request.v, "v")))
    kv_lens = np.diff(request.kv_indptr)
    level = Level(
        qo_indptr=request.qo_indptr,
        kv_indptr=request.kv_indptr,
        kv_indices=np.arange(request.k.shape[0], dtype=np.int32),
        kv_last_page_len=np.minimum(kv_lens, 1),
        kv_start=np.zeros_like(kv_lens),
        causal=request.causal,
    )
    plan = Plan((level,), request.row_positions)
    paged = Attend(0, request.q, plan, request.scoring, request.mask, request.out, request.sinks)
    return pair(k, v, "NHD", dtype_name(request.k.dtype)), paged


def _lap(clock: float) -> tuple[float, float]:
    now = time.perf_counter()
    return now - clock, now
