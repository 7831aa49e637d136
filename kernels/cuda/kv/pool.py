"""The pool's memory on a device, and the addresses of K and V of each slot and head."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from kernels.backend import PoolGeometry
from kernels.cuda.device.transfer import Transfers
from kernels.cuda.kv.tensor_maps import TensorMaps, paged_maps
from kernels.cuda.kv.view import KvView
from kernels.geometry import POISON


def allocate(geometry: PoolGeometry, transfers: Transfers, poison: bool) -> Any:
    """Device memory for every layer's tensor; it is freed with the object.

    Raises MemoryError when the device has not that much left.
    """
    size = geometry.num_layers * geometry.num_pages * geometry.page_bytes
    try:
        pool = transfers.scratch(size)
    except cupy.cuda.memory.OutOfMemoryError as error:
        free, total = runtime.memGetInfo()
        raise MemoryError(
            f"the pool needs {size} bytes, {free} of the device's {total} are free: "
            "lower pool.num_pages or pool.memory_fraction"
        ) from error
    if poison:
        pool.memset_async(POISON, size, transfers.compute)
    return pool


def pool_view(geometry: PoolGeometry, address: int) -> KvView:
    """The pool at a device address as the kernels see it: `PoolGeometry.layer_shape` per layer."""
    half = geometry.page_size * geometry.num_kv_heads
    nhd = geometry.layout == "NHD"
    k_scale, v_scale = geometry.scales
    return KvView(
        k=address,
        v=address + geometry.page_bytes // 2,
        layer_bytes=geometry.num_pages * geometry.page_bytes,
        layer_rows=geometry.num_pages * 2 * half,
        page_rows=2 * half,
        token_rows=geometry.num_kv_heads if nhd else 1,
        head_rows=1 if nhd else geometry.page_size,
        page_size=geometry.page_size,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        num_pages=geometry.num_pages,
        contiguous=False,
        maps=PoolMaps(geometry, address),
    )


class PoolMaps:
    """Tensor maps of a pool, made when first asked for: one per layer, and one of all layers.

    A box is a page, whatever the kernel's tiles.
    """

    def __init__(self, geometry: PoolGeometry, address: int) -> None:
        self._geometry, self._address = geometry, address
        self._made: dict[int | None, TensorMaps] = {}

    def __call__(self, layer: int | None, _: int) -> TensorMaps:
        found = self._made.get(layer)
        if found is None:
            step = self._geometry.num_pages * self._geometry.page_bytes
            found = paged_maps(self._geometry, self._address + (layer or 0) * step)
            self._made[layer] = found
        return found
