"""The Hopper kernel for many query rows, from Python: what it takes, its tensor maps, its launch.

How to call it (nothing here imports cupy or touches a device, except that maps need the driver):

    if wide.supports(arch, head_dim, q_dtype, kv_dtype, page_size, sm_scale):
        # page_size 0: ragged
        v = wide.variant(head_dim, kv_dtype, page_size, has_mask, has_soft_cap)
        kernel = library.function(v.spec, wide.ENTRY, v.shared_bytes)
        maps = wide.paged_maps(geometry, pool_pointer)            # once per pool
        maps = wide.ragged_maps(v, k_ptr, v_ptr, nnz, num_kv_heads)
        block = wide.argument_block(q=..., o=..., ...)            # device addresses and numbers
        block["head_block"] = wide.heads_together(num_kv_heads, num_items, num_runs)  # or 1
        wide.launch(kernel, v, maps, block, num_multiprocessors)  # on CuPy's current stream

Items are cut to at most `v.tile_rows` packed rows, best sorted by cost, dearest first; any number
of keys, zero included (such rows get the empty state). Items whose rows share keys should stand
next to each other: they then meet in the L2 cache. `schedule` is two uint32 that are zero at first;
the kernel leaves them zero, and launches that may overlap must not share them. Mask bits start at a
multiple of 4 bytes and need 32 readable bytes after the last; a masked launch comes after
`kernels.cuda.visible` has filled the table at `visible`, for key tiles of `v.tile_keys`. For ragged
keys `kv_begin` is the first key's row in k and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kernels.backend import DType, PoolGeometry
from kernels.compile import Spec

WideDType = Literal["fp16", "bf16"]

ENTRY: Final = "attend_wide"
TILE_ROWS: Final = 128

ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("q", "o", "lse", "items", "kv_indices", "order")),
        *((name, np.uint64) for name in ("positions", "mask_bits", "mask_row_offsets", "visible")),
        *((name, np.uint64) for name in ("partial_o", "partial_lse", "schedule")),
        ("sm_scale", np.float32),
        ("soft_cap", np.float32),
        *((name, np.int32) for name in ("window_left", "num_items", "num_kv_heads", "group_size")),
        *((name, np.int32) for name in ("head_block", "num_pages", "head_blocks", "head_groups")),
        ("visible_words", np.int32),
    ],
    align=True,
)
"""`WideArguments` of wide_tile.cuh, field by field."""

MAP: Final = np.dtype("V128")
"""A tensor map by value."""

SHARED_LIMIT: Final = 232448
"""Dynamic shared memory one block may have on compute capability 9.0, in bytes."""


@dataclass(frozen=True, slots=True)
class WideVariant:
    """One specialisation of the kernel. `page_size` 0 stands for ragged keys."""

    head_dim: int
    dtype: WideDType
    page_size: int
    has_mask: bool = False
    has_soft_cap: bool = False
    tile_keys: int = 128
    stages: int = 2
    query_stages: int = 2
    consumers: int = 2
    query_registers: bool = False

    @property
    def tile_rows(self) -> int:
        """Packed rows per item, at most: 64 per consumer warpgroup."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, laid out as `Shared` of wide_tile.cuh."""
        tiles = 2 * self.stages * self.tile_keys * self.head_dim * 2
        queries = self.query_stages * self.tile_rows * self.head_dim * 2
        slots = self.query_stages + 1 + self.query_registers
        rows = slots * self.tile_rows * (24 if self.has_mask else 12)
        barriers = 4 * self.stages + 2 * self.query_stages + 4
        visits = 4 * self.stages if self.has_mask else 0
        return tiles + queries + rows + 2 * 64 + 8 * barriers + visits

    @property
    def spec(self) -> Spec:
        """What to compile."""
        values = {
            "kHeadDim": self.head_dim,
            "kTileKeys": self.tile_keys,
            "kStages": self.stages,
            "kQueryStages": self.query_stages,
            "kConsumers": self.consumers,
            "kPageSize": self.page_size,
            "kQueriesInRegisters": int(self.query_registers),
            "kHasMask": int(self.has_mask),
            "kHasSoftCap": int(self.has_soft_cap),
        }
        bf16 = ("-DkBf16=1",) if self.dtype == "bf16" else ()
        return Spec(
            "attend_wide", (*(f"-D{name}={value}" for name, value in values.items()), *bf16)
        )


# head_dim -> (key tile, K/V stages, query stages): what 227 KiB and 232 registers hold; and up to
# which head_dim they hold queries in registers. A mask or a soft cap needs registers of its own.
_RARE: Final = {64: (128, 3, 2), 128: (128, 2, 2), 192: (64, 3, 1), 256: (64, 2, 1)}
_RARE_IN_REGISTERS: Final = 64
_PLAIN: Final = {**_RARE, 64: (192, 2, 2)}
_PLAIN_IN_REGISTERS: Final = 128
_PAGE_SIZES: Final = (0, 8, 16, 32, 64)


def supports(
    arch: str,
    head_dim: int,
    q_dtype: DType,
    kv_dtype: DType,
    page_size: int,
    sm_scale: float,
) -> bool:
    """Whether this kernel runs such work; everything else is the `mma.sync` kernel's.

    `sm_scale` must be positive, because maxima are taken before scaling.
    """
    return (
        arch == "sm_90a"
        and head_dim in _PLAIN
        and q_dtype == kv_dtype
        and kv_dtype in ("fp16", "bf16")
        and page_size in _PAGE_SIZES
        and sm_scale > 0.0
    )


