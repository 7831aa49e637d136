"""CuPy's pool of device memory, for a process in which streams may wait for callers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import cupy
from cupy.cuda import runtime

from kernels.errors import NoMemory

OUT_OF_MEMORY: Final = 2
"""`cudaErrorMemoryAllocation`."""


class NewBlock:
    """Allocates the blocks of a pool that frees its blocks for a new one only while `may_wait()`.

    To free a block the driver waits for all streams. Where one waits for its caller, that could
    take until the caller's deadline, and the engine would do nothing meanwhile. The allocation
    then raises NoMemory, and may be tried again.
    """

    def __init__(self, may_wait: Callable[[], bool]) -> None:
        self._may_wait = may_wait

    def __call__(self, size: int) -> Any:
        try:
            return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
        except runtime.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY or self._may_wait():
                raise  # the pool frees its blocks and tries again
            raise NoMemory(
                f"the device has no {size} bytes left, and no block can be freed while steps are "
                "open: try again, or lower pool.memory_fraction"
            ) from error


def install_pool(may_wait: Callable[[], bool]) -> None:
    """Have CuPy allocate all from now on from a pool of such blocks; in a thread beside others, all
    that this thread allocates. The pool ends with the thread."""
    pool = cupy.cuda.MemoryPool(NewBlock(may_wait))
    if threading.current_thread() is threading.main_thread():
        cupy.cuda.set_allocator(pool.malloc)
    else:
        cupy.cuda.memory._set_thread_local_allocator(pool.malloc)
