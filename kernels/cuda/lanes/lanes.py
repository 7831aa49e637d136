"""The lanes of a device: made when asked for, never freed, and handed on to later sessions.

An arena is an allocation of its own outside CuPy's pool, so that its IPC handle shows nothing else.
A process that has mapped it keeps it mapped as long as it likes: another's session gets the arena
only when that process is gone.
"""

from __future__ import annotations

from threading import Thread
from typing import Any, Final

import cupy
from cupy.cuda import runtime

from kernels.backend import Backend, Unsupported
from kernels.compile import Spec
from kernels.cuda.backend import CudaBackend
from kernels.cuda.lanes.flags import has_mps, uuid_of
from kernels.cuda.lanes.lane import CudaLane, Shared, scale
from kernels.lanes import Lane, NoRoom, Owner, address_of

OUT_OF_MEMORY: Final = 2
"""`cudaErrorMemoryAllocation`."""
GRANULE: Final = 2 * 2**20
"""Smaller allocations share a block of the driver's, and its handle with each other."""


class CudaLanes:
    """`Lanes` of one CUDA backend."""

    deep = 2
    polled = True

    def __init__(self, backend: Backend, device_bytes: int, most: int) -> None:
        if not isinstance(backend, CudaBackend):
            raise TypeError("lanes on a device need the CUDA backend")
        self._backend = backend
        self._guarded = backend.guarded
        self._device_bytes, self._most = device_bytes, most
        self._lanes: list[CudaLane] = []
        self._idle: list[CudaLane] = []
        self._unused: dict[int, int] = {}
        """Arenas by size whose lane could not be made."""
        with self._guarded():
            self._device = cupy.cuda.Device().id
            self._uuid = uuid_of(self._device)
            aside = cupy.cuda.Stream(non_blocking=True, priority=-1)
            with backend.transfers.compute:
                scale(cupy.zeros(1, cupy.float32).data.ptr, 1, 1.0)  # loads its kernel
        backend.library.before_load = self._check_load
        self._shared = Shared(
            backend.kv,
            backend.library,
            backend.multiprocessors,
            backend.guarded,
            backend.transfers.compute,
            aside,
        )

    def open(self, arena: memoryview, arena_bytes: int, owner: Owner) -> CudaLane:
        if len(self._lanes) - len(self._idle) >= self._most:
            raise NoRoom(
                f"{self._most} sessions have a device arena: close some, or raise "
                "server.max_device_sessions"
            )
        size = max(GRANULE, -(-arena_bytes // GRANULE) * GRANULE)
        lane = self._again(size, owner) or self._make(size)
        lane.wipe(owner)
        return lane

    def close(self, lane: Lane) -> None:
        if not isinstance(lane, CudaLane):
            raise TypeError("a lane of another backend: this is a bug")
        self._idle.append(lane)

    def unpin(self, memory: memoryview) -> None:
        """The driver waits for all streams then, so where one waits for its caller, somebody else
        has to wait for the driver."""
        address = address_of(memory)
        if not self._is_busy:
            self._backend.unregister(address)
            return
        with self._guarded():
            if self._backend.transfers.forget(address):
                Thread(target=unregister, args=(self._device, address, memory), daemon=True).start()

    @property
    def _is_busy(self) -> bool:
        return any(lane.is_busy for lane in self._lanes)

    def _check_load(self, spec: Spec) -> None:
        """A kernel cannot be loaded while a stream waits for its caller: the driver would wait too,
        and nothing could set the stream free any more."""
        if self._is_busy:
            rule = "its kernel is not loaded, and cannot be while steps are open: try again later"
            raise Unsupported("operation", spec.source, rule)

    def _again(self, size: int, owner: Owner) -> CudaLane | None:
        """The smallest idle lane that is large enough and may be handed on."""
        fit = [
            lane
            for lane in self._idle
            if lane.arena_bytes >= size
            and (lane.owner is None or lane.owner == owner or lane.owner.is_gone)
        ]
        if not fit:
            return None
        lane = min(fit, key=lambda one: one.arena_bytes)
        self._idle.remove(lane)
        return lane

    def _make(self, size: int) -> CudaLane:
        taken = sum(lane.arena_bytes for lane in self._lanes)
        if taken + size > self._device_bytes:
            raise NoRoom(
                f"a device arena of {size} bytes is wanted, {taken} of {self._device_bytes} are "
                "taken: ask for less, or raise server.device_arena_bytes"
            )
        with self._guarded():
            try:
                address = self._unused.pop(size, 0) or int(runtime.malloc(size))
            except runtime.CUDARuntimeError as error:
                if error.status != OUT_OF_MEMORY:
                    raise
                raise no_memory(size) from error
            try:
                lane = CudaLane(self._shared, address, size, self._told(address))
            except MemoryError as error:
                self._unused[size] = address  # to free it the driver would wait for all streams
                raise no_memory(size) from error
        self._lanes.append(lane)
        return lane

    def _told(self, address: int) -> dict[str, Any]:
        handle: bytes = runtime.ipcGetMemHandle(address)
        return {
            "kind": "cuda",
            "handle": handle.hex(),
            "uuid": self._uuid,
            "mps": has_mps(self._device),
        }


def no_memory(size: int) -> NoRoom:
    free = runtime.memGetInfo()[0]
    return NoRoom(
        f"a device arena of {size} bytes is wanted, {free} are free on the device: "
        "leave it more beside the pool"
    )


def unregister(device: int, address: int, memory: memoryview) -> None:
    """Unpin `memory`, which stays mapped until then."""
    with cupy.cuda.Device(device):
        runtime.hostUnregister(address)
    del memory
