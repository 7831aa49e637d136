"""The few calls of the CUDA driver that torch does not have, and tensors over memory that torch did
not allocate, by ctypes."""

from __future__ import annotations

import ctypes as c
import functools
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final

import torch
import torch.utils.dlpack

LAZY_LOADING: Final = 2
LAZY_PEER_ACCESS: Final = 1
MPS_ENABLED: Final = 133
NATIVE_ATOMICS: Final = 3
WAIT: Final = 1
WRITE: Final = 2
EQUAL: Final = 1
"""Flag of a wait: until the word is equal to the value."""
OPERATION: Final = Struct("<I4xQQI20x")
"""`CUstreamBatchMemOpParams`: operation, address, value, flags."""
MOST_AT_ONCE: Final = 128


class DriverError(RuntimeError):
    """The driver refused a call."""


class IpcHandle(c.Structure):
    """`CUipcMemHandle`, which is passed by value."""

    _fields_ = [("reserved", c.c_char * 64)]


@functools.cache
def library() -> Any:
    cuda = c.CDLL("libcuda.so.1")
    cuda.cuIpcOpenMemHandle_v2.argtypes = (c.POINTER(c.c_uint64), IpcHandle, c.c_uint)
    cuda.cuStreamBatchMemOp_v2.argtypes = (c.c_void_p, c.c_uint, c.c_char_p, c.c_uint)
    cuda.cuGetErrorName.argtypes = (c.c_int, c.POINTER(c.c_char_p))
    return cuda


def check(status: int, what: str) -> None:
    """Raises `DriverError` with the driver's own name of the error."""
    if status:
        name = c.c_char_p()
        library().cuGetErrorName(status, c.byref(name))
        raise DriverError(f"{what}: {(name.value or b'unknown').decode()}")


def operations(kinds: Sequence[tuple[int, int, int]]) -> Callable[[int], None]:
    """Waits and writes, (WAIT or WRITE, address, value), as a function that enqueues them all on a
    stream. A write becomes visible after everything before it; a wait blocks everything
    behind it."""
    packed = b"".join(
        OPERATION.pack(kind, address, value, EQUAL if kind == WAIT else 0)
        for kind, address, value in kinds
    )
    parts = [
        c.create_string_buffer(packed[i : i + MOST_AT_ONCE * OPERATION.size])
        for i in range(0, len(packed), MOST_AT_ONCE * OPERATION.size)
    ]
    calls = [((len(part) - 1) // OPERATION.size, part) for part in parts]
    enqueue = library().cuStreamBatchMemOp_v2

    def run(stream: int) -> None:
        for count, part in calls:
            if status := enqueue(stream, count, part, 0):
                check(status, "cuStreamBatchMemOp")

    return run


def loads_lazily() -> bool:
    """Whether the driver loads a kernel when it is first launched."""
    mode = c.c_int()
    check(library().cuModuleGetLoadingMode(c.byref(mode)), "cuModuleGetLoadingMode")
    return mode.value == LAZY_LOADING


def device_of(index: int) -> int:
    device = c.c_int()
    check(library().cuDeviceGet(c.byref(device), index), "cuDeviceGet")
    return device.value


def uuid_of(index: int) -> str:
    """The GPU's own id, the same in every process."""
    uuid = (c.c_ubyte * 16)()
    check(library().cuDeviceGetUuid_v2(uuid, device_of(index)), "cuDeviceGetUuid")
    return bytes(uuid).hex()


def has_mps(index: int) -> bool:
    """Whether contexts on the GPU go through MPS."""
    value = c.c_int()
    status = library().cuDeviceGetAttribute(c.byref(value), MPS_ENABLED, device_of(index))
    return status == 0 and value.value != 0


def has_nvlink(index: int, other: int) -> bool:
    """Whether two GPUs reach each other by NVLink: only there atomics work across."""
    value = c.c_int()
    devices = device_of(index), device_of(other)
    status = library().cuDeviceGetP2PAttribute(c.byref(value), NATIVE_ATOMICS, *devices)
    return status == 0 and value.value != 0


DLPACK_CUDA: Final = 2
UNSIGNED: Final = 1


class DLDevice(c.Structure):
    _fields_ = [("kind", c.c_int32), ("index", c.c_int32)]


class DLDataType(c.Structure):
    _fields_ = [("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16)]


class DLTensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("device", DLDevice),
        ("ndim", c.c_int32),
        ("dtype", DLDataType),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]


class DLManagedTensor(c.Structure):
    _fields_ = [("tensor", DLTensor), ("context", c.c_void_p), ("deleter", c.c_void_p)]


new_capsule = c.pythonapi.PyCapsule_New
new_capsule.restype = c.py_object
new_capsule.argtypes = (c.c_void_p, c.c_char_p, c.c_void_p)

NAME: Final = b"dltensor"


@functools.cache
def described(address: int, size: int, index: int) -> tuple[DLManagedTensor, Any]:
    """DLPack's struct for bytes of a GPU, and their number. Torch reads it until the last tensor
    over them is gone, so it is never freed."""
    shape = (c.c_int64 * 1)(size)
    sizes = c.cast(shape, c.POINTER(c.c_int64))
    device, uint8 = DLDevice(DLPACK_CUDA, index), DLDataType(UNSIGNED, 8, 1)
    return DLManagedTensor(DLTensor(address, device, 1, uint8, sizes, None, 0), None, None), shape


def device_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    """A tensor of bytes over device memory, as memory of `device` whichever GPU owns it.

    DLPack takes the device at its word; other ways ask the driver, which names the GPU that owns
    the memory, and kernels of this one would refuse it.
    """
    managed, _ = described(address, size, device.index or 0)
    capsule = new_capsule(c.addressof(managed), NAME, None)
    made: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return made


def mapped(handle: bytes, device: torch.device) -> int:
    """Map the engine's device memory into this process; its address here."""
    shared, address = IpcHandle.from_buffer_copy(handle), c.c_uint64()
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # so that torch's context is the current one
        status = library().cuIpcOpenMemHandle_v2(c.byref(address), shared, LAZY_PEER_ACCESS)
        check(status, "the engine's arena cannot be mapped (is its GPU visible here?)")
    return address.value
