"""Launches of one batch: what stays the same from call to call is laid out once, the rest patched.

A step is one kernel launch. Its argument struct is a numpy array that lives as long as the plan;
a call writes the few addresses that changed and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.cuda.wide import TensorMaps


@dataclass(frozen=True, slots=True)
class Call:
    """Device addresses of one call; `layer` is that of all requests, or None: items name theirs."""

    layer: int | None
    k: int
    v: int
    common: tuple[int, int, int, int, int, int, int]  # as _CALL below


class Step(Protocol):
    def launch(self, call: Call) -> None:
        """Enqueue on CuPy's current stream."""
        ...


def slots(block: NDArray[Any], names: tuple[str, ...]) -> tuple[NDArray[np.uint64], ...]:
    """One-element views of the named pointers of a struct: the cheapest thing to write to."""
    return tuple(block[name] for name in names)


_CALL = ("q", "o", "lse", "mask_bits", "mask_row_offsets", "partial_o", "partial_lse")


class MmaStep:
    """attend_narrow or attend_tile."""

    def __init__(
        self, function: Any, grid: int, threads: int, shared_bytes: int, block: NDArray[Any]
    ) -> None:
        self._function, self._grid, self._threads = function, (grid,), (threads,)
        self._shared_bytes, self._arguments = shared_bytes, (block,)
        self._slots = slots(block, (*_CALL, "k", "v"))

    def launch(self, call: Call) -> None:
        for slot, value in zip(self._slots, (*call.common, call.k, call.v), strict=True):
            slot[0] = value
        self._function(self._grid, self._threads, self._arguments, shared_mem=self._shared_bytes)


class WideStep:
    """attend_wide; `maps` gives the tensor maps of a layer, or of all layers for None."""

    def __init__(
        self,
        launch: Callable[[TensorMaps, NDArray[Any]], None],
        block: NDArray[Any],
        maps: Callable[[int | None], TensorMaps],
    ) -> None:
        self._launch, self._block, self._maps = launch, block, maps
        self._slots = slots(block, _CALL)

    def launch(self, call: Call) -> None:
        for slot, value in zip(self._slots, call.common, strict=True):
            slot[0] = value
        self._launch(self._maps(call.layer), self._block)


class MergeStep:
    """merge_states over the partial rows."""

    def __init__(self, function: Any, grid: int, threads: int, block: NDArray[Any]) -> None:
        self._function, self._grid, self._threads = function, (grid,), (threads,)
        self._arguments = (block,)
        self._slots = slots(block, ("o_in", "lse_in", "o", "lse"))

    def launch(self, call: Call) -> None:
        _, o, lse, _, _, partial_o, partial_lse = call.common
        for slot, value in zip(self._slots, (partial_o, partial_lse, o, lse), strict=True):
            slot[0] = value
        self._function(self._grid, self._threads, self._arguments)
