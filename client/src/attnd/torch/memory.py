"""Tensors over memory that torch did not allocate: the arena, mapped from the engine."""

from __future__ import annotations

import mmap
from ctypes import (
    POINTER,
    Structure,
    addressof,
    c_char_p,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
    cast,
    py_object,
    pythonapi,
)
from typing import Any, Final

import torch
import torch.utils.dlpack

from attnd.torch import driver

DLPACK_CUDA: Final = 2
UNSIGNED: Final = 1


class DLDevice(Structure):
    _fields_ = [("kind", c_int32), ("index", c_int32)]


class DLDataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class DLManagedTensor(Structure):
    _fields_ = [("tensor", DLTensor), ("context", c_void_p), ("deleter", c_void_p)]


new_capsule = pythonapi.PyCapsule_New
new_capsule.restype = py_object
new_capsule.argtypes = (c_void_p, c_char_p, c_void_p)

NAME: Final = b"dltensor"
DESCRIBED: Final[list[Any]] = []
"""DLPack structs that torch can still read: a few hundred bytes for each arena, never freed."""


@torch.inference_mode(False)
def device_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    """A tensor of bytes over device memory, as memory of `device` whichever GPU owns it.

    DLPack takes the device at its word; other ways ask the driver, which names the GPU that owns
    the memory, and kernels of this one would refuse it.
    """
    shape = (c_int64 * 1)(size)
    managed = DLManagedTensor(
        DLTensor(
            address,
            DLDevice(DLPACK_CUDA, device.index or 0),
            1,
            DLDataType(UNSIGNED, 8, 1),
            cast(shape, POINTER(c_int64)),
            None,
            0,
        ),
        None,
        None,
    )
    DESCRIBED.append((managed, shape))
    capsule = new_capsule(addressof(managed), NAME, None)
    made: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return made


@torch.inference_mode(False)
def host_bytes(memory: mmap.mmap) -> torch.Tensor:
    """A tensor of bytes over the session's shared memory."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def mapped(handle: bytes, device: torch.device) -> int:
    """The engine's device memory in this process; its address."""
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # so that torch's context is the current one
        return driver.open_memory(handle)
