"""The launch that expands a step's mask, and the arrays that it needs."""

from __future__ import annotations

from typing import Final

import numpy as np

from kernels.backend import Int32
from kernels.compile import Spec
from kernels.masks import OwnMask

SPEC: Final = Spec("masks/expand", ())
ENTRY: Final = "expand_mask"
THREADS: Final = 256
PADDING: Final = 32
"""Readable bytes that kernels may touch past a mask's last bit."""


def own_rows(mask: OwnMask, order: Int32 | None) -> Int32:
    """`OwnRow` of each plan row, as int32 [n * 4]."""
    first, count, begin = mask.rows(order)
    rows = np.empty((first.size, 2), np.int64)
    rows.view(np.int32)[:, :2] = np.stack([first, count], axis=1)
    rows[:, 1] = begin
    return rows.view(np.int32).reshape(-1)


def row_offsets(mask: OwnMask, num_rows: int) -> Int32:
    """The bit where each plan row's keys begin, int64 [n] as int32 [n * 2]."""
    return (np.arange(num_rows, dtype=np.int64) * (32 * mask.stride)).view(np.int32)
