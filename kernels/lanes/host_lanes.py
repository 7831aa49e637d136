"""Lanes in host memory, for any backend: a layer runs once its caller reports it ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from kernels.backend import Array, Attend, AttentionState, Backend, Mask
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

    def arena_at(self, address: int) -> None:
        """None: arenas are the sessions' host memory."""

    def end(self) -> None:
        """Nothing to do: layers run on request only."""


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


APPENDED_AT_ONCE: Final = 2 * 2**20
"""Bytes of k that one piece appends: some milliseconds."""


class HostRun:
    """A step whose layers run, in pieces, when the caller has reported them ready."""

    def __init__(self, backend: Backend, arena: memoryview, work: StepWork) -> None:
        self._backend, self._arena, self._work = backend, arena, work
        self._num_ready = self._num_done = 0
        """Layers that were reported ready, and those of them that are done."""
        self._mask: Mask | None = None
        self._pieces: Iterator[None] | None = None
        """The rest of the first layer that is not done."""
        self.done = False

    def layer(self, layer: int) -> None:
        due = () if self.done else self._work.layers[self._num_ready :]
        if not due or layer != due[0]:
            raise ValueError(f"layer {layer} is ready, layer {due[0] if due else 'none'} is next")
        self._num_ready += 1

    @property
    def has_ready(self) -> bool:
        return not self.done and self._num_done < self._num_ready

    def advance(self) -> int | None:
        """Append and attend in the layer's slot, a piece at a time."""
        layer = self._work.layers[self._num_done]
        if self._pieces is None:
            self._pieces = self._run(layer, self._num_done)
        for _ in self._pieces:
            return None
        self._pieces = None
        self._num_done += 1
        self.done = self._num_done == len(self._work.layers)
        return layer

    def release(self) -> None:
        self._pieces, self.done = None, True

    def _run(self, layer: int, place: int) -> Iterator[None]:
        work = self._work
        if work.plan is None:
            return
        slot = work.slots[layer % len(work.slots)]
        group = self._backend.geometry.group_of(layer)
        query = (work.rows, work.num_qo_heads, group.head_dim)
        answer = (*query[:2], group.v_head_dim)
        stored = (work.rows, group.num_kv_heads)
        if work.append_slots is not None:
            k = self._array(slot.k, work.dtype, (*stored, group.head_dim))
            v = self._array(slot.v, work.dtype, (*stored, group.v_head_dim))
            at_once = max(1, APPENDED_AT_ONCE * work.rows // max(k.nbytes, 1))
            for first in range(0, work.rows, at_once):
                rows = slice(first, first + at_once)
                self._backend.append(layer, k[rows], v[rows], work.append_slots[rows]).result()
                if rows.stop < work.rows:
                    yield
        lse = self._array(slot.lse, np.dtype(np.float32), query[:2])
        out = AttentionState(self._array(slot.o, work.dtype, answer), lse)
        q = self._array(slot.q, work.dtype, query)
        if work.mask is not None and place == 0:
            self._mask = yield from work.mask.expand(self._arena, work.plan.order)
        attend = Attend(layer, q, work.plan, work.scorings[place], self._mask, out)
        if (sinks := work.sinks_at(layer)) is not None:
            attend.sinks = self._array(sinks, np.dtype(np.float32), query[1:2])
        if work.attend is None:
            self._backend.attend([attend]).result()
        else:
            yield from work.attend(attend)
        if work.lse_scale != 1.0:
            np.multiply(lse, np.float32(work.lse_scale), out=lse)

    def _array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        return np.ndarray(shape, dtype, self._arena, offset)
