"""Device memory whose bytes are overwritten as soon as it is freed, in its pool's stream order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import cupy
from cupy.cuda import runtime

FREED: Final = 0xFF


class _Block:
    """Memory of a stream's pool; goes back poisoned when the last reference goes."""

    active = False

    def __init__(self, size: int) -> None:
        self.stream = cupy.cuda.get_current_stream()
        self.size = size
        self.memory = cupy.get_default_memory_pool().malloc(size)

    def __del__(self) -> None:
        if _Block.active:  # else its stream may be gone
            runtime.memsetAsync(self.memory.ptr, FREED, self.size, self.stream.ptr)


def _allocate(size: int) -> Any:
    if size == 0:
        return cupy.get_default_memory_pool().malloc(0)
    block = _Block(size)
    memory = cupy.cuda.UnownedMemory(block.memory.ptr, size, block)
    return cupy.cuda.MemoryPointer(memory, 0)


@contextmanager
def poisoned_when_freed() -> Iterator[None]:
    cupy.cuda.set_allocator(_allocate)
    _Block.active = True
    try:
        yield
    finally:
        _Block.active = False
        cupy.cuda.Device().synchronize()
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
