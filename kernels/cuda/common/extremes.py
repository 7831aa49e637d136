"""The least, the greatest and the sum of a few hundred numbers, faster than numpy's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]


def least(values: Ints) -> int:
    found: int = values.item(values.argmin())
    return found


def total(values: Ints) -> int:
    """By numpy's `accumulate`, which planning uses anyway: `reduce` would be cold in the caches."""
    found: int = np.add.accumulate(values).item(-1)
    return found


def greatest(values: Ints) -> int:
    found: int = values.item(values.argmax())
    return found
