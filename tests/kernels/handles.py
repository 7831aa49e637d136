"""Tensors of every kind: host arrays, pinned arrays, device tensors on a stream of their own."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kernels.backend import AttentionState, Backend
from kernels.tensor import DeviceTensor, PinnedArray, Tensor

Array = NDArray[Any]
Kind = Literal["host", "pinned", "device"]
KINDS: tuple[Kind, ...] = ("host", "pinned", "device")
ARENA_BYTES = 1 << 22


@dataclass(slots=True)
class Handles:
    """Makes tensors of one kind for a backend, and reads them."""

    kind: Kind
    backend: Backend
    stream: Any = None
    arena: Any = None
    used: int = 0
    begin: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.kind == "device":
            import cupy

            self.stream = cupy.cuda.Stream(non_blocking=True)
        if self.kind == "pinned":
            self.arena = np.frombuffer(mmap.mmap(-1, ARENA_BYTES), np.uint8)
            self.begin = self.arena.ctypes.data
            registered = self.backend.register(self.begin, ARENA_BYTES)
            assert registered == (self.backend.name == "cuda")

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """A tensor whose every byte is 0xFF: NaN, until an answer is written there."""
        return self.give(np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype)[..., 0])

    def give(self, values: Array) -> Tensor:
        """A tensor of the kind that holds these values."""
        if self.kind == "device":
            return self._on_device(values)
        if self.kind == "host":
            return np.array(values)
        end = self.used + values.nbytes
        assert end <= ARENA_BYTES, "the test's arena is too small"
        given = self.arena[self.used : end].view(values.dtype).reshape(values.shape)
        given[...] = values
        self.used = -(-end // 64) * 64
        pinned: PinnedArray = given.view(PinnedArray)
        return pinned

    def _on_device(self, values: Array) -> DeviceTensor:
        import cupy

        with self.stream:
            memory = cupy.zeros(max(1, values.nbytes), cupy.uint8)
            memory[: values.nbytes] = cupy.asarray(
                np.ascontiguousarray(values).view(np.uint8).ravel()
            )
        return DeviceTensor(values.dtype, values.shape, memory.data.ptr, self.stream.ptr, memory)

    def read(self, tensor: Tensor) -> Array:
        """The tensor's values, read in the order of its stream."""
        if not isinstance(tensor, DeviceTensor):
            return np.array(tensor)
        from cupy.cuda import runtime

        values = np.empty(tensor.shape, tensor.dtype)
        runtime.memcpyAsync(
            values.ctypes.data,
            tensor.address,
            values.nbytes,
            runtime.memcpyDeviceToHost,
            tensor.stream,
        )
        runtime.streamSynchronize(tensor.stream)
        return values

    def state(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> AttentionState:
        """Where states of that shape can go, NaN so far."""
        return AttentionState(
            self.empty(shape, dtype), self.empty(shape[:-1], np.dtype(np.float32))
        )

    def close(self) -> None:
        if self.kind == "pinned":
            self.backend.unregister(self.begin)


def same(got: Array, want: Array) -> bool:
    """Bit for bit."""
    return got.shape == want.shape and got.dtype == want.dtype and got.tobytes() == want.tobytes()
