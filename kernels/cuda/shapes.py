"""Which specialisations exist and how big they are: tiles, stages and shared memory per device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from kernels.backend import NUMPY_DTYPES, TENSOR_DTYPES, DType, Scoring, Unsupported
from kernels.compile import Spec, spec
from kernels.cuda import visible, wide
from kernels.cuda.tiles import TileShape

HEAD_DIMS: Final = (64, 80, 96, 128, 192, 256)
FORMATS: Final[dict[DType, int]] = {"fp16": 0, "bf16": 1, "fp32": 2, "fp8_e4m3": 4, "fp8_e5m2": 5}
"""The numbers by which the sources know memory formats."""

SHARED_PER_MULTIPROCESSOR: Final = {
    "sm_80": 167936,
    "sm_86": 102400,
    "sm_87": 167936,
    "sm_89": 102400,
    "sm_90a": 233472,
    "sm_100": 233472,
    "sm_103": 233472,
    "sm_120": 102400,
    "sm_121": 102400,
}
"""Bytes; each resident block also takes `RESERVED` of it."""
LEAST_SHARED: Final = 102400
"""What to count on where an architecture is not listed."""
RESERVED: Final = 1024
NARROW_BLOCKS: Final = {1: ((12, 1), (8, 1), (4, 1)), 2: ((8, 1), (6, 1), (4, 1))}
"""Warps of a narrow block and blocks a multiprocessor, the first that fits, by tiles of 8 rows."""
LONG_ROWS: Final = 128
"""Above this head_dim the narrow kernel has registers for 8 rows and 8 warps only."""
NARROW_RUN: Final = 128
"""Keys under which another narrow worker is not worth its partial state."""
NARROW_TILE: Final = 16


@dataclass(frozen=True, slots=True)
class Kernel:
    """One attention specialisation and how to launch it; it takes `tile_keys` keys at a time."""

    spec: Spec
    entry: str
    rows: int
    threads: int
    shared_bytes: int
    blocks: int
    tile_keys: int


def row_stride(head_dim: int, dtype: DType) -> int:
    """Bytes from one stored row to the next in shared memory: an odd number of 16-byte chunks."""
    return (head_dim * NUMPY_DTYPES[dtype].itemsize // 16 | 1) * 16


def query_stride(head_dim: int) -> int:
    """Bytes from one query row to the next in shared memory."""
    return head_dim * 2 + 16


def definitions(head_dim: int, compute: DType, storage: DType, rare: bool) -> dict[str, int]:
    """The `-D` names every attention specialisation has."""
    fp8 = FORMATS[storage] if storage.startswith("fp8") else 0
    return {"HEAD_DIM": head_dim, "BF16": int(compute == "bf16"), "FP8": fp8, "RARE": int(rare)}


def narrow_kernel(
    arch: str, head_dim: int, compute: DType, storage: DType, rare: bool, row_tiles: int
) -> Kernel:
    """The kernel of teams of warps for 8 * `row_tiles` packed rows."""
    limit = SHARED_PER_MULTIPROCESSOR.get(arch, LEAST_SHARED)
    rows = 8 * row_tiles
    # kWarpBytes of narrow_team.cuh: queries, a row tile's states, maxima and sums, row numbers
    own = head_dim * 32 + 8 * (head_dim + 4) * 4 + 64 + rows * 4
    # 168 registers hold neither long rows, nor 128 dims of what is rare or has to be converted;
    # for sm_100 and later the compiler takes a few more
    hard = head_dim == LONG_ROWS and (rare or storage != compute)
    hard = hard or (arch.startswith("sm_1") and head_dim >= 96)
    choices = NARROW_BLOCKS[2 if hard or head_dim > LONG_ROWS else row_tiles]
    warps, blocks = next(c for c in choices if c[1] * (c[0] * own + RESERVED) <= limit)
    return Kernel(
        spec=spec(
            "attend_narrow",
            **definitions(head_dim, compute, storage, rare),
            ROW_TILES=row_tiles,
            WARPS=warps,
            BLOCKS=blocks,
        ),
        entry="attend_narrow",
        rows=rows,
        threads=32 * warps,
        shared_bytes=warps * own,
        blocks=blocks,
        tile_keys=NARROW_TILE,
    )


def tile_kernel(
    arch: str, head_dim: int, compute: DType, storage: DType, rare: bool, row_tiles: int
) -> Kernel:
    """The block-per-item kernel, of at most 64 * `row_tiles` packed rows, as large as fits."""
    limit = SHARED_PER_MULTIPROCESSOR.get(arch, LEAST_SHARED)
    # two row tiles a warp where 255 registers hold them, two warps where one tile is too much
    hard = (storage != compute) + rare
    roomy = {64: 1, 80: 0, 128: -1 if arch.startswith("sm_10") else 0}.get(head_dim, -1)
    tiles = row_tiles if hard <= roomy else 1
    crowded = head_dim == 256 and rare
    crowded |= head_dim == 192 and (hard == 2 or (rare and arch == "sm_90a"))
    choices = [(tiles, 4), (1, 4), (1, 2)][2 if crowded else 0 :]
    sizes = [_tile_bytes(head_dim, storage, m, w) for m, w in choices]
    best = next(i for i, size in enumerate(sizes) if size + RESERVED <= limit)
    (m, warps), size = choices[best], sizes[best]
    blocks = 2 if 2 * (size + RESERVED) <= limit else 1
    return Kernel(
        spec=spec(
            "attend_tile",
            **definitions(head_dim, compute, storage, rare),
            ROW_TILES=m,
            WARPS=warps,
            BLOCKS=blocks,
            STAGES=2,
        ),
        entry="attend_tile",
        rows=16 * m * warps,
        threads=32 * warps,
        shared_bytes=size,
        blocks=blocks,
        tile_keys=16 * warps,
    )


def _tile_bytes(head_dim: int, storage: DType, row_tiles: int, warps: int) -> int:
    queries = 16 * warps * row_tiles * query_stride(head_dim)
    return queries + 2 * 2 * 16 * warps * row_stride(head_dim, storage)


def wide_variant(
    arch: str,
    head_dim: int,
    compute: DType,
    storage: DType,
    page_size: int,
    scoring: Scoring,
    masked: bool,
) -> wide.WideVariant | None:
    """Hopper's specialisation for such work, if it runs it; `page_size` 0 is ragged."""
    if not wide.supports(arch, head_dim, compute, storage, page_size, scoring.sm_scale):
        return None
    dtype: wide.WideDType = "bf16" if compute == "bf16" else "fp16"
    return wide.variant(head_dim, dtype, page_size, masked, scoring.logits_soft_cap > 0)


