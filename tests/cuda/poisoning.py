"""Device memory whose bytes are overwritten as soon as it is freed, in its pool's stream order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import cupy
from cupy.cuda import runtime

FREED: Final = 0xFF


class _Block:
    """Memory of a stream's pool; goes back overwritten when the last reference goes."""

    active = False

    def __init__(self, size: int, allocate: Callable[[int], Any]) -> None:
        self.stream = cupy.cuda.get_current_stream()
        self.size = size
        self.memory = allocate(size)

    def __del__(self) -> None:
        if _Block.active:  # else its stream may be destroyed
            runtime.memsetAsync(self.memory.ptr, FREED, self.size, self.stream.ptr)


def poison() -> None:
    """Wrap the present allocator. Streams outlive their allocations."""
    inner = cupy.cuda.get_allocator()

    def allocate(size: int) -> Any:
        if size == 0:
            return inner(0)
        block = _Block(size, inner)
        memory = cupy.cuda.UnownedMemory(block.memory.ptr, size, block)
        return cupy.cuda.MemoryPointer(memory, 0)

    cupy.cuda.set_allocator(allocate)
    _Block.active = True


@contextmanager
def poisoned_when_freed() -> Iterator[None]:
    gc.collect()
    poison()
    try:
        yield
    finally:
        gc.collect()
        _Block.active = False
        cupy.cuda.Device().synchronize()
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
