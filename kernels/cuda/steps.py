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

from kernels.cuda.launch import ATTEND_PARAMS, MERGE_PARAMS
from kernels.cuda.wide import ARGUMENTS, TensorMaps


@dataclass(frozen=True, slots=True)
class Call:
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


class Step(Protocol):
    def launch(self, call: Call) -> None:
        """Enqueue on CuPy's current stream."""
        ...


def words(block: NDArray[Any]) -> NDArray[np.uint64]:
    """The struct as 64-bit words: its pointers come first."""
    return block.view(np.uint64)


def positions(dtype: np.dtype[Any], names: tuple[str, ...]) -> list[int]:
    """Which 64-bit words of a struct the named pointers are."""
    fields: Any = dtype.fields
    return [fields[name][1] // 8 for name in names]


_CALL = ("q", "o", "lse", "mask_bits", "mask_row_offsets", "partial_o", "partial_lse")
_ATTEND_WORDS = positions(ATTEND_PARAMS, (*_CALL, "k", "v"))
_WIDE_WORDS = positions(ARGUMENTS, _CALL)
_MERGE_WORDS = positions(MERGE_PARAMS, ("o_in", "lse_in", "o", "lse"))


class MmaStep:
    """attend_narrow or attend_tile."""

    def __init__(
        self, function: Any, grid: int, threads: int, shared_bytes: int, block: NDArray[Any]
    ) -> None:
        self._function, self._grid, self._threads = function, (grid,), (threads,)
        self._shared_bytes, self._arguments, self._words = shared_bytes, (block,), words(block)

    def launch(self, call: Call) -> None:
        self._words[_ATTEND_WORDS] = (
            call.q,
            call.o,
            call.lse,
            call.mask_bits,
            call.mask_row_offsets,
            call.partial_o,
            call.partial_lse,
            call.k,
            call.v,
        )
        self._function(self._grid, self._threads, self._arguments, shared_mem=self._shared_bytes)


class WideStep:
    """attend_wide; `maps` gives the tensor maps of a layer, or of all layers for None."""

    def __init__(
        self,
        launch: Callable[[TensorMaps, NDArray[Any]], None],
        block: NDArray[Any],
        maps: Callable[[int | None], TensorMaps],
    ) -> None:
        self._launch, self._block, self._words, self._maps = launch, block, words(block), maps

    def launch(self, call: Call) -> None:
        self._words[_WIDE_WORDS] = (
            call.q,
            call.o,
            call.lse,
            call.mask_bits,
            call.mask_row_offsets,
            call.partial_o,
            call.partial_lse,
        )
        self._launch(self._maps(call.layer), self._block)


class MergeStep:
    """merge_states over the partial rows."""

    def __init__(self, function: Any, grid: int, threads: int, block: NDArray[Any]) -> None:
        self._function, self._grid, self._threads = function, (grid,), (threads,)
        self._arguments, self._words = (block,), words(block)

    def launch(self, call: Call) -> None:
        self._words[_MERGE_WORDS] = (call.partial_o, call.partial_lse, call.o, call.lse)
        self._function(self._grid, self._threads, self._arguments)
