"""Which kernels the tests compile: some of them, or all with KERNELS=all in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def chosen(kernels: Iterable[T], each: int = 5) -> list[T]:
    """Every fifth, or every `each`-th."""
    every = list(kernels)
    return every if os.environ.get("KERNELS") == "all" else every[::each]
