"""Which specialisations the tile kernel has, and their sizes."""

from __future__ import annotations

from kernels.backend import NUMPY_DTYPES, DType
from kernels.compile import spec
from kernels.cuda.common.kernel import RESERVED, Kernel, definitions, shared_limit


def tile_kernel(
    arch: str, head_dim: int, compute: DType, storage: DType, general: bool, row_tiles: int
) -> Kernel:
    """The block-per-item kernel, of at most 64 * `row_tiles` packed rows, as large as fits."""
    limit = shared_limit(arch)
    # two row tiles a warp where 255 registers hold them, two warps where one tile is too much
    hard = (storage != compute) + general
    roomy = {64: 1, 80: 0, 128: -1 if arch.startswith("sm_10") else 0}.get(head_dim, -1)
    tiles = row_tiles if hard <= roomy else 1
    crowded = head_dim == 256 and general
    crowded |= head_dim == 192 and (hard == 2 or (general and arch == "sm_90a"))
    choices = [(tiles, 4), (1, 4), (1, 2)][2 if crowded else 0 :]
    sizes = [_tile_bytes(head_dim, storage, m, w) for m, w in choices]
    best = next(i for i, size in enumerate(sizes) if size + RESERVED <= limit)
    (m, warps), size = choices[best], sizes[best]
    blocks = 2 if 2 * (size + RESERVED) <= limit else 1
    return Kernel(
        spec=spec(
            "tile/attend_tile",
            **definitions(head_dim, compute, storage),
            GENERAL=int(general),
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


def row_stride(head_dim: int, dtype: DType) -> int:
    """Bytes from one stored row to the next in shared memory: an odd number of 16-byte chunks."""
    return (head_dim * NUMPY_DTYPES[dtype].itemsize // 16 | 1) * 16


def query_stride(head_dim: int) -> int:
    """Bytes from one query row to the next in shared memory."""
    return head_dim * 2 + 16
