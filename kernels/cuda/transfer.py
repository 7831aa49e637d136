"""Streams, pinned staging and device scratch: bytes on their way between host and device.

Copies in, kernels and copies out run on three streams, ordered by events, so that the copies of one
call overlap the kernels of its neighbours. Memory that an unfinished copy touches is kept in
`_inflight` until its event has passed: a dropped `Pending` frees nothing early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime

from kernels.backend import Array, Int32

MOST_INFLIGHT: Final = 48
LEAST_PINNED: Final = 1 << 12
RESERVED: Final = 1 << 24
"""Bytes that a stream's pool of device memory holds from the start, to carve requests from."""
_ALIGNMENT: Final = 256


def pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array over pooled pinned memory, which goes back to the pool with the array."""
    count = prod(shape)
    if count == 0:
        return np.zeros(shape, dtype)
    memory = _pinned_memory(count * dtype.itemsize)
    return (
        np.frombuffer(memory, dtype=np.uint8, count=count * dtype.itemsize)
        .view(dtype)
        .reshape(shape)
    )


def _pinned_memory(size: int) -> Any:
    """Pooled pinned memory of at least so many bytes.

    CuPy's pool gives a block again only for its very size, and never back: with powers of two it
    soon has one for every request, and holds no more than twice what was in use at a time.
    """
    return cupy.cuda.alloc_pinned_memory(max(LEAST_PINNED, 1 << (size - 1).bit_length()))


def aligned(size: int) -> int:
    """`size` rounded up so that the next array of a packed buffer is aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _mark(stream: Any) -> Any:
    """An event that passes when what the stream has been given so far is done."""
    return stream.record(cupy.cuda.Event(disable_timing=True))


class Transfers:
    """The three streams, and the lifetime of what they touch."""

    def __init__(self) -> None:
        self.copy_in = cupy.cuda.Stream(non_blocking=True)
        self.compute = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self.copy_out = cupy.cuda.Stream(non_blocking=True)
        self._inflight: deque[tuple[Any, tuple[object, ...]]] = deque()
        for stream in (self.copy_in, self.compute):
            with stream:
                cupy.cuda.alloc(RESERVED)  # goes to the stream's pool at once

    def upload(self, arrays: Sequence[Array]) -> tuple[Any, list[int]]:
        """Copy arrays into one device buffer: (buffer, device address of each).

        One pinned buffer, one copy, which the compute stream waits for. Whoever launches work on
        the buffer hands it to `retire` after that.
        """
        offsets, size = [], 0
        for array in arrays:
            offsets.append(size)
            size += aligned(array.nbytes)
        host = _pinned_memory(size)
        for array, offset in zip(arrays, offsets, strict=True):
            if array.size:
                np.ndarray(array.shape, array.dtype, host, offset)[...] = array
        buffer = self._send(host, size)
        base: int = buffer.ptr
        return buffer, [base + offset for offset in offsets]

    def upload_ints(self, arrays: Sequence[Int32]) -> tuple[Any, list[int]]:
        """`upload` of flat int32 arrays, back to back: only the first is aligned to more."""
        counts = [len(array) for array in arrays]
        total = sum(counts)
        host = _pinned_memory(4 * total)
        np.concatenate(arrays, out=np.ndarray((total,), np.int32, host))
        buffer = self._send(host, 4 * total)
        return buffer, [buffer.ptr + 4 * begin for begin in accumulate(counts[:-1], initial=0)]

    def _send(self, host: Any, size: int) -> Any:
        """Start copying pinned bytes to new device memory; the compute stream waits for it."""
        with self.copy_in:
            buffer = cupy.cuda.alloc(max(size, 1))
        stream = self.copy_in.ptr
        runtime.memcpyAsync(buffer.ptr, host.ptr, size, runtime.memcpyHostToDevice, stream)
        done = _mark(self.copy_in)
        self.compute.wait_event(done)
        self.keep(done, (host, buffer))
        return buffer

    def retire(self, buffer: object) -> None:
        """Let an uploaded buffer go once what the compute stream has been given so far is done."""
        self.keep(_mark(self.compute), (buffer,))

    def scratch(self, size: int) -> Any:
        """Device memory of the compute stream's pool: free to be reused there in stream order."""
        with self.compute:
            return cupy.cuda.alloc(size)

    def download(self, source: int, targets: Sequence[tuple[Array, int]], owner: object) -> Any:
        """Start copying device bytes at `source` + offset into pinned arrays; the event to await.

        `owner` keeps the device memory alive; the compute stream's work so far comes first.
        """
        self.copy_out.wait_event(_mark(self.compute))
        for array, offset in targets:
            if array.nbytes:
                runtime.memcpyAsync(
                    array.ctypes.data,
                    source + offset,
                    array.nbytes,
                    runtime.memcpyDeviceToHost,
                    self.copy_out.ptr,
                )
        done = _mark(self.copy_out)
        self.keep(done, (owner, *(array for array, _ in targets)))
        return done

    def keep(self, event: Any, owners: tuple[object, ...]) -> None:
        """Hold `owners` until `event` has passed."""
        while self._inflight and self._inflight[0][0].done:
            self._inflight.popleft()
        if len(self._inflight) >= MOST_INFLIGHT:
            self._inflight.popleft()[0].synchronize()
        self._inflight.append((event, owners))

    def finish(self) -> None:
        """Wait for everything."""
        for stream in (self.copy_in, self.compute, self.copy_out):
            stream.synchronize()
        self._inflight.clear()
