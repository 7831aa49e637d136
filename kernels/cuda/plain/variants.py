"""The kernel without matrix instructions, from Python: shapes that no other kernel takes."""

from __future__ import annotations

from typing import Final

from kernels.backend import DType
from kernels.compile import spec
from kernels.cuda.common.kernel import FORMATS, Kernel

ENTRY: Final = "attend_plain"
ROWS: Final = 8
TILE_KEYS: Final = 32


def plain_kernel(dims: tuple[int, int], latent: bool, compute: DType, storage: DType) -> Kernel:
    """The specialisation for rows of K and of V; any scoring and page size."""
    return Kernel(
        spec=spec(
            "plain/attend_plain",
            HEAD_DIM=dims[0],
            VALUE_DIM=dims[1],
            LATENT=int(latent),
            TENSOR=FORMATS[compute],
            STORE=FORMATS[storage],
        ),
        entry=ENTRY,
        rows=ROWS,
        threads=32 * ROWS,
        shared_bytes=0,
        blocks=2,
        tile_keys=TILE_KEYS,
    )
