"""Many copies between host and device by one call of the driver."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import CDLL, c_size_t, c_void_p
from typing import Any, Final

import numpy as np
from cupy.cuda import runtime
from cupy_backends.cuda.api import driver

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


def copy_all(
    places: tuple[Sequence[int], Sequence[int], Sequence[int]],
    kind: int,
    stream: Any,
    is_pinned: bool,
) -> None:
    """Start copies on a stream, in any order. `places`: destinations, sources and sizes of each."""
    to, sources, sizes = places
    call = batched() if is_pinned and len(sizes) > 1 else None
    if call is None:
        for one in zip(to, sources, sizes, strict=True):
            runtime.memcpyAsync(*one, kind, stream.ptr)
        return
    table = np.array([to, sources, sizes], np.uint64)
    rows = [row.ctypes.data for row in table]
    how = (STREAM_ORDER.ctypes.data, FIRST.ctypes.data, 1)
    driver.check_status(call(*rows, len(sizes), *how, stream.ptr))
