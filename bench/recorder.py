"""Stands in for a device: keeps what would be uploaded and launched, and what at which address.

Addresses are made up, and none is kept: what a launch tells of one is the content of the array that
was uploaded there.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from cuda.bindings import driver as cuda_driver

from kernels.compile import Spec
from kernels.cuda.common.structs import (
    ATTEND_PARAMS,
    MERGE_PARAMS,
    POOL_ROWS,
    STORED_KV,
    TENSOR_ROWS,
    VISIBLE_PARAMS,
    VISIBLE_TABLE,
    WIDE_PARAMS,
)
from kernels.cuda.device import launch
from kernels.cuda.kv.tensor_maps import MAP_BYTES
from kernels.cuda.visible import table as visible
from kernels.cuda.wide import variants as wide

MEMORY: Final = 1 << 60
"""An address of memory that is the caller's: its content does not decide what is launched."""
_UPLOADED: Final = 1 << 61
_APART: Final = 1 << 32
"""Uploaded arrays begin so far apart that no two of them share an address."""
_ATTRIBUTE_BYTES: Final = 72
_ATTRIBUTES_IN_CONFIG: Final = 40
"""Where a `CUlaunchConfig` has the address of its attributes, and then how many there are."""

_MAP: Final = np.dtype((np.void, MAP_BYTES))
Kinds = tuple[np.dtype[Any], ...]
PARAMETERS: Final[dict[str, tuple[Kinds, ...]]] = {
    "attend_narrow": ((ATTEND_PARAMS,),),
    "attend_tile": ((ATTEND_PARAMS, VISIBLE_TABLE),),
    wide.ENTRY: ((_MAP,), (_MAP,), (WIDE_PARAMS,)),
    f"{wide.ENTRY} of fp8": ((STORED_KV,), (WIDE_PARAMS,)),
    visible.ENTRY: ((VISIBLE_PARAMS,),),
    "merge_states": ((MERGE_PARAMS,),),
    "append_rows": ((POOL_ROWS, TENSOR_ROWS),),
}
"""Each kernel's parameters by value, each the structs that it is made of."""


def parameters_of(spec: Spec, entry: str) -> tuple[Kinds, ...]:
    """The parameters of a kernel's entry point; the wide kernel finds fp8 pools without maps."""
    stored = entry == wide.ENTRY and "-DFP8=0" not in spec.options
    return PARAMETERS[f"{entry} of fp8" if stored else entry]


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch: `shape` is grid, block and shared bytes, `values` the parameters' fields."""

    spec: Spec
    entry: str
    shape: tuple[int, ...]
    attributes: bytes
    values: tuple[object, ...]


@dataclass(slots=True)
class Memory:
    """Stands in for Transfers: remembers the content of what is uploaded."""

    contents: dict[int, str] = field(default_factory=dict)

    def place(self, array: Any) -> int:
        """The address of an array from now on."""
        content = np.ascontiguousarray(array)
        address = _UPLOADED + len(self.contents) * _APART
        digest = hashlib.sha256(content.tobytes()).hexdigest()
        self.contents[address] = f"{content.dtype} {content.shape} {digest}"
        return address

    def upload_ints(self, arrays: Sequence[Any]) -> tuple[None, list[int]]:
        """As `Transfers.upload_ints`."""
        return None, [self.place(np.asarray(array, np.int32)) for array in arrays]

    def scratch(self, size: int) -> Any:
        """As `Transfers.scratch`."""
        return SimpleNamespace(ptr=MEMORY)

    def content(self, address: int) -> str:
        """What is at an address."""
        return self.contents.get(address, "memory" if address else "nothing")


@dataclass(frozen=True, slots=True)
class Function:
    """Stands in for a loaded kernel: Launcher takes its number, CuPy's way calls it."""

    recorder: Recorder
    number: int

    @property
    def kernel(self) -> Any:
        return SimpleNamespace(ptr=self.number)

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], structs: Sequence[Any]
    ) -> None:
        sizes = [*grid, *(1,) * (3 - len(grid)), *block, *(1,) * (3 - len(block)), 0]
        self.recorder.keep(self.number, tuple(sizes), b"", [s.tobytes() for s in structs])


