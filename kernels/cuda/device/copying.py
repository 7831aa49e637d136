"""Many copies between host and device by one call of the driver."""

from __future__ import annotations

import functools
from ctypes import CDLL, c_size_t, c_void_p
from typing import Any, Final

import numpy as np
from cupy.cuda import runtime
from cupy_backends.cuda.api import driver
from numpy.typing import NDArray

STREAM_ORDER: Final = np.array([1, 0, 0, 0, 0, 0], np.int32)
"""`CUmemcpyAttributes`: sources are read in the stream's order; no hints, no flags."""
FIRST: Final = np.zeros(1, np.uint64)
"""The attributes hold from the first copy on."""


@functools.cache
def batched() -> Any:
    """The driver's `cuMemcpyBatchAsync` (CUDA 13), which CuPy has no binding of; None without."""
    call = getattr(CDLL("libcuda.so.1"), "cuMemcpyBatchAsync_v2", None)
    if call is not None:
        pointers = [c_void_p] * 3
        call.argtypes = (*pointers, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p)
    return call


def copy_all(copies: NDArray[np.uint64], kind: int, stream: Any, is_pinned: bool) -> None:
    """Start copies in any order; the rows of `copies [3, n]` are to, from, and bytes."""
    call = batched() if is_pinned and copies.shape[1] > 1 else None
    if call is None:
        for to, source, size in copies.T.tolist():
            runtime.memcpyAsync(to, source, size, kind, stream.ptr)
        return
    base, step = copies.ctypes.data, copies.strides[0]
    how = (STREAM_ORDER.ctypes.data, FIRST.ctypes.data, 1)
    rows = (base, base + step, base + 2 * step)
    driver.check_status(call(*rows, copies.shape[1], *how, stream.ptr))
