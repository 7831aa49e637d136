"""Launches of one batch: what stays the same from call to call is laid out once, the rest patched.

A step is one kernel launch. Its argument struct is a numpy array that lives as long as the plan;
a call writes the few addresses that changed and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.cuda.launch import ATTEND_PARAMS, Launcher
from kernels.cuda.wide import TensorMaps


class Call(NamedTuple):
    """Device addresses of one call; `layer` is that of all requests, or None: items name theirs."""

    layer: int | None
    q: int
    o: int
    lse: int
    k: int
    v: int
    mask_bits: int
    mask_row_offsets: int
    partial_o: int
    partial_lse: int


TENSORS: Final = Call._fields[1:6]
"""Fields of a call, and the first fields of `AttendParams`, in this order."""
SCRATCH: Final = Call._fields[6:]
"""The others, which stand together in `AttendParams` too."""
_WRITE_TENSORS: Final = Struct("5Q").pack_into
_WRITE_FOUR: Final = Struct("4Q").pack_into
_SCRATCH_AT: Final = ATTEND_PARAMS.fields[SCRATCH[0]][1] if ATTEND_PARAMS.fields else 0


class Step(Protocol):
    def launch(self, call: Call) -> None:
        """Enqueue on CuPy's current stream."""
        ...


class MmaStep:
    """attend_narrow or attend_tile; `block` is an `ATTEND_PARAMS`."""

    def __init__(
        self, function: Any, grid: int, threads: int, shared_bytes: int, block: NDArray[Any]
    ) -> None:
        self._launch = Launcher(function, grid, threads, shared_bytes, (block,))
        self._bytes = block.view(np.uint8).data

    def launch(self, call: Call) -> None:
        _WRITE_TENSORS(self._bytes, 0, *call[1:6])
        _WRITE_FOUR(self._bytes, _SCRATCH_AT, *call[6:])
        self._launch()


class WideStep:
    """attend_wide; `maps` gives the tensor maps of a layer, or of all layers for None."""

    def __init__(
        self,
        launch: Callable[[TensorMaps, NDArray[Any]], None],
        block: NDArray[Any],
        maps: Callable[[int | None], TensorMaps],
    ) -> None:
        self._launch, self._block, self._maps = launch, block, maps
        self._slots = tuple(block[name] for name in ("q", "o", "lse", *SCRATCH))

    def launch(self, call: Call) -> None:
        for slot, value in zip(self._slots, (*call[1:4], *call[6:]), strict=True):
            slot[0] = value
        self._launch(self._maps(call.layer), self._block)


class MergeStep:
    """merge_states over the partial rows; `block` is a `MERGE_PARAMS`."""

    def __init__(self, function: Any, grid: int, threads: int, block: NDArray[Any]) -> None:
        self._launch = Launcher(function, grid, threads, 0, (block,))
        self._bytes = block.view(np.uint8).data

    def launch(self, call: Call) -> None:
        _WRITE_FOUR(self._bytes, 0, call.partial_o, call.partial_lse, call.o, call.lse)
        self._launch()
