"""Tensors as handles: dtype, shape and address, in host memory or on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


class PinnedArray(np.ndarray[Any, np.dtype[Any]]):
    """Host memory that the device can read and write directly (DMA); also its slices and views.

    Made by `array.view(PinnedArray)` of an array over memory that a backend has registered. A
    backend copies from and to it until the call's `Pending` is done; until then the caller must not
    use the bytes. The backend keeps the memory alive.
    """

    @property
    def is_pinned(self) -> bool:
        """Whether this is registered memory: copies have memory of their own."""
        owner: Any = self
        while isinstance(owner, np.ndarray):
            if owner.flags.owndata:
                return False
            owner = owner.base
        return True


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTensor:
    """Memory of the device at `address`, C-contiguous, valid in the order of `stream`.

    `stream` is a CUDA stream handle (0: the default stream). Work on the tensor is ordered after
    the stream's earlier work and before its later work. `owner` keeps the memory alive.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    address: int
    stream: int
    owner: object = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> DeviceTensor:
        """Consecutive rows, as of an array: the same memory."""
        first, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"step = {step}: device tensors support slices with step 1 only")
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(0, stop - first), *self.shape[1:])
        return replace(self, shape=shape, address=self.address + first * row_bytes)


Tensor: TypeAlias = Array | DeviceTensor


def host_array(tensor: Tensor) -> Array:
    """The tensor as an array; raises `TypeError` for one of a device."""
    if isinstance(tensor, DeviceTensor):
        raise TypeError(f"a tensor {tensor.shape} on the device: a host array is required")
    return tensor


def is_contiguous(array: Array) -> bool:
    """Whether an array is one aligned run of bytes in row-major order."""
    return array.flags.c_contiguous and array.flags.aligned
