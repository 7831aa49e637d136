"""The lanes of a device: made when asked for, never freed, and used again by later sessions.

A process that has mapped an arena keeps it mapped as long as it likes. Another session gets the
arena only if it acts for the same namespace and user and that process is the same or has ended.
Other sessions get memory of their own.
"""

from __future__ import annotations

import os
from contextlib import suppress
from threading import Thread
from typing import Any, Final

import cupy
from cupy.cuda import runtime

from kernels.backend import Backend, Unsupported
from kernels.compile import Spec
from kernels.cuda.backend import CudaBackend
from kernels.cuda.device.devices import relax_captures
from kernels.cuda.lanes.flags import has_mps, uuid_of
from kernels.cuda.lanes.lane import Arena, CudaLane, Shared, scale
from kernels.cuda.lanes.memory import SIDES
from kernels.cuda.lanes.pool import install_pool
from kernels.errors import DeviceLost, NoMemory
from kernels.lanes.lane import Lane, NoRoom, Owner, address_of

OUT_OF_MEMORY: Final = 2
"""`cudaErrorMemoryAllocation`."""
GRANULE: Final = 2 * 2**20
"""Smaller allocations share a block of the driver's, and its handle with each other."""
OWN_STREAMS: Final = 6
"""The backend's: copies in, kernels, kernels beside them, copies out, flags, the default one."""
LANE_STREAMS: Final = 2


