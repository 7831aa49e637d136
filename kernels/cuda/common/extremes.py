"""The least, the greatest and the sum of a few hundred numbers, sooner than by numpy's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]


def some(flags: NDArray[np.bool_]) -> bool:
    """Whether any is true, of at least one."""
    found: bool = flags.item(flags.argmax())
    return found


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
