"""Locations of K and V in device memory, as arguments of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kernels.backend import NUMPY_DTYPES, DType
from kernels.cuda.kv.tensor_maps import TensorMaps


@dataclass(frozen=True, slots=True, eq=False)
class KvView:
    """Where K and V are: device addresses, strides, dtype, scales.

    `layer_rows` and `page_rows` are in rows of `row_unit` elements, `token_rows` and `head_rows` in
    rows of a head. `layer_bytes` separates layers. `latent`: V is the first `v_head_dim` values of
    K. `contiguous` means that a page id is its own index. `maps` makes Hopper's tensor maps of one
    layer, or of all for None, for a kernel that takes a number of keys at a time: it waits for
    those that one box of a map brings.
    """

    k: int
    v: int
    layer_bytes: int
    layer_rows: int
    page_rows: int
    token_rows: int
    head_rows: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: DType
    k_scale: float
    v_scale: float
    num_pages: int
    contiguous: bool
    maps: Callable[[int | None, int], TensorMaps]
    latent: bool = False

    @property
    def row_unit(self) -> int:
        """Elements that strides of pages count: a row, if K and V have rows of one size."""
        return row_unit(self.head_dim, self.v_head_dim, self.latent)

    @property
    def page_bytes(self) -> int:
        """Of a page's K and V in one layer, all heads."""
        row = self.head_dim + (0 if self.latent else self.v_head_dim)
        itemsize = NUMPY_DTYPES[self.dtype].itemsize
        return self.page_size * self.num_kv_heads * row * itemsize

    @property
    def strides(self) -> dict[str, int]:
        """What finds the row of a token, by the names that all kernels' structs have for it."""
        return {
            "layer_rows": self.layer_rows,
            "page_rows": self.page_rows,
            "token_rows": self.token_rows,
            "head_rows": self.head_rows,
            "page_size": self.page_size,
            "num_kv_heads": self.num_kv_heads,
        }


def row_unit(head_dim: int, v_head_dim: int, latent: bool) -> int:
    """Elements that strides of pages count: `kRowUnit` of the kernels."""
    return head_dim if latent else math.gcd(head_dim, v_head_dim)