@dataclass(slots=True)
class Recorder:
    """Stands in for Library and for the driver's functions that launch."""

    arch: str
    overlaps: bool = True
    memory: Memory = field(default_factory=Memory)
    launched: list[Launched] = field(default_factory=list)
    functions: list[tuple[Spec, str]] = field(default_factory=list)

    def function(self, spec: Spec, entry: str, shared_bytes: int = 0) -> Function:
        """As `Library.function`."""
        self.functions.append((spec, entry))
        return Function(self, len(self.functions) - 1)

    def launchKernel(self, function: int, *settled: int) -> None:
        """As CuPy's `driver.launchKernel`."""
        *shape, _stream, where, _extra = settled
        self.keep(function, tuple(shape), b"", self._parameters(function, where))

    def launch_kernel_ex(self, config: int, function: int, where: int, extra: None) -> int:
        """As `cuLaunchKernelEx`, for a `CUlaunchConfig` at an address."""
        shape = tuple((ctypes.c_uint32 * 7).from_address(config))
        at = config + _ATTRIBUTES_IN_CONFIG
        size = _ATTRIBUTE_BYTES * ctypes.c_uint32.from_address(at + 8).value
        attributes = ctypes.string_at(ctypes.c_uint64.from_address(at).value, size)
        self.keep(function, shape, attributes, self._parameters(function, where))
        return 0

    def check_status(self, status: int) -> None:
        """As CuPy's `driver.check_status`: nothing fails here."""

    def _parameters(self, function: int, where: int) -> list[bytes]:
        """The kernel's parameters, whose addresses lie at `where`."""
        kinds = parameters_of(*self.functions[function])
        addresses = (ctypes.c_uint64 * len(kinds)).from_address(where)
        sizes = (sum(dtype.itemsize for dtype in kind) for kind in kinds)
        return [ctypes.string_at(a, size) for a, size in zip(addresses, sizes, strict=True)]

    def keep(
        self, function: int, shape: tuple[int, ...], attributes: bytes, parameters: list[bytes]
    ) -> None:
        """Take a launch down."""
        spec, entry = self.functions[function]
        values: list[object] = []
        for kinds, content in zip(parameters_of(spec, entry), parameters, strict=True):
            at = 0
            for dtype in kinds:
                values += self._values(dtype, content[at : at + dtype.itemsize])
                at += dtype.itemsize
        self.launched.append(Launched(spec, entry, shape, attributes, tuple(values)))

    def _values(self, dtype: np.dtype[Any], content: bytes) -> Iterator[object]:
        """A struct's fields: numbers as they are, and for addresses what is there."""
        if dtype.fields is None:
            yield content
            return
        struct = np.frombuffer(content, dtype)[0]
        for name, (kind, *_) in dtype.fields.items():
            value = struct[name].item()
            yield self.memory.content(value) if kind == np.uint64 else value


@contextmanager
def recording(arch: str) -> Iterator[Recorder]:
    """Inside, launches and tensor maps go to the recorder instead of the driver."""
    recorder = Recorder(arch)
    stream = SimpleNamespace(ptr=0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    launch_ex = recorder.launch_kernel_ex
    with (
        patch.multiple(launch, cupy=cupy, driver=recorder, _launch_kernel_ex=lambda: launch_ex),
        patch.object(cuda_driver, "cuTensorMapEncodeTiled", encode_tiled),
    ):
        yield recorder


def encode_tiled(dtype: Any, rank: int, address: int, *settings: Any) -> tuple[Any, Any]:
    """As `cuTensorMapEncodeTiled`; the map is a digest of all its settings but the address."""
    numbers = [[int(v) for v in s] if isinstance(s, list) else int(s) for s in settings]
    digest = hashlib.sha256(repr((int(dtype), rank, numbers)).encode()).digest()
    content = ctypes.create_string_buffer(digest, MAP_BYTES)
    made = SimpleNamespace(getPtr=lambda: ctypes.addressof(content))
    return cuda_driver.CUresult.CUDA_SUCCESS, made