def variant(
    head_dim: int,
    dtype: WideDType,
    page_size: int,
    has_mask: bool = False,
    has_soft_cap: bool = False,
) -> WideVariant:
    """The tuned specialisation for supported work."""
    rare = has_mask or has_soft_cap
    in_registers = head_dim <= (_RARE_IN_REGISTERS if rare else _PLAIN_IN_REGISTERS)
    sizes = (_RARE if rare else _PLAIN)[head_dim]
    return WideVariant(
        head_dim, dtype, page_size, has_mask, has_soft_cap, *sizes, query_registers=in_registers
    )


@dataclass(frozen=True, slots=True, eq=False)
class TensorMaps:
    """Maps of K and V (each one element of `MAP`) and what a kv head adds to their coordinates."""

    keys: NDArray[Any]
    values: NDArray[Any]
    head_blocks: int
    head_groups: int


@dataclass(frozen=True, slots=True)
class _MapShape:
    """Extents and strides (bytes; the first dimension's is implied) of a map, and its box."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def paged_shape(geometry: PoolGeometry) -> _MapShape:
    """A pool as (64 dims, 8 slots, blocks of 64, groups of 8 slots, pages of all layers).

    One box is one page of one kv head: `[page_size / 8, head_dim / 64, 8, 64]` in shared memory. In
    NHD the heads lie in the third dimension, in HND in the fourth.
    """
    g = geometry
    blocks, groups = g.head_dim // 64, g.page_size // 8
    page = g.page_size * g.num_kv_heads * g.head_dim * 2
    slot = (g.num_kv_heads if g.layout == "NHD" else 1) * g.head_dim * 2
    heads = (g.num_kv_heads, 1) if g.layout == "NHD" else (1, g.num_kv_heads)
    return _MapShape(
        extents=(64, 8, blocks * heads[0], groups * heads[1], g.num_layers * g.num_pages),
        strides=(slot, 128, 8 * slot, 2 * page),
        box=(64, 8, blocks, groups, 1),
    )


def ragged_shape(nnz: int, num_kv_heads: int, variant: WideVariant) -> _MapShape:
    """Ragged keys as (64 dims, rows, blocks of 64 of all heads).

    One box is 64 dims of a tile.
    """
    width = num_kv_heads * variant.head_dim
    return _MapShape(
        extents=(64, nnz, width // 64),
        strides=(width * 2, 128),
        box=(64, variant.tile_keys, 1),
    )


def paged_maps(geometry: PoolGeometry, pool: int) -> TensorMaps:
    """Maps of the whole pool, every layer: `pool` is the device address of its one allocation.

    Raises RuntimeError when the driver refuses the map.
    """
    shape = paged_shape(geometry)
    value_offset = geometry.page_size * geometry.num_kv_heads * geometry.head_dim * 2
    nhd = geometry.layout == "NHD"
    return TensorMaps(
        keys=_encode(shape, pool, geometry.dtype),
        values=_encode(shape, pool + value_offset, geometry.dtype),
        head_blocks=geometry.head_dim // 64 if nhd else 0,
        head_groups=0 if nhd else geometry.page_size // 8,
    )


def ragged_maps(
    variant: WideVariant, keys: int, values: int, nnz: int, num_kv_heads: int
) -> TensorMaps:
    """Maps of contiguous `k, v [nnz, num_kv_heads, head_dim]` at two device addresses."""
    shape = ragged_shape(nnz, num_kv_heads, variant)
    return TensorMaps(
        _encode(shape, keys, variant.dtype), _encode(shape, values, variant.dtype), 0, 0
    )


def _encode(shape: _MapShape, address: int, dtype: DType) -> NDArray[Any]:
    import ctypes

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
    return np.frombuffer(ctypes.string_at(int(tensor_map.getPtr()), 128), MAP).copy()


def heads_together(num_kv_heads: int, num_items: int, num_runs: int) -> int:
    """How many kv heads the CTAs work on at a time (`head_block`), by row tiles per run of keys.

    Measured: tiles that read the same keys at the same time find them in the L2 cache, so few heads
    are best; but with hundreds of tiles on one run, all CTAs would read the same lines at once.
    """
    wanted = 4 if num_items > 128 * num_runs else 2
    return max(n for n in (1, 2, 4) if n <= wanted and num_kv_heads % n == 0)


def argument_block(**fields: float) -> NDArray[Any]:
    """One `ARGUMENTS` element; a field not named is 0 (a null pointer). Edit it at will."""
    block = np.zeros(1, ARGUMENTS)
    for name, value in fields.items():
        block[name] = value
    return block


def launch(
    kernel: Any,
    variant: WideVariant,
    maps: TensorMaps,
    block: NDArray[Any],
    num_multiprocessors: int,
) -> None:
    """Enqueue one launch on CuPy's current stream; `block` is copied before this returns."""
    block["head_block"] = np.maximum(block["head_block"], 1)
    block["head_blocks"] = maps.head_blocks
    block["head_groups"] = maps.head_groups
    units = int(block["num_items"][0]) * int(block["num_kv_heads"][0])
    if units == 0:
        return
    kernel(
        (min(units, num_multiprocessors),),
        (variant.threads,),
        (maps.keys, maps.values, block),
        shared_mem=variant.shared_bytes,
    )
