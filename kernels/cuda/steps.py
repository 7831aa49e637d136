"""Launches of one batch: what stays the same from call to call is laid out once, the rest patched.

A step is one kernel launch. Its argument struct lives as long as the plan; a call writes the few
addresses that changed and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from numpy.typing import NDArray

from kernels.cuda import visible
from kernels.cuda.launch import ATTEND_PARAMS, MERGE_PARAMS, Launcher, writer
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


_SCRATCH: Final = Call._fields[6:]
_write_tensors: Final = writer(ATTEND_PARAMS, *Call._fields[1:6])
_write_scratch: Final = writer(ATTEND_PARAMS, *_SCRATCH)
_write_states: Final = writer(MERGE_PARAMS, "o_in", "lse_in", "o", "lse")


class Step(Protocol):
    def launch(self, call: Call) -> None:
        """Enqueue on CuPy's current stream."""
        ...


class MmaStep:
    """attend_narrow or attend_tile, launched with `AttendParams`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def launch(self, call: Call) -> None:
        launcher = self._launcher
        _write_tensors(launcher.memory, *call[1:6])
        _write_scratch(launcher.memory, *call[6:])
        launcher()


class WideStep:
    """attend_wide; `maps` gives the tensor maps of a layer, or of all layers for None."""

    def __init__(
        self,
        launch: Callable[[TensorMaps, NDArray[Any]], None],
        block: NDArray[Any],
        maps: Callable[[int | None], TensorMaps],
    ) -> None:
        self._launch, self._block, self._maps = launch, block, maps
        self._slots = tuple(block[name] for name in ("q", "o", "lse", *_SCRATCH))

    def launch(self, call: Call) -> None:
        for slot, value in zip(self._slots, (*call[1:4], *call[6:]), strict=True):
            slot[0] = value
        self._launch(self._maps(call.layer), self._block)


class VisibleStep:
    """find_visible for one launch's items: the table is where `address` and `words` say."""

    def __init__(self, function: Any, block: NDArray[Any], num_items: int, memory: Any) -> None:
        """`block` is one element of `visible.PARAMS`, but for the mask; `memory` is the table's."""
        self._function, self._block, self._num_items = function, block, num_items
        self._memory = memory  # kept alive
        self.address, self.words = int(block["tiles"][0]), int(block["words"][0])

    def launch(self, call: Call) -> None:
        self._block["mask_bits"] = call.mask_bits
        self._block["mask_row_offsets"] = call.mask_row_offsets
        visible.launch(self._function, self._block, self._num_items)


class MergeStep:
    """merge_states over the partial rows, launched with `MergeParams`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def launch(self, call: Call) -> None:
        launcher = self._launcher
        _write_states(launcher.memory, call.partial_o, call.partial_lse, call.o, call.lse)
        launcher()
