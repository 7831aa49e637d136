"""Launches of one batch: what stays the same from call to call is laid out once, the rest patched.

A step is one kernel launch. Its argument struct lives as long as the plan; a call writes the few
addresses that changed and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

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


_MASK: Final = ("mask_bits", "mask_row_offsets")
_PARTIALS: Final = ("partial_o", "partial_lse")
_write_tensors: Final = writer(ATTEND_PARAMS, "q", "o", "lse", "k", "v")
_write_scratch: Final = writer(ATTEND_PARAMS, *_MASK, *_PARTIALS)
_write_states: Final = writer(MERGE_PARAMS, "o_in", "lse_in", "o", "lse")
_write_table_mask: Final = writer(VISIBLE_PARAMS, *_MASK)
_wide_writer: Final = partial(writer, WIDE_PARAMS, base=wide.PARAMS_AT)
_write_wide_rows: Final = _wide_writer("q", "o", "lse")
_write_wide_mask: Final = _wide_writer(*_MASK)
_write_wide_partials: Final = _wide_writer(*_PARTIALS)
_write_wide_heads: Final = _wide_writer("head_blocks", "head_groups")
_stored_writer: Final = partial(writer, WIDE_PARAMS, base=STORED_KV.itemsize)
_write_stored: Final = writer(STORED_KV, "k", "v")
_write_stored_rows: Final = _stored_writer("q", "o", "lse")
_write_stored_mask: Final = _stored_writer(*_MASK)
_write_stored_partials: Final = _stored_writer(*_PARTIALS)


class Step(Protocol):
    @property
    def signature(self) -> tuple[object, ...]:
        """As `Launcher.signature`."""
        ...

    def launch(self, call: CallAddresses) -> None:
        """Enqueue on CuPy's current stream."""
        ...


class MmaStep:
    """attend_narrow or attend_tile, launched with `AttendParams`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @property
    def signature(self) -> tuple[object, ...]:
        return self._launcher.signature

    def launch(self, call: CallAddresses) -> None:
        launcher = self._launcher
        _write_tensors(launcher.memory, *call[1:6])
        _write_scratch(launcher.memory, *call[6:])
        launcher()


class WideStep:
    """attend_wide; `maps` gives the tensor maps of a layer, or of all layers for None."""

    def __init__(self, launcher: Launcher, maps: Callable[[int | None], TensorMaps]) -> None:
        self._launcher, self._maps = launcher, maps

    @property
    def signature(self) -> tuple[object, ...]:
        return self._launcher.signature

    def launch(self, call: CallAddresses) -> None:
        launcher, maps = self._launcher, self._maps(call.layer)
        launcher.memory[: wide.PARAMS_AT] = maps.packed
        _write_wide_heads(launcher.memory, maps.head_blocks, maps.head_groups)
        _write_wide_rows(launcher.memory, call.q, call.o, call.lse)
        _write_wide_mask(launcher.memory, call.mask_bits, call.mask_row_offsets)
        _write_wide_partials(launcher.memory, call.partial_o, call.partial_lse)
        launcher()


class StoredWideStep:
    """attend_wide over an fp8 pool, where it finds K and V by their addresses."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @property
    def signature(self) -> tuple[object, ...]:
        return self._launcher.signature

    def launch(self, call: CallAddresses) -> None:
        launcher = self._launcher
        _write_stored(launcher.memory, call.k, call.v)
        _write_stored_rows(launcher.memory, call.q, call.o, call.lse)
        _write_stored_mask(launcher.memory, call.mask_bits, call.mask_row_offsets)
        _write_stored_partials(launcher.memory, call.partial_o, call.partial_lse)
        launcher()


class VisibleStep:
    """find_visible for one launch's items: it fills the table at `address`, of `words` an item."""

    def __init__(self, launcher: Launcher, memory: Any, words: int) -> None:
        """`launcher` takes `VISIBLE_PARAMS`; `memory` is the table's."""
        self._launcher, self._memory = launcher, memory
        self.address: int = memory.ptr
        self.words = words

    @property
    def signature(self) -> tuple[object, ...]:
        return self._launcher.signature

    def launch(self, call: CallAddresses) -> None:
        launcher = self._launcher
        _write_table_mask(launcher.memory, call.mask_bits, call.mask_row_offsets)
        launcher()


class MergeStep:
    """merge_states over the partial rows, launched with `MergeParams`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @property
    def signature(self) -> tuple[object, ...]:
        return self._launcher.signature

    def launch(self, call: CallAddresses) -> None:
        launcher = self._launcher
        _write_states(launcher.memory, call.partial_o, call.partial_lse, call.o, call.lse)
        launcher()


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """A batch's plan on the device. `plans` are kept so that their identity stays theirs.

    `beside` steps run beside `steps`, on another stream; `merge` comes after all of them. Without
    one, the wide kernel follows the narrow one: it begins when all of that has, and ends after it.
    """

    plans: tuple[Plan, ...]
    buffer: Any
    steps: tuple[Step, ...]
    beside: tuple[Step, ...]
    merge: MergeStep | None
    num_rows: int
    partial_rows: int

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for plans whose launches are the same to the byte, if their tensors are."""
        apart = tuple(step.signature for step in self.beside)
        merge = None if self.merge is None else self.merge.signature
        return (tuple(step.signature for step in self.steps), apart, merge, self.partial_rows)
