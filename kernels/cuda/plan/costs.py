"""What kernels cost on a device: the numbers by which plans are weighed, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

WideName = Literal["wide", "few", "pair", "short", "long", "token"]
"""Kernels of many rows: the usual one, of 64 rows, by two CTAs a multiprocessor, the same for short
prefills, of three warpgroups, and by two CTAs that copy token by token."""


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Microseconds of a unit of the wide kernel: at all, for each tile of keys, and of a row of its
    partial state."""

    item: float
    granule: float
    partial: float


NO_COSTS: Final = UnitCosts(0.0, 0.0, 0.0)
"""Of kernels that no others are weighed against."""


@dataclass(frozen=True, slots=True)
class SetCosts:
    """Constants by which sets of kernels are weighed (`attention/choice.py`), in microseconds.

    `launch`: of the wide kernel; `narrow`, `short`: of the narrow one, and with blocks of 8 warps;
    `both`: of two side by side; `narrow_key`: of the longest sequence that the narrow one reads.
    `merge`: of a launch; `partial`: of a value of a partial state. `tail`: part of a unit for which
    the last one keeps a launch. `cut`: tiles that are cut take so much longer than their runs.
    `bytes`: read in a microsecond. `item`, `key`: of units of the wide kernels, by their names, and
    of each of their keys at head_dims 64, 128, 192, 256; units grow by `head_dim ** growth`.
    `fp8_item`, `fp8_key`: so much longer take those that convert.
    """

    launch: float
    narrow: float
    short: float
    both: float
    narrow_key: float
    merge: float
    partial: float
    tail: float
    cut: float
    bytes: float
    item: Mapping[WideName, float]
    growth: float
    key: Mapping[WideName, Mapping[int, float]]
    fp8_item: float
    fp8_key: Mapping[WideName, float]

    def unit(self, name: WideName, head_dim: int, converts: bool, tile_keys: int) -> UnitCosts:
        """Of a kernel that takes `tile_keys` keys at a time."""
        item = self.item[name] * (head_dim / 128) ** self.growth
        granule = self.key[name][head_dim] * tile_keys
        if converts:
            item, granule = item * self.fp8_item, granule * self.fp8_key[name]
        return UnitCosts(item, granule, self.partial * head_dim)


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
    `sets`: of sets of kernels.
    """

    multiprocessors: int
    wide_flops: float
    thin_flops: Mapping[int, float]
    wide_bytes: float
    wide_item: float
    latent_item: float
    tile_flops: float
    tile_item: float
    narrow_bytes: float
    narrow_item: float
    few_bytes: float
    few_item: float
    merge: float
    partial: float
    cache_bytes: int
    sets: SetCosts


H200: Final = Costs(
    multiprocessors=132,
    wide_flops=675e12,
    thin_flops={128: 450e12, 192: 500e12},
    wide_bytes=35e9,
    wide_item=1.8e-6,
    latent_item=6e-6,
    tile_flops=320e12,
    tile_item=1.8e-6,
    narrow_bytes=4.3e9,
    narrow_item=2.1e-6,
    few_bytes=5.4e9,
    few_item=6.0e-6,
    merge=2e-6,
    partial=3e-10,
    cache_bytes=48 * 2**20,
    sets=SetCosts(
        launch=2.06,
        narrow=9.44,
        short=7.5,
        both=0.192,
        narrow_key=0.000348,
        merge=0.582,
        partial=2.16e-06,
        tail=0.21,
        cut=1.14,
        bytes=4020000.0,
        item={"wide": 4.4, "few": 1.2, "pair": 1.8, "short": 0.89, "long": 4.1, "token": 2.3},
        growth=0.688,
        key={
            "wide": {64: 0.00805, 128: 0.011, 192: 0.0154, 256: 0.0194},
            "few": {64: 0.00783, 128: 0.0113, 192: 0.0159, 256: 0.0157},
            "pair": {64: 0.00903, 128: 0.0163},
            "short": {128: 0.0161},
            "long": {64: 0.0128},
            "token": {64: 0.0102, 128: 0.0216},
        },
        fp8_item=1.1,
        fp8_key={"wide": 1.08, "few": 1.1},
    ),
)
"""Fitted on 460 plans, median error 4 % (NOTES.md). All devices are planned for by these numbers:
an H100 reaches its marks so, and nothing was measured on those before and after Hopper."""
