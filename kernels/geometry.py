"""The page pool's shape and storage, and the dtypes of pools and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np

Layout = Literal["NHD", "HND"]
DType = Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]

NUMPY_DTYPES: Final[dict[DType, np.dtype[Any]]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
TENSOR_DTYPES: Final[tuple[DType, ...]] = ("fp32", "fp16", "bf16")
"""Dtypes of q, k, v in requests, and of o in results."""
DIGESTED: Final = 2**17
"""Least bytes of a page under one digest, where it has them: the fewer, the more digests there are
to handle; the more, the longer one takes, whose blocks follow each other."""


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Shape and storage of the page pool.

    One tensor per layer: `[num_pages, 2, page_size, num_kv_heads, head_dim]` (NHD) or
    `[num_pages, 2, num_kv_heads, page_size, head_dim]` (HND); index 0 of axis 1 is K, 1 is V.
    A page id names the same page in every layer. Real value = stored value * scale (fp8 only).
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    layout: Layout = "NHD"
    dtype: DType = "fp16"
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def scales(self) -> tuple[float, float]:
        """(k_scale, v_scale) of fp8 pools; (1, 1) of others."""
        return (self.k_scale, self.v_scale) if self.dtype.startswith("fp8") else (1.0, 1.0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * NUMPY_DTYPES[self.dtype].itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_size * self.token_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.num_layers * self.page_bytes

    @property
    def segment_layers(self) -> int:
        """Layers of a page that have one digest."""
        return min(self.num_layers, -(-DIGESTED // self.page_bytes))

    @property
    def layer_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one layer's tensor."""
        inner = (self.page_size, self.num_kv_heads)
        inner = inner if self.layout == "NHD" else inner[::-1]
        return (self.num_pages, 2, *inner, self.head_dim)
