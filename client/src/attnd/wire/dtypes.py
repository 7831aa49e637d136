"""The dtypes that an image can name and a pool can store, and type names for arrays."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DType = np.dtype[Any]
Part = bytes | memoryview
"""One of the buffers that are sent one after another as an image."""

DTYPES: Final[dict[str, DType]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype(np.bool_),
}
"""Every dtype of the safetensors format; the operation decides which a tensor may have."""

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
BOOL: Final = DTYPES["BOOL"]
POOL_DTYPES: Final = {
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
}
"""The dtype of the values that a pool stores, by the pool's name for it."""


def token_bytes(num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of one token's K and V in one layer of a pool; unknown dtypes have one byte."""
    return 2 * num_kv_heads * head_dim * DTYPES[POOL_DTYPES.get(dtype, "U8")].itemsize
