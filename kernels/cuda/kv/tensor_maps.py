"""Hopper's tensor maps of K and V: how the copy engine finds a page, or a tile of ragged keys.

Nothing here imports cupy; making a map needs the driver.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Final

from kernels.backend import DType, LayerGroup, Layout

MAP_BYTES: Final = 128
LATENT_HALVES: Final = (4, 5)
"""Blocks of 64 values in each half of a latent row."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorMaps:
    """A map of K and one of V, `packed` one after the other as the wide kernel takes them.

    A kv head adds `head_blocks` to their third coordinate and `head_groups` to their fourth.
    """

    packed: bytes
    head_blocks: int
    head_groups: int


@dataclass(frozen=True, slots=True)
class MapShape:
    """Extents and strides (bytes; the first dimension's is implied) of a map, and its box."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def paged_shape(
    group: LayerGroup, layout: Layout, dim: int, num_pages: int, page_step: int = 1
) -> MapShape:
    """K or V, of `dim` values a head, as (64 dims, 8 slots, blocks of 64, groups of 8 slots,
    pages), of which `num_pages` are each `page_step` pages of one layer after the one before.

    One box is one page of one kv head: `[page_size / 8, dim / 64, 8, 64]` in shared memory. In NHD
    the heads are the third dimension, in HND the fourth.
    """
    blocks, groups = dim // 64, group.page_size // 8
    slot = (group.num_kv_heads if layout == "NHD" else 1) * dim * 2
    heads = (group.num_kv_heads, 1) if layout == "NHD" else (1, group.num_kv_heads)
    return MapShape(
        extents=(64, 8, blocks * heads[0], groups * heads[1], num_pages),
        strides=(slot, 128, 8 * slot, group.layer_bytes * page_step),
        box=(64, 8, blocks, groups, 1),
    )


def ragged_shape(tokens: int, num_kv_heads: int, head_dim: int, tile_keys: int) -> MapShape:
    """Ragged keys as (64 dims, rows, blocks of 64 of all heads).

    One box is 64 dims of a tile of the kernel that waits for it.
    """
    width = num_kv_heads * head_dim
    return MapShape(
        extents=(64, tokens, width // 64),
        strides=(width * 2, 128),
        box=(64, tile_keys, 1),
    )


def paged_maps(
    group: LayerGroup, layout: Layout, address: int, num_pages: int, page_step: int
) -> TensorMaps:
    """Maps of K and V in pages (`paged_shape`), the first of which is at a device address.

    Raises RuntimeError when the driver refuses the map.
    """
    keys, values = (
        paged_shape(group, layout, dim, num_pages, page_step)
        for dim in (group.head_dim, group.v_head_dim)
    )
    values_at = address + group.page_size * group.row_elements[0] * 2
    nhd = layout == "NHD"
    return TensorMaps(
        packed=_both((keys, values), (address, values_at), group.dtype),
        head_blocks=group.head_dim // 64 if nhd else 0,
        head_groups=0 if nhd else group.page_size // 8,
    )


def latent_maps(
    group: LayerGroup, layout: Layout, address: int, num_pages: int, page_step: int
) -> TensorMaps:
    """Maps of the left and the right half of latent rows; one box is a page's half.

    Raises RuntimeError when the driver refuses the map.
    """
    whole = paged_shape(group, layout, group.head_dim, num_pages, page_step)
    left, right = (replace(whole, box=(64, 8, n, *whole.box[3:])) for n in LATENT_HALVES)
    packed = _both((left, right), (address, address), group.dtype)
    return TensorMaps(packed=packed, head_blocks=0, head_groups=0)


def ragged_maps(
    shapes: tuple[MapShape, MapShape], addresses: tuple[int, int], dtype: DType
) -> TensorMaps:
    """Maps of contiguous `k [tokens, num_kv_heads, head_dim]`, and v, at two device addresses.

    Raises RuntimeError when the driver refuses the map.
    """
    return TensorMaps(packed=_both(shapes, addresses, dtype), head_blocks=0, head_groups=0)


def _both(shapes: tuple[MapShape, MapShape], addresses: tuple[int, int], dtype: DType) -> bytes:
    return b"".join(
        _encode(shape, address, dtype) for shape, address in zip(shapes, addresses, strict=True)
    )


def _encode(shape: MapShape, address: int, dtype: DType) -> bytes:
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        if dtype == "fp16"
        else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(shape.extents),
        address,
        [driver.cuuint64_t(extent) for extent in shape.extents],
        [driver.cuuint64_t(stride) for stride in shape.strides],
        [driver.cuuint32_t(extent) for extent in shape.box],
        [driver.cuuint32_t(1)] * len(shape.extents),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"tensor map {shape} at {address:#x}: the driver says {status.name}")
    return ctypes.string_at(int(tensor_map.getPtr()), MAP_BYTES)
