"""Kernels on the device: loading what `kernels.compile` made, and the structs they take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import cupy
import numpy as np
from cupy_backends.cuda.api import driver
from numpy.typing import NDArray

from kernels.compile import DEFAULT_CACHE, Spec, cached_path, compile_all, compile_cached

_ROWS: Final = ("items", "worker_begin", "kv_indices", "order", "positions")
_MASK: Final = ("mask_bits", "mask_row_offsets")
_MERGES: Final = ("merge_of_chunk", "merge_indptr", "merge_members", "merge_arrivals")
_PARTIALS: Final = ("partial_o", "partial_lse")
_POINTERS: Final = ("q", "o", "lse", "k", "v", *_ROWS, *_MASK, *_PARTIALS, *_MERGES)

ATTEND_PARAMS: Final = np.dtype(
    [
        *((name, np.uint64) for name in _POINTERS),
        *((f"{name}_rows", np.uint32) for name in ("layer", "page", "token", "head")),
        *((name, np.int32) for name in ("page_size", "num_workers")),
        *((name, np.int32) for name in ("num_kv_heads", "group_size")),
        *((name, np.float32) for name in ("scale", "scale2", "soft_cap", "v_scale")),
        *((name, np.int32) for name in ("window_left", "team", "chunk_rows")),
    ],
    align=True,
)
"""`AttendParams` of params.cuh, field by field."""

MERGE_PARAMS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("o_in", "lse_in", "o", "lse")),
        *((name, np.uint64) for name in ("indptr", "list", "chunks", "order")),
        *((name, np.int32) for name in ("num_rows", "num_heads", "group_size", "chunk_rows")),
        *((name, np.int32) for name in ("head_dim", "split", "into")),
    ],
    align=True,
)
"""`MergeParams` of merge.cu."""

POOL_ROWS: Final = np.dtype(
    [
        ("k", np.uint64),
        ("v", np.uint64),
        *((f"{name}_rows", np.uint32) for name in ("layer", "page", "token", "head")),
        ("page_size", np.int32),
        ("num_kv_heads", np.int32),
        ("k_scale", np.float32),
        ("v_scale", np.float32),
    ],
    align=True,
)
"""`PoolRows` of rows.cu."""


def params(dtype: np.dtype[Any], **fields: float) -> NDArray[Any]:
    """One struct as a one-element array, passed to kernels by value; unnamed fields are 0."""
    block = np.zeros(1, dtype)
    for name, value in fields.items():
        block[name] = value
    return block


def device_arch(device: int) -> str:
    """The architecture to compile for; Hopper's own instructions need the `a`."""
    capability: str = cupy.cuda.Device(device).compute_capability
    return "sm_90a" if capability == "90" else f"sm_{capability}"


class Launcher:
    """One kernel launch with everything but the stream settled, at a fraction of CuPy's own cost.

    `blocks` are the kernel's arguments, one array per argument, read anew by each launch; the
    kernel is one of `Library.function`.
    """

    __slots__ = ("_addresses", "_blocks", "_kernel", "_settled", "_where")

    def __init__(
        self,
        kernel: Any,
        grid: int,
        threads: int,
        shared_bytes: int,
        blocks: tuple[NDArray[Any], ...],
    ) -> None:
        self._kernel, self._blocks = kernel, blocks  # kept alive: what follows are addresses
        self._addresses = np.array([block.ctypes.data for block in blocks], np.uint64)
        self._settled = (kernel.kernel.ptr, grid, 1, 1, threads, 1, 1, shared_bytes)
        self._where = self._addresses.ctypes.data

    def __call__(self) -> None:
        """Enqueue on CuPy's current stream."""
        stream = cupy.cuda.get_current_stream().ptr
        driver.launchKernel(*self._settled, stream, self._where, 0)


class Library:
    """Loaded kernels of one device, compiled on first use when `prepare` did not see them."""

    def __init__(self, arch: str, cache: Path = DEFAULT_CACHE) -> None:
        self.arch = arch
        self._cache = cache
        self._modules: dict[Spec, Any] = {}
        self._functions: dict[tuple[Spec, str], Any] = {}

    @property
    def specs(self) -> tuple[Spec, ...]:
        """What is loaded."""
        return tuple(self._modules)

    def prepare(self, specs: Sequence[Spec]) -> None:
        """Compile in parallel what the disk cache lacks, and load it all."""
        compile_all(specs, self.arch, self._cache)
        for spec in specs:
            self._module(spec)

    def function(self, spec: Spec, entry: str, shared_bytes: int = 0) -> Any:
        """An entry point, allowed `shared_bytes` of dynamic shared memory."""
        found = self._functions.get((spec, entry))
        if found is None:
            found = self._module(spec).get_function(entry)
            if shared_bytes > 48 * 1024:
                found.max_dynamic_shared_size_bytes = shared_bytes
            self._functions[spec, entry] = found
        return found

    def _module(self, spec: Spec) -> Any:
        module = self._modules.get(spec)
        if module is None:
            compile_cached(spec, self.arch, self._cache)
            module = cupy.RawModule(path=str(cached_path(spec, self.arch, self._cache)))
            self._modules[spec] = module
        return module