def most_lanes(queues: int) -> int:
    """Lanes whose streams each have one of `queues` hardware queues of their own.

    A stream that waits for its caller blocks every stream behind it in its queue, and so possibly
    the one that would release it.
    """
    return max(0, (queues - OWN_STREAMS) // LANE_STREAMS)


class CudaLanes:
    """`Lanes` of one CUDA backend; the number of hardware queues limits them to `most`."""

    deep = SIDES
    polled = True

    def __init__(self, backend: Backend, device_bytes: int, most: int, queues: int) -> None:
        if not isinstance(backend, CudaBackend):
            raise TypeError("lanes on a device need the CUDA backend")
        self._backend = backend
        self._guarded = backend.guarded
        self._device_bytes = device_bytes
        self._queues, self._wanted = queues, most
        self._lanes: list[CudaLane] = []
        self._idle: list[CudaLane] = []
        self._arenas: list[Arena] = []
        self._free: list[Arena] = []
        """The arenas that no session uses."""
        with self._guarded():
            self._device = cupy.cuda.Device().id
            self._uuid = uuid_of(self._device)
            aside = cupy.cuda.Stream(non_blocking=True, priority=-1)
            with backend.transfers.compute:
                self._load_kernels()
            install_pool(lambda: not self._is_busy)
            backend.transfers.reserve()
        backend.library.before_load = self._check_load
        self._shared = Shared(
            tuple(group.kv for group in backend.groups),
            backend.geometry.places,
            backend.library,
            backend.multiprocessors,
            backend.split_keys,
            backend.guarded,
            backend.transfers.compute,
            aside,
        )

    def _load_kernels(self) -> None:
        """Launch what steps launch beside attention once. The first launch may make the driver wait
        for all streams: during a step, that would be for its caller."""
        zeros = cupy.zeros(1, cupy.float32)
        scale(zeros.data.ptr, 1, 1.0)

    @property
    def _most_here(self) -> int:
        return most_lanes(self._queues - self._backend.num_copy_streams)

    @property
    def _most(self) -> int:
        return min(self._wanted, self._most_here)

    def open(self, arena: memoryview, arena_bytes: int, owner: Owner) -> CudaLane:
        if not self._idle and len(self._lanes) >= self._most:
            raise NoRoom(
                f"{self._most} sessions have a device arena: close some, or raise "
                f"server.max_device_sessions (at most {self._most_here} here: each takes two of "
                "the hardware queues)"
            )
        size = max(GRANULE, -(-arena_bytes // GRANULE) * GRANULE)
        found = self._again(size, owner) or self._make(size)
        lane = self._lane(found)
        self._free.remove(found)
        lane.use(found, owner, self._access(found, owner))
        return lane

    def close(self, lane: Lane) -> None:
        if not isinstance(lane, CudaLane) or lane.arena is None:
            raise TypeError("a lane of another backend: this is a bug")
        self._idle.append(lane)
        self._free.append(lane.arena)

    def unpin(self, memory: memoryview) -> None:
        """The driver waits for all streams then: where one waits for its caller, another thread has
        to wait for the driver."""
        address = address_of(memory)
        if not self._is_busy:
            self._backend.unregister(address)
            return
        with self._guarded():
            if self._backend.transfers.forget(address):
                Thread(target=unregister, args=(self._device, address, memory), daemon=True).start()

    def arena_at(self, address: int) -> Any:
        return next((one.memory for one in self._arenas if one.address == address), None)

    def end(self) -> None:
        with suppress(DeviceLost):
            for lane in self._lanes:
                lane.end()

    @property
    def _is_busy(self) -> bool:
        return any(lane.is_busy for lane in self._lanes)

    def _check_load(self, spec: Spec) -> None:
        """A kernel cannot be loaded while a stream waits for its caller: the driver would wait too,
        and nothing could set the stream free any more."""
        if self._is_busy:
            rule = "its kernel is not loaded, and cannot be while steps are open: try again later"
            raise Unsupported("operation", spec.source, rule)

    def _lane(self, arena: Arena) -> CudaLane:
        """An idle lane, the arena's last one if it is idle, or a new one."""
        for lane in self._idle:
            if lane.arena is arena:
                self._idle.remove(lane)
                return lane
        if len(self._lanes) < self._most:
            try:
                with self._guarded():
                    lane = CudaLane(self._shared)
            except (MemoryError, NoMemory) as error:
                raise no_memory(arena.size) from error
            self._lanes.append(lane)
            return lane
        return self._idle.pop()

    def _again(self, size: int, owner: Owner) -> Arena | None:
        """The smallest free arena that is large enough and that `owner` may have."""
        fit = [
            arena
            for arena in self._free
            if arena.size >= size and (arena.owner is None or owner.may_follow(arena.owner))
        ]
        return min(fit, key=lambda one: one.size, default=None)

    def _access(self, arena: Arena, owner: Owner) -> dict[str, Any]:
        """A caller in this process gets the arena's address, others a handle to map it with."""
        access = {"kind": "cuda", "uuid": self._uuid, "mps": has_mps(self._device)}
        if owner.pid == os.getpid():
            return access | {"address": arena.address}
        with self._guarded():
            return access | {"handle": runtime.ipcGetMemHandle(arena.address).hex()}

    def _make(self, size: int) -> Arena:
        with self._guarded():
            self._drop(size)
            taken = self._taken
            if taken + size > self._device_bytes:
                raise NoRoom(
                    f"a device arena of {size} bytes is wanted, {taken} of {self._device_bytes} "
                    "are taken: ask for less, or raise server.device_arena_bytes"
                )
            try:
                memory = cupy.cuda.Memory(size)
            except runtime.CUDARuntimeError as error:
                if error.status != OUT_OF_MEMORY:
                    raise
                raise no_memory(size) from error
        arena = Arena(memory, size)
        self._arenas.append(arena)
        self._free.append(arena)
        return arena

    @property
    def _taken(self) -> int:
        return sum(arena.size for arena in self._arenas)

    def _drop(self, size: int) -> None:
        """Free arenas whose processes have ended until `size` bytes fit, if no step is open: the
        driver waits for all streams."""
        for arena in list(self._free):
            if self._taken + size <= self._device_bytes or self._is_busy:
                return
            if arena.owner is None or arena.owner.has_ended:
                self._free.remove(arena)
                self._arenas.remove(arena)
                for lane in self._idle:
                    lane.forget(arena)


def no_memory(size: int) -> NoRoom:
    free = runtime.memGetInfo()[0]
    return NoRoom(
        f"a device arena of {size} bytes is wanted, {free} are free on the device: "
        "leave it more beside the pool"
    )


def unregister(device: int, address: int, memory: memoryview) -> None:
    """Unpin `memory`, which stays mapped until then."""
    relax_captures()
    with cupy.cuda.Device(device):
        runtime.hostUnregister(address)
    del memory
