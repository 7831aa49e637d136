"""The pool's memory on a device, and the addresses of K and V of each slot and head."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from kernels.backend import POISON, LayerGroup, PoolGeometry
from kernels.cuda.device.transfer import Transfers
from kernels.cuda.kv.tensor_maps import TensorMaps, latent_maps, paged_maps
from kernels.cuda.kv.view import KvView, row_unit


def allocate(geometry: PoolGeometry, transfers: Transfers, poison: bool) -> Any:
    """Device memory for all pages; it is freed with the object.

    Raises MemoryError when the device has not that much left.
    """
    size = geometry.num_pages * geometry.payload_bytes
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


def pool_view(geometry: PoolGeometry, group: LayerGroup, address: int) -> KvView:
    """The pages of a group of layers as the kernels see them, in a pool at a device address."""
    latent, nhd = group.kind == "latent", geometry.layout == "NHD"
    page_step, layer_step = geometry.block_steps(group)
    unit = row_unit(group.head_dim, group.v_head_dim, latent)
    block_rows = group.page_size * sum(group.row_elements) // unit
    values_at = group.layer_bytes * group.row_elements[0] // sum(group.row_elements)
    k_scale, v_scale = geometry.scales_of(group.dtype)
    return KvView(
        k=address,
        v=address + (0 if latent else values_at),
        layer_bytes=layer_step * group.layer_bytes,
        layer_rows=layer_step * block_rows,
        page_rows=page_step * block_rows,
        token_rows=group.num_kv_heads if nhd else 1,
        head_rows=1 if nhd else group.page_size,
        page_size=group.page_size,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        v_head_dim=group.v_head_dim,
        dtype=group.dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        num_pages=geometry.num_pages,
        contiguous=False,
        maps=PoolMaps(geometry, group, address),
        latent=latent,
    )


class PoolMaps:
    """Tensor maps of a group's pages, made when first asked for: one per layer, and one of all
    layers, if these are apart from each other.

    A box is a page, whatever the kernel's tiles.
    """

    def __init__(self, geometry: PoolGeometry, group: LayerGroup, address: int) -> None:
        self._geometry, self._group, self._address = geometry, group, address
        self._page_step, self._layer_step = geometry.block_steps(group)
        self._made: dict[int | None, TensorMaps] = {}

    def __call__(self, layer: int | None, _: int) -> TensorMaps:
        found = self._made.get(layer)
        if found is None:
            g, step = self._geometry, self._layer_step * self._group.layer_bytes
            apart = self._page_step == 1
            blocks = g.num_pages * (len(self._group.layers) if apart else 1)
            address = self._address + (layer or 0) * step
            make = latent_maps if self._group.kind == "latent" else paged_maps
            found = make(self._group, g.layout, address, blocks, self._page_step)
            self._made[layer] = found
        return found
