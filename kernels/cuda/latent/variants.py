"""The Hopper kernel for latent pools, from Python: conditions and specialisations.

It takes work items of at most `ROWS` packed rows of the pool's one kv head, any number of keys, and
a launch's memory as the wide kernel does: two tensor maps (of the halves of a row), then
`WideParams`. Bits of a mask need 32 readable bytes after the last; there is no table of visible
tiles.
"""

from __future__ import annotations

from typing import Final

from kernels.backend import DType
from kernels.compile import spec
from kernels.cuda.common.kernel import Kernel

ENTRY: Final = "attend_latent"
HEAD_DIM: Final = 576
V_HEAD_DIM: Final = 512
"""Values of a row, and those of them that are the value: other rows are the plain kernel's."""
ROWS: Final = 64
PAIR_KEYS: Final = 128
THREADS: Final = 384
PAGE_SIZES: Final = (8, 16, 32, 64)
_QUERIES: Final = 9 * ROWS * 128
_TILES: Final = PAIR_KEYS * HEAD_DIM * 2
_WEIGHTS: Final = ROWS * 128
_ROWS_AND_UNITS: Final = ROWS * 4 * 3 + 16 + 12 * 8 + 2 * 32


def supports(
    arch: str, dims: tuple[int, int], q_dtype: DType, kv_dtype: DType, page: int, sm_scale: float
) -> bool:
    """Whether this kernel runs work on a latent pool; all other is the plain kernel's."""
    fits = dims == (HEAD_DIM, V_HEAD_DIM) and page in PAGE_SIZES
    return arch == "sm_90a" and fits and q_dtype == kv_dtype and sm_scale > 0.0


def latent_kernel(dtype: DType, page_size: int, has_mask: bool, has_soft_cap: bool) -> Kernel:
    """The specialisation for supported work."""
    return Kernel(
        spec=spec(
            "latent/attend_latent",
            BF16=int(dtype == "bf16"),
            PAGE_SIZE=page_size,
            HAS_MASK=int(has_mask),
            HAS_SOFT_CAP=int(has_soft_cap),
        ),
        entry=ENTRY,
        rows=ROWS,
        threads=THREADS,
        shared_bytes=shared_bytes(has_mask),
        blocks=1,
        tile_keys=PAIR_KEYS,
    )


def shared_bytes(has_mask: bool) -> int:
    """Dynamic shared memory: `kSharedBytes` of shared.cuh."""
    return _QUERIES + _TILES + _WEIGHTS + _ROWS_AND_UNITS + ROWS * (16 if has_mask else 8)
