"""Lanes in host memory, for any backend: a layer runs when its caller reports it ready."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.backend import Array, Attend, AttentionState, Backend
from kernels.lanes.lane import Lane, Owner, StepWork, address_of


class HostLanes:
    """Lanes over the sessions' host arenas."""

    deep = 2
    polled = False

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def open(self, arena: memoryview, arena_bytes: int, owner: Owner) -> HostLane:
        return HostLane(self._backend, arena)

    def close(self, lane: Lane) -> None:
        """Nothing to do: the session frees the arena."""

    def unpin(self, memory: memoryview) -> None:
        self._backend.unregister(address_of(memory))


class HostLane:
    """A `Lane` in host memory, without flags: the caller reports layers by messages."""

    def __init__(self, backend: Backend, arena: memoryview) -> None:
        self._backend = backend
        self._arena = arena
        self.arena_bytes = len(arena)
        self.access: dict[str, Any] = {"kind": "host"}

    def begin(self, work: StepWork) -> HostRun:
        return HostRun(self._backend, self._arena, work)

    def unblock_caller(self) -> None:
        """Nothing to do: the caller waits for a message."""

    def clear(self) -> None:
        """Nothing to do: there are no flags."""


class HostRun:
    """A step whose layers run when the caller reports them ready."""

    def __init__(self, backend: Backend, arena: memoryview, work: StepWork) -> None:
        self._backend, self._arena, self._work = backend, arena, work
        self._next = 0
        self.done = False

    def layer(self, layer: int) -> None:
        """Append and attend in the layer's slot."""
        work, place = self._work, self._next
        if self.done or layer != work.layers[place]:
            due = "none" if self.done else work.layers[place]
            raise ValueError(f"layer {layer} is ready, layer {due} of the step is next")
        if work.plan is not None:
            self._run(layer, place)
        self._next += 1
        self.done = self._next == len(work.layers)

    def release(self) -> None:
        self.done = True

    def _run(self, layer: int, place: int) -> None:
        work = self._work
        slot = work.slots[layer % len(work.slots)]
        if work.plan is None:
            return
        geometry = self._backend.geometry
        query = (work.rows, work.num_qo_heads, geometry.head_dim)
        stored = (work.rows, geometry.num_kv_heads, geometry.head_dim)
        if work.append_slots is not None:
            k, v = (self._array(at, work.dtype, stored) for at in (slot.k, slot.v))
            self._backend.append(layer, k, v, work.append_slots).result()
        lse = self._array(slot.lse, np.dtype(np.float32), query[:2])
        out = AttentionState(self._array(slot.o, work.dtype, query), lse)
        q = self._array(slot.q, work.dtype, query)
        attend = Attend(layer, q, work.plan, work.scorings[place], out=out)
        if (sinks := work.sinks_at(layer)) is not None:
            attend.sinks = self._array(sinks, np.dtype(np.float32), query[1:2])
        self._backend.attend([attend]).result()
        if work.lse_scale != 1.0:
            np.multiply(lse, np.float32(work.lse_scale), out=lse)

    def _array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        return np.ndarray(shape, dtype, self._arena, offset)
