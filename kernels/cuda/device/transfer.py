"""Streams, device scratch and what copies touch: bytes on their way between host and device.

Copies in, kernels and copies out run on three streams, ordered by events, so that the copies of one
call overlap the kernels of its neighbours. Memory that an unfinished copy touches is kept in
`_inflight` until its event has passed: a dropped `Pending` frees nothing early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime

from kernels.backend import Int32
from kernels.cuda.device.host_memory import HostRanges, address_of, overlap, pinned_memory
from kernels.tensor import DeviceTensor, PinnedArray

MOST_INFLIGHT: Final = 48
RESERVED: Final = 1 << 24
"""Bytes that a stream's pool of device memory holds from the start, to carve requests from."""
ALIGNMENT: Final = 256
"""Alignment of the arrays in a packed buffer."""
READABLE: Final = 16
"""What kernels need the address of a tensor aligned to."""
NOT_READY: Final = 600


def aligned(size: int) -> int:
    """`size` rounded up so that the next array of a packed buffer is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def mark(stream: Any) -> Any:
    """An event after all work submitted to the stream so far."""
    return stream.record(cupy.cuda.Event(disable_timing=True))


def passed(event: Any) -> bool:
    """Whether the event has passed. A failure of the device is raised: CuPy's `done` hides it."""
    status: int = runtime.eventQuery(event.ptr)
    if status not in (0, NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return status == 0


def serves(tensor: DeviceTensor, dtype: np.dtype[Any]) -> bool:
    """Whether kernels can use the tensor in place."""
    return tensor.dtype == dtype and tensor.address % READABLE == 0


def convert(to: int, dtype: np.dtype[Any], tensor: DeviceTensor) -> None:
    """Round a tensor to `dtype` at another device address, on CuPy's current stream."""

    def view(address: int, kind: np.dtype[Any]) -> Any:
        size = tensor.size * kind.itemsize
        memory = cupy.cuda.UnownedMemory(address, size, tensor)
        return cupy.ndarray((tensor.size,), kind, cupy.cuda.MemoryPointer(memory, 0))

    cupy.copyto(view(to, dtype), view(tensor.address, tensor.dtype), casting="unsafe")


class Transfers:
    """The three streams, and the lifetime of the memory that they use."""

    def __init__(self) -> None:
        self.copy_in = cupy.cuda.Stream(non_blocking=True)
        self.compute = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self.copy_out = cupy.cuda.Stream(non_blocking=True)
        self._ranges = HostRanges()
        self._inflight: deque[tuple[Any, tuple[object, ...]]] = deque()
        self.reserve()

    def reserve(self) -> None:
        """Give the streams' pools what small requests are carved from."""
        for stream in (self.copy_in, self.compute):
            with stream:
                cupy.cuda.alloc(RESERVED)  # goes to the stream's pool at once

    def register(self, address: int, size: int) -> bool:
        """`Backend.register`."""
        return self._ranges.register(address, size)

    def unregister(self, address: int) -> None:
        """`Backend.unregister`."""
        if self.finish_copies(address):
            self._ranges.unregister(address)

    def forget(self, address: int) -> bool:
        """`unregister` without the call of the runtime, which the caller makes if needed."""
        found = self.finish_copies(address)
        self._ranges.forget(address)
        return found

    def finish_copies(self, address: int) -> bool:
        """Wait for the copies of the range that begins there; False where there is none."""
        size = self._ranges.size(address)
        if size == 0:
            return False
        for event, owners in self._inflight:
            arrays = [owner for owner in owners if isinstance(owner, PinnedArray)]
            if any(overlap(array, address, size) for array in arrays):
                event.synchronize()
        return True

    def upload_ints(self, arrays: Sequence[Int32]) -> tuple[Any, list[int]]:
        """Flat int32 arrays in one device buffer, back to back: only the first is aligned to more.

        One pinned buffer, one copy, which the compute stream waits for. The caller keeps the
        buffer until the work that reads it is done: it comes from the pool of copies in, whose next
        copy may otherwise overwrite it under a running kernel.
        """
        sizes = [array.nbytes for array in arrays]
        total = sum(sizes)
        host = pinned_memory(total)
        np.concatenate(arrays, out=np.ndarray((total // 4,), np.int32, host))
        buffer = self.inbound(total)
        self.to_device(buffer.ptr, host.ptr, total)
        self.arrived((host, buffer))
        return buffer, list(accumulate(sizes[:-1], initial=buffer.ptr))

    def inbound(self, size: int) -> Any:
        """Device memory to copy to on the stream of copies in."""
        with self.copy_in:
            return cupy.cuda.alloc(max(size, 1))

    def arrived(self, owners: tuple[object, ...]) -> Any:
        """The compute stream waits for the copies in so far, which `owners` are kept for.

        Older owners are not released here, but by `keep`, when the work on them is launched.
        """
        done = mark(self.copy_in)
        self.compute.wait_event(done)
        self._inflight.append((done, owners))
        return done

    def scratch(self, size: int) -> Any:
        """Device memory of the compute stream's pool: free to be reused there in stream order."""
        with self.compute:
            return cupy.cuda.alloc(size)

    def to_device(self, to: int, source: int, size: int) -> None:
        """Copy host bytes from this backend's pinned memory."""
        kind = runtime.memcpyHostToDevice
        runtime.memcpyAsync(to, source, size, kind, self.copy_in.ptr)

    def to_host(self, to: int, source: int, size: int) -> None:
        """Copy device bytes out to memory of our own."""
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(to, source, size, kind, self.copy_out.ptr)

    def from_pinned(self, to: int, array: PinnedArray) -> None:
        """Copy a pinned array in."""
        source = address_of(array)
        for offset, size in self._ranges.cut(source, array.nbytes):
            self.to_device(to + offset, source + offset, size)

    def to_pinned(self, array: PinnedArray, source: int) -> None:
        """Copy device bytes out to a pinned array."""
        to = address_of(array)
        for offset, size in self._ranges.cut(to, array.nbytes):
            self.to_host(to + offset, source + offset, size)

    def across(self, to: int, dtype: np.dtype[Any], tensor: DeviceTensor, stream: Any) -> None:
        """Copy a device tensor to another place of the device, rounded to `dtype`."""
        if tensor.dtype == dtype:
            kind = runtime.memcpyDeviceToDevice
            runtime.memcpyAsync(to, tensor.address, tensor.nbytes, kind, stream.ptr)
        else:
            with stream:
                convert(to, dtype, tensor)

    def follow(self, stream: Any, tensors: Iterable[DeviceTensor]) -> None:
        """Order `stream`'s later work after the earlier work of the tensors' streams."""
        for other in sorted({tensor.stream for tensor in tensors} - {stream.ptr}):
            event = cupy.cuda.Event(disable_timing=True)
            runtime.eventRecord(event.ptr, other)
            stream.wait_event(event)

    def precede(self, event: Any, tensors: Iterable[DeviceTensor]) -> None:
        """Order the later work of the tensors' streams after `event`."""
        for other in sorted({tensor.stream for tensor in tensors}):
            runtime.streamWaitEvent(other, event.ptr)

    def keep(self, event: Any, owners: tuple[object, ...]) -> None:
        """Hold `owners` until `event` has passed; release owners whose event has passed."""
        while self._inflight and passed(self._inflight[0][0]):
            self._inflight.popleft()
        while len(self._inflight) >= MOST_INFLIGHT:
            self._inflight[0][0].synchronize()  # its owners are released after that
            self._inflight.popleft()
        self._inflight.append((event, owners))

    def finish(self) -> None:
        """Wait for everything."""
        for stream in (self.copy_in, self.compute, self.copy_out):
            stream.synchronize()
        self._inflight.clear()

    def close(self) -> None:
        """Wait for all work and release the host memory."""
        self.finish()
        self._ranges.clear()
