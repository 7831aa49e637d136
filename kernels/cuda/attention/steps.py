"""Launches of one batch: what stays the same from call to call is laid out once, the rest patched.

A step is one kernel launch. Its argument struct lives as long as the plan; a call writes the few
addresses that changed and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kernels.backend import Plan
from kernels.cuda.common.structs import (
    ATTEND_PARAMS,
    MERGE_PARAMS,
    STORED_KV,
    VISIBLE_PARAMS,
    WIDE_PARAMS,
    writer,
)
from kernels.cuda.device.launch import Launcher
from kernels.cuda.kv.tensor_maps import TensorMaps
from kernels.cuda.wide import variants as wide


class CallAddresses(NamedTuple):
    """Device addresses of one call; `layer` is that of all requests, or None: items name theirs.

    `new_k` and `new_v` are of each row's last key, which is stored first, or 0.
    """

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
    partial_sum: int = 0
    sinks: int = 0
    sinks_of_rows: int = 0
    new_k: int = 0
    new_v: int = 0


_MASK: Final = ("mask_bits", "mask_row_offsets")
_PARTIALS: Final = ("partial_o", "partial_lse")
_SINKS: Final = ("sinks", "sinks_of_rows")
_WIDE: Final = ("q", "o", "lse", *_MASK, *_PARTIALS, "partial_sum", *_SINKS)
_ATTEND: Final = ("q", "o", "lse", "k", "v", "new_k", "new_v", *_MASK, *_PARTIALS, *_SINKS)
_write_attend: Final = writer(ATTEND_PARAMS, *_ATTEND)
_write_states: Final = writer(MERGE_PARAMS, "o_in", "lse_in", "sum_in", "o", "lse", *_SINKS)
_write_table_mask: Final = writer(VISIBLE_PARAMS, *_MASK)
_write_wide: Final = writer(WIDE_PARAMS, *_WIDE, "head_blocks", "head_groups", base=wide.PARAMS_AT)
_write_stored: Final = writer(STORED_KV, "k", "v")
_write_stored_wide: Final = writer(WIDE_PARAMS, *_WIDE, base=STORED_KV.itemsize)


Write = Callable[[bytearray, CallAddresses], None]
"""Writes a call's addresses into a launch's memory."""


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a plan
class Step:
    """A kernel's launch, and what writes a call's addresses into it."""

    launcher: Launcher
    write: Write

    @property
    def signature(self) -> tuple[object, ...]:
        """As `Launcher.signature`."""
        return self.launcher.signature

    def launch(self, call: CallAddresses) -> None:
        """Enqueue on CuPy's current stream."""
        launcher = self.launcher
        self.write(launcher.memory, call)
        launcher()


def write_attend(memory: bytearray, call: CallAddresses) -> None:
    """Into `AttendParams`, of attend_narrow or attend_tile."""
    _write_attend(memory, *call[1:6], *call[13:], *call[6:10], *call[11:13])


def write_wide(maps: Callable[[int | None], TensorMaps]) -> Write:
    """Into attend_wide's; `maps` gives the tensor maps of a layer, or of all layers for None."""

    def write(memory: bytearray, call: CallAddresses) -> None:
        found = maps(call.layer)
        memory[: wide.PARAMS_AT] = found.packed
        _write_wide(memory, *call[1:4], *call[6:13], found.head_blocks, found.head_groups)

    return write


def write_stored_wide(memory: bytearray, call: CallAddresses) -> None:
    """Into attend_wide's where it finds K and V by their addresses."""
    _write_stored(memory, call.k, call.v)
    _write_stored_wide(memory, *call[1:4], *call[6:13])


def write_visible(memory: bytearray, call: CallAddresses) -> None:
    """Into `VisibleParams`, of find_visible."""
    _write_table_mask(memory, call.mask_bits, call.mask_row_offsets)


def write_merge(memory: bytearray, call: CallAddresses) -> None:
    """Into `MergeParams`, of merge_states over the partial rows."""
    _write_states(memory, *call[8:11], call.o, call.lse, *call[11:13])


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a plan
class DevicePlan:
    """A batch's plan on the device. `plans` are kept so that their identity stays theirs.

    `beside` steps run beside `steps`, on another stream; `merge` comes after all of them. Without
    one, the wide kernel follows the narrow one: it begins when all of that has, and ends after it.
    `sums`: partial states may be running ones, with the sums of their weights. `appends`: it can
    store the last key of each row of q, of a sequence of its own.
    """

    plans: tuple[Plan, ...]
    buffer: Any
    steps: tuple[Step, ...]
    beside: tuple[Step, ...]
    merge: Step | None
    num_rows: int
    partial_rows: int
    sums: bool = False
    appends: bool = False

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for plans whose launches are the same to the byte, if their tensors are."""
        apart = tuple(step.signature for step in self.beside)
        merge = None if self.merge is None else self.merge.signature
        return (tuple(step.signature for step in self.steps), apart, merge, self.partial_rows)
