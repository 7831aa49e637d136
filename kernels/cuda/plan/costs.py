"""What kernels cost on a device: the numbers by which plans are weighed, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, bytes a second and operations a second, fitted to measurements on one device.

    `wide_flops` and `tile_flops` are what its `multiprocessors` reach together; `thin_flops` the
    same of the wide kernel at head_dim 64, where weights take longer than products, by tile rows.
    `wide_bytes`: what a multiprocessor reads where the wide kernel multiplies 64 rows a tile.
    `narrow_bytes`: what a warp of the narrow kernel reads; `few_bytes` in groups so small that
    loads leave the L1 cache together. `*_item` are seconds for an item beside its keys.
    `merge`: of a launch; `partial`: to write and read a row of a partial state of 128 dims.
    `cache_bytes`: what the L2 cache keeps of bytes that are read repeatedly.
    """

    multiprocessors: int
    wide_flops: float
    thin_flops: Mapping[int, float]
    wide_bytes: float
    wide_item: float
    tile_flops: float
    tile_item: float
    narrow_bytes: float
    narrow_item: float
    few_bytes: float
    few_item: float
    merge: float
    partial: float
    cache_bytes: int


H200: Final = Costs(
    multiprocessors=132,
    wide_flops=675e12,
    thin_flops={128: 450e12, 192: 500e12},
    wide_bytes=35e9,
    wide_item=1.8e-6,
    tile_flops=320e12,
    tile_item=1.8e-6,
    narrow_bytes=4.3e9,
    narrow_item=2.1e-6,
    few_bytes=5.4e9,
    few_item=6.0e-6,
    merge=2e-6,
    partial=3e-10,
    cache_bytes=48 * 2**20,
)
"""Fitted on 460 plans, median error 4 % (NOTES.md). All devices are planned for by these numbers:
an H100 reaches its marks so, and nothing was measured on those before and after Hopper."""
