"""Which key tiles of each work item a custom mask leaves something of, found on the device.

Masked batches run one small kernel (visible.cu) before each kernel of many query rows, which then
skips the tiles that none of its rows sees. Masks come with the call, so this runs at every call.
"""

from __future__ import annotations

from typing import Final

from kernels.backend import Int32
from kernels.compile import Spec
from kernels.cuda.plan.tiles import KEYS

SPEC: Final = Spec("visible/visible", ())
ENTRY: Final = "find_visible"
THREADS: Final = 1024
TILES: Final = 32
"""Key tiles per element of a table, and per block."""
ELEMENT_BYTES: Final = 8


def table_words(items: Int32, tile_keys: int) -> int:
    """Elements per item of the table for `items` [n, 8]: enough for the longest run."""
    most = int(items[:, KEYS].max(initial=1))
    return max(1, -(-most // (tile_keys * TILES)))