def wide_kernel(variant: wide.WideVariant) -> Kernel:
    return Kernel(
        spec=variant.spec,
        entry=wide.ENTRY,
        rows=variant.tile_rows,
        threads=variant.threads,
        shared_bytes=variant.shared_bytes,
        blocks=1,
        tile_keys=variant.tile_keys,
    )


def attend_kernels(
    arch: str,
    head_dim: int,
    compute: DType,
    storage: DType,
    rare: bool,
    variant: wide.WideVariant | None = None,
) -> tuple[Kernel, ...]:
    """The kernels for growing numbers of packed rows, each row count served by the first fit.

    Segments that the narrow kernels do not take are Hopper's `variant`'s, or the tile kernels'.
    """
    if head_dim not in HEAD_DIMS:
        raise Unsupported("head_dim", head_dim, f"the CUDA backend has {HEAD_DIMS}")
    options = (head_dim, compute, storage, rare)
    narrow = [narrow_kernel(arch, *options, 1)]
    if head_dim <= LONG_ROWS:
        narrow.append(narrow_kernel(arch, *options, 2))
    if variant is not None:
        return (*narrow, wide_kernel(variant))
    tiles = [tile_kernel(arch, *options, m) for m in (1, 2)]
    return (*narrow, *(tiles if tiles[0] != tiles[1] else tiles[:1]))


