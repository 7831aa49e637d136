"""Which specialisations the narrow kernel has, and their sizes."""

from __future__ import annotations

from typing import Final

from kernels.backend import NUMPY_DTYPES, DType
from kernels.compile import spec
from kernels.cuda.common.kernel import RESERVED, Kernel, definitions, shared_limit

NARROW_BLOCKS: Final = {1: ((12, 1), (8, 1), (4, 1)), 2: ((8, 1), (6, 1), (4, 1))}
"""Warps of a narrow block and blocks a multiprocessor, the first that fits, by tiles of 8 rows."""
SHORT_WARPS: Final = 8
"""Warps of a block in short decodes: measured on a H200."""
LONG_ROWS: Final = 128
"""Above this head_dim the narrow kernel has registers for 8 rows and 8 warps only."""
NARROW_RUN: Final = 128
"""Keys under which another narrow worker is not worth its partial state."""
NARROW_TILE: Final = 16
LINE_BYTES: Final = 128
"""What rows of K and V are read in, if they are whole lines."""


def halves(head_dim: int, storage: DType, general: bool) -> bool:
    """Whether a token of K has two columns, for 8 rows and fewer: `kHalves` of loads.cuh."""
    row = head_dim * NUMPY_DTYPES[storage].itemsize
    if row % LINE_BYTES or (general and row == LINE_BYTES):
        return False
    return not (storage.startswith("fp8") and row > LINE_BYTES)


def parts_of(head_dim: int, storage: DType, rows: int) -> int:
    """Into how many parts the columns for 8 rows are cut, for at most `rows` rows: `PARTS`.

    Scoring is not general.
    """
    if rows > 4 or not halves(head_dim, storage, False):
        return 1
    return 4 if rows <= 2 else 2


def narrow_kernel(
    arch: str,
    head_dim: int,
    compute: DType,
    storage: DType,
    general: bool,
    row_tiles: int,
    parts: int = 1,
    heads_first: bool = False,
    warps: int = 0,
) -> Kernel:
    """The kernel of teams of warps for 8 * `row_tiles` packed rows, or of 8 the `parts`-th part.

    `heads_first`: all items of one kv head come before the next head's, and bytes read may stay
    in the L1 cache. `warps`: per block; 0: the maximum.
    """
    limit = shared_limit(arch)
    rows = 8 * row_tiles // parts
    # kQueryBytes of team.cuh
    queries = head_dim * (16 if row_tiles == 1 and halves(head_dim, storage, general) else 32)
    # kWarpBytes of team.cuh: queries, a row tile's states, maxima and sums, row numbers and sinks
    own = queries + 8 * (head_dim + 4) * 4 + 64 + 2 * -(rows * 4 // -16) * 16
    # 168 registers hold neither long rows, nor 128 dims of what is general or has to be converted;
    # for sm_100 and later the compiler takes a few more than there are
    hard = head_dim == LONG_ROWS and (general or storage != compute)
    hard = hard or arch.startswith("sm_1")
    choices: tuple[tuple[int, int], ...] = ((warps, 1),)
    if not warps:
        choices = NARROW_BLOCKS[2 if hard or head_dim > LONG_ROWS else row_tiles]
    warps, blocks = next(c for c in choices if c[1] * (c[0] * own + RESERVED) <= limit)
    return Kernel(
        spec=spec(
            "narrow/attend_narrow",
            **definitions(head_dim, compute, storage),
            GENERAL=int(general),
            ROW_TILES=row_tiles,
            PARTS=parts,
            HEADS_FIRST=int(heads_first),
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


def short_decode_kernels(
    arch: str, head_dim: int, compute: DType, storage: DType
) -> dict[tuple[int, bool], Kernel]:
    """`few_rows_kernels` for short decodes, where they are other ones: blocks that begin sooner."""
    if arch != "sm_90a" or head_dim != LONG_ROWS or storage != compute:
        return {}
    return few_rows_kernels(arch, head_dim, compute, storage, SHORT_WARPS)


def few_rows_kernels(
    arch: str, head_dim: int, compute: DType, storage: DType, warps: int = 0
) -> dict[tuple[int, bool], Kernel]:
    """The kernels for at most 8 rows, by their most rows and `heads_first`.

    Scoring is plain.
    """
    options = (arch, head_dim, compute, storage, False, 1)
    made = {
        (parts, heads_first): narrow_kernel(*options, parts, heads_first, warps)
        for parts in {parts_of(head_dim, storage, rows) for rows in (2, 4, 8)}
        for heads_first in (False, True)
    }
    return {
        (rows, heads_first): made[parts_of(head_dim, storage, rows), heads_first]
        for rows in range(1, 9)
        for heads_first in (False, True)
    }
