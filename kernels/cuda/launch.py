"""Kernels on the device: loading what `kernels.compile` made, and the structs they take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, POINTER, Structure, addressof, c_char, c_uint, c_void_p, pointer
from pathlib import Path
from struct import Struct
from typing import Any, Final

import cupy
import numpy as np
from cupy_backends.cuda.api import driver
from numpy.typing import NDArray

from kernels.compile import DEFAULT_CACHE, Spec, cached_path, compile_all, compile_cached

_ROWS: Final = ("items", "worker_begin", "kv_indices", "order", "positions")
_MASK: Final = ("mask_bits", "mask_row_offsets")
_PARTIALS: Final = ("partial_o", "partial_lse")
_POINTERS: Final = ("q", "o", "lse", "k", "v", *_ROWS, *_MASK, *_PARTIALS)

ATTEND_PARAMS: Final = np.dtype(
    [
        *((name, np.uint64) for name in _POINTERS),
        *((f"{name}_rows", np.uint32) for name in ("layer", "page", "token", "head")),
        *((name, np.int32) for name in ("page_size", "num_workers")),
        *((name, np.int32) for name in ("num_kv_heads", "group_size")),
        *((name, np.float32) for name in ("scale", "scale2", "soft_cap", "v_scale")),
        *((name, np.int32) for name in ("window_left", "team")),
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

_POINTER: Final = Struct("=Q")
_LETTERS: Final = {
    np.dtype(np.uint64): "Q",
    np.dtype(np.uint32): "I",
    np.dtype(np.int32): "i",
    np.dtype(np.float32): "f",
}


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


def writer(dtype: np.dtype[Any], *names: str) -> Callable[..., None]:
    """A function (memory, *values) that writes neighbouring fields of a struct at once.

    By far the cheapest way: numpy takes longer for one field than this for nine.
    """
    known: Mapping[str, Any] = dtype.fields or {}
    start = at = known[names[0]][1]
    letters = "="
    for name in names:
        kind, offset = known[name][:2]
        if offset != at:
            raise RuntimeError(f"{name} is at {offset}, its neighbour ends at {at}: this is a bug")
        at += kind.itemsize
        letters += _LETTERS[kind]
    pack = Struct(letters).pack_into

    def write(memory: Any, *values: float) -> None:
        pack(memory, start, *values)

    return write


class Launcher:
    """A launch of a kernel whose one argument is a struct, all of it settled but the stream.

    Goes to the driver at a fraction of what CuPy's call costs. `memory` is the launch's own struct,
    a copy of `struct` that may be written to between launches.
    """

    __slots__ = ("_kernel", "_settled", "_where", "memory")

    def __init__(
        self, kernel: Any, grid: int, threads: int, shared_bytes: int, struct: bytes
    ) -> None:
        size = len(struct)
        self.memory = bytearray(size + 8)  # the struct and, for the driver, its address
        self.memory[:size] = struct
        address = addressof(c_char.from_buffer(self.memory))
        _POINTER.pack_into(self.memory, size, address)
        self._where = address + size
        self._kernel = kernel  # kept alive: what follows is only its address
        self._settled = (kernel.kernel.ptr, grid, 1, 1, threads, 1, 1, shared_bytes)

    def __call__(self) -> None:
        """Enqueue on CuPy's current stream."""
        stream = cupy.cuda.get_current_stream().ptr
        driver.launchKernel(*self._settled, stream, self._where, 0)


class _Attribute(Structure):
    """`CUlaunchAttribute`, whose value is a union of 64 bytes."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_uint * 16))


class _Config(Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6


@functools.cache
def _launch_kernel_ex() -> Any:
    """The driver's `cuLaunchKernelEx`, which CuPy has no binding of."""
    launch = CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    return launch


class OverlappingLauncher(Launcher):
    """A launch that may begin while its predecessor on the stream still runs.

    The kernel calls `wait_for_predecessor` (mma.cuh) in every thread before it touches anything
    that others write.
    """

    __slots__ = ("_attribute", "_config", "_where_all")

    def __init__(
        self, kernel: Any, grid: int, threads: int, shared_bytes: int, struct: bytes
    ) -> None:
        super().__init__(kernel, grid, threads, shared_bytes, struct)
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (c_uint * 16)(1))
        sizes = ((c_uint * 3)(grid, 1, 1), (c_uint * 3)(threads, 1, 1), shared_bytes)
        self._config = _Config(*sizes, None, pointer(self._attribute), 1)
        self._where_all = (addressof(self._config), kernel.kernel.ptr, self._where, None)

    def __call__(self) -> None:
        self._config.stream = cupy.cuda.get_current_stream().ptr
        driver.check_status(_launch_kernel_ex()(*self._where_all))


class Library:
    """Loaded kernels of one device, compiled on first use when `prepare` did not see them."""

    def __init__(self, arch: str, cache: Path = DEFAULT_CACHE) -> None:
        self.arch = arch
        self.overlaps = int("".join(filter(str.isdigit, arch))) >= 90
        """Whether the device can start a kernel while its predecessor ends."""
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