def planner_shape(
    kernel: Kernel, head_dim: int, storage: DType, multiprocessors: int, largest: bool
) -> TileShape:
    """What the planner must know of a kernel; the largest takes every segment left.

    Costs of a key are seconds of the whole device: bytes at what its multiprocessors could take if
    memory were no limit, or flops at what the kernel reaches.
    """
    narrow, wide = kernel.entry == "attend_narrow", kernel.entry == "attend_wide"
    token_bytes = 2 * head_dim * NUMPY_DTYPES[storage].itemsize
    flops = 4 * head_dim * kernel.rows
    warps = kernel.threads // 32 if narrow else 1
    return TileShape(
        name=kernel.entry,
        rows=kernel.rows,
        most_rows=2**30 if largest else kernel.rows,
        workers=multiprocessors * kernel.blocks * warps,
        granule=kernel.tile_keys,
        persistent=narrow,
        least_run=NARROW_RUN if narrow else 256,
        key_cost=token_bytes / 6.2e12 if narrow else flops / (620e12 if wide else 320e12),
        heads_at_once=2 if wide else 0,  # wide.heads_together, but for hundreds of tiles on one run
        teams=tuple(t for t in range(1, warps + 1) if warps % t == 0),
    )


def rows_spec(head_dim: int, tensor: DType, storage: DType) -> Spec:
    """append_rows, gather_rows and copy_rows between one tensor format and one pool format."""
    return spec("rows", HEAD_DIM=head_dim, TENSOR=FORMATS[tensor], STORE=FORMATS[storage])


@dataclass(frozen=True, slots=True)
class MergeLaunch:
    """How to launch a merge of `units` lists: kernel, block, grid and shares per list."""

    spec: Spec
    threads: int
    grid: int
    split: int


def merge_launch(
    head_dim: int, partials: bool, dtype: DType, units: int, longest: int, multiprocessors: int
) -> MergeLaunch:
    """Long lists are shared by groups of lanes while that leaves no more groups than fit at once.

    Raises Unsupported when there are more lists than a launch can number.
    """
    if units >= 2**31:
        raise Unsupported("lists", units, "at most 2^31 rows times heads in one merge")
    batch = 2 if longest <= 2 else 4
    vector = 1 if head_dim == 0 else 4 if partials or dtype == "fp32" else 8
    if batch == 2 and head_dim:
        vector *= 2  # kUnits of merge.cu
    lanes = min(32, 1 << (max(1, -(-head_dim // vector)) - 1).bit_length()) if head_dim else 32
    few = units * lanes < 2**14 and longest >= 32
    threads = 1024 if few and batch > 2 else 256
    groups, split = threads // lanes, 1
    most = 512 * multiprocessors // lanes
    while split < groups and longest >= 8 * split and units * split < most:
        split *= 2
    grid = -(-units * split // groups)
    return MergeLaunch(merge_spec(head_dim, partials, dtype, batch), threads, grid, split)


@cache
def merge_spec(head_dim: int, partials: bool, dtype: DType, batch: int) -> Spec:
    """merge_states of float partials into `dtype`, or of `dtype` into itself; head_dim 0: any."""
    return spec(
        "merge",
        BATCH=batch,
        HEAD_DIM=head_dim,
        PARTIALS=int(partials),
        TENSOR_IN=FORMATS["fp32" if partials else dtype],
        TENSOR_OUT=FORMATS[dtype],
    )


def service_specs(arch: str, head_dim: int, dtype: DType, page_size: int) -> tuple[Spec, ...]:
    """Everything a service with such a pool launches, ragged attention and merges included."""
    fp8 = dtype.startswith("fp8")
    computes: tuple[DType, ...] = ("fp16", "bf16") if fp8 else (dtype,)
    specs = [visible.SPEC]
    for compute in computes:
        for storage in dict.fromkeys((dtype, compute)):
            for rare in (False, True):
                kernels = attend_kernels(arch, head_dim, compute, storage, rare)
                specs += [kernel.spec for kernel in kernels]
            specs += _wide_specs(arch, head_dim, compute, storage, page_size)
        specs += [merge_spec(head_dim, True, compute, batch) for batch in (2, 4)]
    for tensor in TENSOR_DTYPES:
        specs.append(rows_spec(head_dim, tensor, dtype))
        specs += [merge_spec(dim, False, tensor, b) for dim in (head_dim, 0) for b in (2, 4)]
    return tuple(dict.fromkeys(specs))


def _wide_specs(
    arch: str, head_dim: int, compute: DType, storage: DType, page_size: int
) -> list[Spec]:
    """Hopper's kernels for a pool's pages and for ragged keys, with and without mask and cap."""
    variants = [
        wide_variant(arch, head_dim, compute, storage, size, Scoring(1.0, cap), masked)
        for size in (page_size, 0)
        for cap in (0.0, 1.0)
        for masked in (False, True)
    ]
    return [variant.spec for variant in variants if variant is not None]
