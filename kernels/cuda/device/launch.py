"""Kernels on the device: loading what `kernels.compile` made, and launching it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import CDLL, addressof, c_char, c_void_p
from pathlib import Path
from struct import Struct
from typing import Any, Final

import cupy
from cupy_backends.cuda.api import driver

from kernels.compile import DEFAULT_CACHE, Spec, compile_all, compile_cached

_POINTER: Final = Struct("=Q")
_OVERLAP: Final = Struct("=I4xI60x 7I4xQQI4x")
"""`CUlaunchAttribute`: id, and a value of 64 bytes of which the first four count here. Then
`CUlaunchConfig`: grid, block, shared bytes; stream; where its attributes are, and how many."""
_ATTRIBUTE_BYTES: Final = 72
_STREAM_IN_OVERLAP: Final = _ATTRIBUTE_BYTES + 32
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6


def device_arch(device: int) -> str:
    """The architecture to compile for; Hopper's own instructions need the `a`."""
    capability: str = cupy.cuda.Device(device).compute_capability
    return "sm_90a" if capability == "90" else f"sm_{capability}"


@functools.cache
def _launch_kernel_ex() -> Any:
    """The driver's `cuLaunchKernelEx`, which CuPy has no binding of."""
    launch = CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    return launch


class Launcher:
    """A launch of a kernel, all of it settled but the stream.

    Goes to the driver at a fraction of what CuPy's call costs. `memory` is the launch's own copy of
    `struct`, which may be written to between launches; the kernel's parameters, structs by value,
    begin at the offsets `parameters` of it.

    With `overlaps` it may begin while its predecessor on the stream still runs: when every block of
    that has called `launch_dependents` (overlap.cuh). Each of its threads then calls
    `wait_for_predecessor` before it touches what that writes, and before it ends.
    """

    __slots__ = (
        "_config",
        "_kernel",
        "_settled",
        "_stream_at",
        "_struct_bytes",
        "_where",
        "memory",
    )

    def __init__(
        self,
        kernel: Any,
        grid: int,
        threads: int,
        shared_bytes: int,
        struct: bytes,
        parameters: tuple[int, ...] = (0,),
        overlaps: bool = False,
    ) -> None:
        # the struct and, for the driver, the addresses of its parts, and how to overlap
        at = size = len(struct)
        room = size + 8 * len(parameters) + _OVERLAP.size
        self.memory = memory = bytearray(struct.ljust(room, b"\0"))
        address = addressof(c_char.from_buffer(memory))
        for offset in parameters:
            _POINTER.pack_into(memory, at, address + offset)
            at += 8
        self._where = address + size
        self._struct_bytes = size
        self._kernel = kernel  # kept alive: what follows is only its address
        sizes = (grid, 1, 1, threads, 1, 1, shared_bytes)
        self._settled = (kernel.kernel.ptr, *sizes)
        self._config = 0
        if overlaps:
            how = (_PROGRAMMATIC_STREAM_SERIALIZATION, 1, *sizes, 0, address + at, 1)
            _OVERLAP.pack_into(memory, at, *how)
            self._stream_at = at + _STREAM_IN_OVERLAP
            self._config = address + at + _ATTRIBUTE_BYTES

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for launches that are the same, whatever is written to their memory later."""
        struct = bytes(memoryview(self.memory)[: self._struct_bytes])
        return (self._settled, self._config != 0, struct)

    def __call__(self) -> None:
        """Enqueue on CuPy's current stream."""
        stream = cupy.cuda.get_current_stream().ptr
        if self._config == 0:
            driver.launchKernel(*self._settled, stream, self._where, 0)
        else:
            _POINTER.pack_into(self.memory, self._stream_at, stream)
            function = self._settled[0]
            driver.check_status(_launch_kernel_ex()(self._config, function, self._where, None))


class Library:
    """Loaded kernels of one device, compiled on first use when `prepare` did not see them."""

    def __init__(self, arch: str, cache: Path = DEFAULT_CACHE) -> None:
        self.arch = arch
        self.overlaps = int("".join(filter(str.isdigit, arch))) >= 90
        """Whether the device can start a kernel while its predecessor ends."""
        self.before_load: Callable[[Spec], object] = lambda _: None
        """Called before a kernel is loaded that `prepare` did not see; may raise."""
        self._cache = cache
        self._modules: dict[Spec, Any] = {}
        self._functions: dict[tuple[Spec, str], Any] = {}

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The loaded kernels."""
        return tuple(self._modules)

    def prepare(self, specs: Sequence[Spec]) -> None:
        """Compile kernels missing in the disk cache, in parallel, and load all of them."""
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
            self.before_load(spec)
            compiled = compile_cached(spec, self.arch, self._cache)
            module = cupy.RawModule(path=str(compiled.path))
            self._modules[spec] = module
        return module
