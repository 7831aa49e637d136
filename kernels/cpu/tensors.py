"""Between numpy and torch: the same memory under both names, and the storage formats' bits."""

from __future__ import annotations

import warnings
from typing import Final

import numpy as np
import torch

from kernels.backend import NUMPY_DTYPES, Array, DType, Tensor, Unsupported
from kernels.tensor import DeviceTensor

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer of a given width: storage is moved as bits, so that a NaN stays the NaN it was."""

_NUMPY_BITS: Final = {1: np.uint8, 2: np.int16, 4: np.int32}
_NAMES: Final[dict[np.dtype[np.generic], DType]] = {v: k for k, v in NUMPY_DTYPES.items()}

with warnings.catch_warnings():
    # Request tensors are read-only views of a body. torch says once per process that it cannot
    # keep that promise; nothing here writes to what it was given, so it is said here, unheard.
    warnings.simplefilter("ignore", UserWarning)
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def dtype_name(dtype: np.dtype[np.generic]) -> DType:
    """The contract's name of a numpy dtype; raises `ValueError` for one it has no name for."""
    if dtype not in _NAMES:
        raise ValueError(f"dtype = {dtype}: must be one of {', '.join(NUMPY_DTYPES)}")
    return _NAMES[dtype]


def on_host(tensor: Tensor, field: str) -> Array:
    """The tensor as an array. Raises `Unsupported` for one of a device."""
    if isinstance(tensor, DeviceTensor):
        raise Unsupported(field, "a device tensor", "the CPU backend takes tensors of the host")
    return tensor


def to_torch(array: Array) -> torch.Tensor:
    """The array's own memory as a tensor; copied only when misaligned or not contiguous."""
    name = dtype_name(array.dtype)
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = np.require(array, requirements=["C", "A"])
    bits = torch.from_numpy(array.view(_NUMPY_BITS[array.dtype.itemsize]))
    return bits.view(TORCH_DTYPES[name])


def write(values: torch.Tensor, out: Array) -> None:
    """Round values into an array of one of the contract's dtypes, in one pass where it is laid out
    as torch needs it."""
    if out.flags.c_contiguous and out.flags.aligned:
        to_torch(out).copy_(values)
    else:
        out[...] = to_numpy(values, dtype_name(out.dtype))


def to_numpy(tensor: torch.Tensor, dtype: DType) -> Array:
    """The tensor rounded to `dtype`, as an array."""
    cast = tensor.to(TORCH_DTYPES[dtype]).contiguous()
    array: Array = cast.view(BITS[cast.itemsize]).numpy().view(NUMPY_DTYPES[dtype])
    return array


def widen(bits: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Stored bits as float32 values, contiguous; no scale applied. float32 itself is not copied."""
    if dtype in ("fp8_e4m3", "fp8_e5m2"):
        bits = bits.contiguous()  # bytes are the cheapest to reorder
        if dtype == "fp8_e4m3":
            return _widen_e4m3(bits)
        half = bits.to(torch.int16).bitwise_left_shift_(8)  # the upper byte of an fp16
        return half.view(torch.float16).float()
    values = bits.view(TORCH_DTYPES[dtype])
    return values.to(torch.float32, memory_format=torch.contiguous_format)


def _widen_e4m3(bits: torch.Tensor) -> torch.Tensor:
    """As fp16 the same exponent and fraction read 2**-8 of the value (biases 15 and 7); this is
    many times faster than torch's own conversion, and exact. Only NaN (0x7f) needs a hand.
    """
    half = bits.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values = half.view(torch.float16).to(torch.float32).mul_(256.0)
    magnitude = bits.bitwise_and(0x7F)
    if bits.numel() == 0 or int(magnitude.max()) < 0x7F:
        return values
    return values.masked_fill_(magnitude == 0x7F, torch.nan)


def narrow(values: torch.Tensor, dtype: DType, scale: float) -> torch.Tensor:
    """Values as stored bits: cast, or for fp8 `value / scale` saturated to the largest finite."""
    target = TORCH_DTYPES[dtype]
    if dtype in ("fp8_e4m3", "fp8_e5m2"):
        largest = torch.finfo(target).max
        values = values.to(torch.float32).div(scale).clamp_(-largest, largest)
    return values.to(target).view(BITS[target.itemsize])
