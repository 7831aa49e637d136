"""A numpy backend whose timing and failures a test controls, and small ways to drive an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kernels.backend import (
    NUMPY_DTYPES,
    Attend,
    AttentionState,
    DType,
    Int32,
    Level,
    Pending,
    PoolGeometry,
    RaggedAttend,
    StageSeconds,
)
from service.engine import operations as ops
from service.engine.engine import Engine
from service.metrics import Metrics

T = TypeVar("T")
GEOMETRY = PoolGeometry(2, 32, 4, 2, 8, dtype="fp32")
WAIT_S = 20.0


@dataclass
class Later:
    """A pending result that a test lets go, or makes fail."""

    value: Any
    gate: threading.Event
    error: Exception | None = None
    seconds: StageSeconds = field(default_factory=StageSeconds)

    def result(self) -> Any:
        assert self.gate.wait(WAIT_S), "nobody opened the gate of a launch"
        if self.error is not None:
            raise self.error
        return self.value


class FakeBackend:
    """Dense float64 attention over a numpy pool.

    `calls` lists what was called, in order. `failures` maps a call's name to exceptions that its
    next calls raise (None: that call succeeds); "result" is the waiting for a launch. While `gate`
    is closed, a call of `attend` waits on its way in (`late` False) or its result does.
    """

    name = "fake"
    device = "numpy"
    unsupported = ("nothing",)

    def __init__(self, geometry: PoolGeometry = GEOMETRY, late: bool = False) -> None:
        self.geometry = geometry
        self.late = late
        slots = geometry.num_pages * geometry.page_size
        shape = (geometry.num_layers, 2, slots, geometry.num_kv_heads, geometry.head_dim)
        self.pool = np.full(shape, np.nan)
        self.calls: list[str] = []
        self.launches: list[list[Attend]] = []
        self.failures: dict[str, list[Exception | None]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if error := self._failure(name):
            raise error

    def _failure(self, name: str) -> Exception | None:
        script = self.failures.get(name)
        return script.pop(0) if script else None

    def append(self, layer: int, k: Any, v: Any, slots: Int32) -> None:
        self._called("append")
        self.pool[layer, 0, slots] = k
        self.pool[layer, 1, slots] = v

    def copy_rows(self, src_pages: Int32, dst_pages: Int32, num_rows: Int32) -> None:
        self._called("copy_rows")
        size = self.geometry.page_size
        for src, dst, rows in zip(src_pages, dst_pages, num_rows, strict=True):
            self.pool[:, :, dst * size : dst * size + rows] = self.pool[
                :, :, src * size : src * size + rows
            ]

    def attend(self, requests: Sequence[Attend]) -> Pending[list[AttentionState]]:
        self._called("attend")
        self.launches.append(list(requests))
        if not self.late:
            assert self.gate.wait(WAIT_S), "nobody opened the gate"
        states = [self._attend(request) for request in requests]
        return Later(states, self.gate, self._failure("result"))

    def _attend(self, request: Attend) -> AttentionState:
        n = request.q.shape[0]
        order = np.arange(n) if request.plan.order is None else request.plan.order
        parts: list[list[tuple[Any, Any]]] = [[] for _ in range(n)]
        for level in request.plan.levels:
            for segment in range(level.qo_indptr.size - 1):
                keys, start = self._keys(level, segment), int(level.kv_start[segment])
                for row in range(level.qo_indptr[segment], level.qo_indptr[segment + 1]):
                    at = start + np.arange(keys.size)
                    seen = np.ones(keys.size, dtype=bool)
                    if level.causal:
                        seen &= at <= request.plan.positions[row]
                    if request.scoring.window_left >= 0:
                        seen &= at >= request.plan.positions[row] - request.scoring.window_left
                    if request.mask is not None:
                        bit = request.mask.row_offsets[row] + at
                        seen &= (request.mask.bits[bit // 8] >> (bit % 8) & 1).astype(bool)
                    k, v = self.pool[request.layer, :, keys[seen]].swapaxes(0, 1)
                    parts[row].append((k, v))
        o = np.zeros(request.q.shape)
        lse = np.zeros(request.q.shape[:2], dtype=np.float32)
        for row in range(n):
            k, v = (np.concatenate([part[i] for part in parts[row]]) for i in (0, 1))
            o[order[row]], lse[order[row]] = dense_row(
                request.q[order[row]], k, v, request.scoring.sm_scale
            )
        return AttentionState(o.astype(request.q.dtype), lse)

    def _keys(self, level: Level, segment: int) -> Any:
        pages = level.kv_indices[level.kv_indptr[segment] : level.kv_indptr[segment + 1]]
        size = self.geometry.page_size
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)
        missing = size - int(level.kv_last_page_len[segment]) if pages.size else 0
        return slots[: slots.size - missing]

    def attend_ragged(self, request: RaggedAttend) -> Pending[AttentionState]:
        self._called("attend_ragged")
        n, heads = request.q.shape[:2]
        state = AttentionState(np.zeros_like(request.q), np.zeros((n, heads), np.float32))
        return Later(state, self.gate, self._failure("result"))

    def merge(
        self, o: Any, lse: Any, indptr: Int32, into: AttentionState | None = None
    ) -> Pending[AttentionState]:
        self._called("merge")
        rows = indptr[:-1]
        return Later(AttentionState(o[rows].copy(), lse[rows].copy()), self.gate)

    def gather(self, layer: int, slots: Int32, dtype: DType) -> Pending[tuple[Any, Any]]:
        self._called("gather")
        k, v = self.pool[layer][:, slots].astype(NUMPY_DTYPES[dtype])
        return Later((k, v), self.gate, self._failure("result"))

    def close(self) -> None:
        self.closed = True


def dense_row(q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
    """One query row [Hq, D] over k, v [t, Hkv, D]: o [Hq, D] and lse [Hq]."""
    if k.shape[0] == 0:
        return np.zeros(q.shape), np.full(q.shape[0], -np.inf)
    group = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    weights = np.exp(np.einsum("hd,thd->ht", q.astype(np.float64), k) * scale)
    total = weights.sum(axis=1)
    return np.einsum("ht,thd->hd", weights, v) / total[:, None], np.log(total)


def with_engine(
    backend: Any, scenario: Callable[[Engine], Coroutine[Any, Any, T]], queue_depth: int = 64
) -> T:
    """Run a scenario against a ready engine, and drain it."""

    async def run() -> T:
        engine = Engine(lambda: backend, queue_depth=queue_depth, metrics=Metrics())
        engine.start()
        await until(lambda: engine.state != "starting")
        try:
            return await scenario(engine)
        finally:
            if isinstance(backend, FakeBackend):
                backend.gate.set()
            await engine.drain(WAIT_S)

    return asyncio.run(run())


async def until(met: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    async with asyncio.timeout(WAIT_S):
        while not met():
            await asyncio.sleep(0.001)


async def outcome(awaitable: Awaitable[T]) -> T | Exception:
    """The result, or the exception, as a value."""
    try:
        return await awaitable
    except Exception as error:
        return error


async def create(engine: Engine, *names: str, parent: str | None = None) -> None:
    new = tuple(ops.NewSequence(name, parent) for name in names)
    await engine.submit(ops.CreateSequences(new))


async def pool(engine: Engine) -> ops.PoolInfo:
    info = (await engine.submit(ops.PoolStatus())).answer
    assert isinstance(info, ops.PoolInfo)
    return info


async def length(engine: Engine, name: str, layer: int = 0) -> int:
    info = (await engine.submit(ops.GetSequence(name))).answer
    assert isinstance(info, ops.SequenceInfo)
    return info.lengths[layer]


def rows(seed: int, n: int, geometry: PoolGeometry = GEOMETRY, dtype: Any = np.float32) -> Any:
    """k or v [n, Hkv, D]."""
    shape = (n, geometry.num_kv_heads, geometry.head_dim)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def queries(seed: int, n: int, geometry: PoolGeometry = GEOMETRY, dtype: Any = np.float32) -> Any:
    """q [n, 2 * Hkv, D]."""
    shape = (n, 2 * geometry.num_kv_heads, geometry.head_dim)
    return np.random.default_rng(1000 + seed).standard_normal(shape).astype(dtype)


def append(name: str, n: int, layer: int = 0, seed: int = 0, **fields: Any) -> ops.Append:
    indptr = np.array([0, n], dtype=np.int32)
    fields = {"offsets": None, "k": rows(seed, n), "v": rows(seed + 1, n)} | fields
    return ops.Append(layer=layer, sequences=(name,), append_indptr=indptr, **fields)


def decode(*names: str, layer: int = 0, seed: int = 0, new: bool = False, **fields: Any) -> Any:
    """A decode of fp32 rows; with `new`, of k and v appended first."""
    count = len(names)
    if new:
        fields |= {"k": rows(seed + 2, count), "v": rows(seed + 3, count)}
    fields = {"options": ops.Options(), "q": queries(seed, count)} | fields
    indptr = np.arange(count + 1, dtype=np.int32)
    return ops.Attention(
        name="decode", layer=layer, sequences=names, qo_indptr=indptr, causal=True, **fields
    )
