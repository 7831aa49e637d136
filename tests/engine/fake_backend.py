"""A numpy backend whose timing and failures a test controls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels.backend import (
    LEFT_OUT,
    NUMPY_DTYPES,
    Attend,
    AttentionState,
    Done,
    DType,
    Int32,
    Level,
    Pending,
    PoolGeometry,
    RaggedAttend,
    StageSeconds,
)

GEOMETRY = PoolGeometry(2, 32, 4, 2, 8, dtype="fp32")
WAIT_S = 60.0


@dataclass
class Later:
    """A pending result that a test releases, or fails; `write` copies it to its destination."""

    value: Any
    gate: threading.Event
    error: Exception | None = None
    write: Callable[[Any], Any] = lambda value: value
    seconds: StageSeconds = field(default_factory=StageSeconds)

    @property
    def done(self) -> bool:
        return self.gate.is_set()

    def result(self) -> Any:
        assert self.gate.wait(WAIT_S), "the gate of a launch stayed closed"
        if self.error is not None:
            raise self.error
        return self.write(self.value)


class FakeBackend:
    """Dense float64 attention over a numpy pool.

    `calls` lists the calls, in order. `failures` maps a call's name to exceptions that its
    next calls raise (None: that call succeeds); "result" is the waiting for a launch. While `gate`
    is closed, a call of `attend` waits on its way in and the engine with it (`late` False), or its
    result is not there yet and the engine continues. While `steps` is a list, a launch or append
    is done when the gate that it adds there opens.
    """

    name = "fake"
    device = "numpy"
    unsupported = ("nothing",)
    split_keys = 0

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
        self.steps: list[threading.Event] | None = None
        self.closed = False

    def step_by_step(self) -> list[threading.Event]:
        """From now on each launch has a gate of its own."""
        self.steps = []
        return self.steps

    def let_all(self) -> None:
        """Open all gates, and do without from now on."""
        steps, self.steps = self.steps or [], None
        self.gate.set()
        for gate in steps:
            gate.set()

    def _gate(self) -> threading.Event:
        if self.steps is None:
            return self.gate
        gate = threading.Event()
        self.steps.append(gate)
        return gate

    def _called(self, name: str) -> None:
        self.calls.append(name)
        error = self._failure(name)
        try:
            if error is not None:
                raise error
        finally:
            del error  # or its traceback would hold this frame, and this frame it

    def _failure(self, name: str) -> Exception | None:
        script = self.failures.get(name)
        return script.pop(0) if script else None

    def register(self, address: int, size: int) -> bool:
        return False

    def unregister(self, address: int) -> None:
        """Nothing is ever registered."""

    def append(self, layer: int, k: Any, v: Any, slots: Int32) -> Pending[None]:
        self._called("append")
        stored = slots != LEFT_OUT
        self.pool[layer, 0, slots[stored]] = k[stored]
        self.pool[layer, 1, slots[stored]] = v[stored]
        return Done(None) if self.steps is None else Later(None, self._gate())

    def copy_rows(
        self, src_pages: Int32, dst_pages: Int32, num_rows: Int32, group: int = 0
    ) -> None:
        self._called("copy_rows")
        size = self.geometry.page_size
        for src, dst, rows in zip(src_pages, dst_pages, num_rows, strict=True):
            for layer in self.geometry.groups[group].layers:
                pages = self.pool[layer]
                pages[:, dst * size : dst * size + rows] = pages[:, src * size : src * size + rows]

    def attend(self, requests: Sequence[Attend]) -> Pending[list[AttentionState]]:
        self._called("attend")
        self.launches.append(list(requests))
        if not self.late:
            assert self.gate.wait(WAIT_S), "the gate stayed closed"
        states = [self._attend(request) for request in requests]
        outs = [request.out for request in requests]

        def write(made: list[AttentionState]) -> list[AttentionState]:
            return [written(state, out) for state, out in zip(made, outs, strict=True)]

        return Later(states, self._gate(), self._failure("result"), write)

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
        q: Any = request.q
        o = np.zeros(q.shape)
        lse = np.zeros(q.shape[:2], dtype=np.float32)
        for row in range(n):
            k, v = (np.concatenate([part[i] for part in parts[row]]) for i in (0, 1))
            o[order[row]], lse[order[row]] = dense_row(
                q[order[row]], k, v, request.scoring.sm_scale
            )
        return AttentionState(o.astype(q.dtype), lse)

    def _keys(self, level: Level, segment: int) -> Any:
        pages = level.kv_indices[level.kv_indptr[segment] : level.kv_indptr[segment + 1]]
        size = self.geometry.page_size
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)
        missing = size - int(level.kv_last_page_len[segment]) if pages.size else 0
        return slots[: slots.size - missing]

    def attend_ragged(self, request: RaggedAttend) -> Pending[AttentionState]:
        self._called("attend_ragged")
        q: Any = request.q
        state = AttentionState(np.zeros_like(q), np.zeros(q.shape[:2], np.float32))
        for part, first in enumerate(request.kv_indptr[:-1]):
            at = np.arange(request.kv_indptr[part + 1] - first)
            for row in range(request.qo_indptr[part], request.qo_indptr[part + 1]):
                behind = request.row_positions[row] - at
                seen = behind >= 0 if request.causal else at >= 0
                if request.scoring.window_left >= 0:
                    seen &= behind <= request.scoring.window_left
                if request.mask is not None:
                    bit = request.mask.row_offsets[row] + at
                    seen &= (request.mask.bits[bit // 8] >> (bit % 8) & 1).astype(bool)
                k, v = (one[first + at[seen]].astype(np.float64) for one in (request.k, request.v))
                state.o[row], state.lse[row] = dense_row(q[row], k, v, request.scoring.sm_scale)
        return self._later(state, request.out)

    def merge(
        self,
        o: Any,
        lse: Any,
        indptr: Int32,
        into: AttentionState | None = None,
        out: AttentionState | None = None,
        sinks: Any = None,
    ) -> Pending[AttentionState]:
        self._called("merge")
        shape = (indptr.size - 1, *o.shape[1:])
        state = AttentionState(np.zeros(shape, o.dtype), np.full(shape[:2], -np.inf, np.float32))
        for row in range(shape[0]):
            span = slice(indptr[row], indptr[row + 1])
            states, logs = list(o[span]), list(lse[span])
            if into is not None:
                states, logs = [*states, into.o[row]], [*logs, into.lse[row]]
            if logs:
                total = state.lse[row] = np.logaddexp.reduce(logs)
                shares = np.exp(np.asarray(logs) - np.where(total > -np.inf, total, 0))
                state.o[row] = np.einsum("nh,nhd->hd", shares, np.asarray(states))
        return self._later(state, into or out)

    def gather(
        self, layer: int, slots: Int32, dtype: DType, out: tuple[Any, Any] | None = None
    ) -> Pending[tuple[Any, Any]]:
        self._called("gather")
        k, v = self.pool[layer][:, slots].astype(NUMPY_DTYPES[dtype])

        def write(rows: tuple[Any, Any]) -> tuple[Any, Any]:
            for place, part in zip(out or rows, rows, strict=True):
                place[...] = part
            return out or rows

        return Later((k, v), self._gate(), self._failure("result"), write)

    def read_stored(
        self, layer: int, slots: Int32, out: tuple[Any, Any]
    ) -> Pending[tuple[Any, Any]]:
        self._called("read_stored")
        for place, part in zip(out, self.pool[layer][:, slots], strict=True):
            place[...] = part
        return Done(out)

    def write_stored(self, layer: int, k: Any, v: Any, slots: Int32) -> Pending[None]:
        self._called("write_stored")
        self.pool[layer, 0, slots], self.pool[layer, 1, slots] = k, v
        return Done(None)

    def _later(self, state: AttentionState, out: AttentionState | None) -> Later:
        write: Callable[[Any], Any] = lambda made: written(made, out)  # noqa: E731
        return Later(state, self._gate(), self._failure("result"), write)

    def close(self) -> None:
        self.closed = True


def written(state: AttentionState, out: Any) -> AttentionState:
    """The state at the place given for it, if one was."""
    if out is None:
        return state
    out.o[...] = state.o
    out.lse[...] = state.lse
    place: AttentionState = out
    return place


def dense_row(q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
    """One query row [Hq, D] over k, v [t, Hkv, D]: o [Hq, D] and lse [Hq]."""
    if k.shape[0] == 0:
        return np.zeros(q.shape), np.full(q.shape[0], -np.inf)
    group = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    weights = np.exp(np.einsum("hd,thd->ht", q.astype(np.float64), k) * scale)
    total = weights.sum(axis=1)
    return np.einsum("ht,thd->hd", weights, v) / total[:, None], np.log(total)
