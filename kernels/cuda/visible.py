"""Which key tiles of each work item a custom mask leaves something of, found on the device.

Masked batches run one small kernel (visible.cu) before each kernel of many query rows, which then
skips the tiles that none of its rows sees. Masks come with the call, so this runs at every call.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Int32
from kernels.compile import Spec

SPEC: Final = Spec("visible", ())
ENTRY: Final = "find_visible"
THREADS: Final = 1024
TILES: Final = 32
"""Key tiles per element of a table, and per block."""
ELEMENT_BYTES: Final = 8
_NUM_KEYS: Final = 4  # of WorkItem

PARAMS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("items", "positions")),
        *((name, np.uint64) for name in ("mask_bits", "mask_row_offsets", "tiles")),
        *((name, np.int32) for name in ("words", "tile_keys", "group_size", "window_left")),
    ],
    align=True,
)
"""`VisibleParams` of visible.cu, field by field."""

TABLE: Final = np.dtype([("tiles", np.uint64), ("words", np.int32)], align=True)
"""`VisibleTable` of visible.cuh."""


def table_words(items: Int32, tile_keys: int) -> int:
    """Elements per item of the table for `items` [n, 8]: enough for the longest run."""
    most = int(items[:, _NUM_KEYS].max(initial=1))
    return max(1, -(-most // (tile_keys * TILES)))


def table_bytes(items: Int32, tile_keys: int) -> int:
    """Device memory that the table of `items` takes."""
    return len(items) * table_words(items, tile_keys) * ELEMENT_BYTES


def table(address: int, words: int) -> NDArray[Any]:
    """The table as the kernels take it, by value; address 0: there is no mask."""
    made = np.zeros(1, TABLE)
    made["tiles"], made["words"] = address, words
    return made


def block(**fields: int) -> NDArray[Any]:
    """One element of `PARAMS`: device addresses and numbers."""
    made = np.zeros(1, PARAMS)
    for name, value in fields.items():
        made[name] = value
    return made


def launch(function: Any, block: NDArray[Any], num_items: int) -> None:
    """Enqueue on CuPy's current stream; `block` is one element of `PARAMS`."""
    function((num_items * int(block["words"][0]),), (THREADS,), (block,))
