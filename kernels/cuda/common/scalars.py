"""Numbers that plans are made with, as arrays: numpy takes a Python number almost 1 us later."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray


@cache
def int32(value: int) -> NDArray[np.int32]:
    """For 32-bit operands. Kept for ever: not for what differs from plan to plan."""
    made = np.array(value, np.int32)
    made.flags.writeable = False
    return made


@cache
def int64(value: int) -> NDArray[np.int64]:
    """For 64-bit operands, likewise."""
    made = np.array(value, np.int64)
    made.flags.writeable = False
    return made
