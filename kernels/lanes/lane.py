"""The contract of lanes: a lane executes one session's steps, one layer at a time, as inputs
arrive.

A step is one decode or prefill of a batch through many layers. Its plan and the slots of its new
tokens are known before the first layer's tensors are ready. A lane executes steps in their order,
concurrently with the backend's other work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from kernels.backend import Attend, Int32, Plan, Scoring
from kernels.masks import OwnMask

FLAG_BYTES: Final = 4
LAYER_FLAGS: Final = 2
"""Consecutive flags of a layer: ready, which the caller sets, and done."""


class NoRoom(RuntimeError):
    """The device has no memory for another lane, or the lane limit is reached."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Offsets of a layer's tensors in the arena, in bytes."""

    q: int
    k: int
    v: int
    o: int
    lse: int


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """The work of a step at each of its `layers`, in order; layer l of the pool uses `slots[l %
    n]`.

    q and o are `[rows, num_qo_heads, head_dim]`, k and v `[rows, num_kv_heads, head_dim]`, all of
    `dtype`; lse is `[rows, num_qo_heads]` float32, multiplied by `lse_scale`. k and v are first
    written to the token slots `append_slots`, unless that is None. `scorings` has one entry per
    layer. `sinks` is the offset of float32 `[layers of the pool, num_qo_heads]`, None without
    sinks. `mask` is read once, when the first layer's tensors are there. `flags` is the offset of
    the flags of layer 0 of the pool. Without a `plan` the step only measures the time of passing
    layers back and forth: it multiplies the first number of lse by one. `attend` runs a layer's
    attention in pieces, on lanes in host memory.
    """

    layers: tuple[int, ...]
    slots: tuple[Slot, ...]
    flags: int
    rows: int
    num_qo_heads: int
    dtype: np.dtype[Any]
    append_slots: Int32 | None
    plan: Plan | None
    scorings: tuple[Scoring, ...]
    lse_scale: float
    sinks: int | None = None
    mask: OwnMask | None = None
    attend: Callable[[Attend], Iterator[None]] | None = None

    def sinks_at(self, layer: int) -> int | None:
        """Offset of a layer's sinks."""
        return None if self.sinks is None else self.sinks + 4 * self.num_qo_heads * layer


class Run(Protocol):
    """A step on its lane, until all its layers are done."""

    @property
    def done(self) -> bool:
        """Whether all layers are done; does not wait. Can raise `DeviceLost`."""
        ...

    def layer(self, layer: int) -> None:
        """Report that a layer's tensors are ready, for lanes without flags.

        Raises `ValueError` out of turn.
        """
        ...

    @property
    def has_ready(self) -> bool:
        """Whether `advance` has layers to run."""
        ...

    def advance(self) -> int | None:
        """Run a piece of the first layer that was reported ready; returns the layer at its end."""
        ...

    def release(self) -> None:
        """Execute the waiting layers with whatever their tensors contain; can be repeated."""
        ...


class Lane(Protocol):
    """The lane of one session; used by the backend's thread only."""

    @property
    def arena_bytes(self) -> int: ...

    @property
    def access(self) -> dict[str, Any]:
        """The data that the caller needs to access the arena."""
        ...

    def begin(self, work: StepWork) -> Run:
        """Start a step after those on the lane; it waits there for its caller.

        Raises `Unsupported` without having started anything.
        """
        ...

    def unblock_caller(self) -> None:
        """Set every flag that the caller of an aborted step may wait for; call it repeatedly."""
        ...

    def clear(self) -> None:
        """Reset all flags. The lane must be empty at both ends."""
        ...


class Lanes(Protocol):
    """The lanes of one backend. `deep`: maximum steps on a lane at a time."""

    @property
    def deep(self) -> int: ...

    @property
    def polled(self) -> bool:
        """Whether progress of a step can only be polled, because its caller sets device flags."""
        ...

    def open(self, arena: memoryview, arena_bytes: int, owner: Owner) -> Lane:
        """A lane for `owner`, with at least `arena_bytes`; raises `NoRoom`.

        `arena` is the session's host memory, for lanes without device memory.
        """
        ...

    def close(self, lane: Lane) -> None:
        """Close a lane on which nothing runs."""
        ...

    def unpin(self, memory: memoryview) -> None:
        """`Backend.unregister` for host memory, without waiting for open steps."""
        ...

    def arena_at(self, address: int) -> object:
        """Keeps the device memory of an arena in this process, whose caller has its address."""
        ...

    def end(self) -> None:
        """Bring every open step to its end, whatever its tensors contain."""
        ...


def address_of(memory: memoryview) -> int:
    """The address of host memory."""
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)


@dataclass(frozen=True, slots=True)
class Owner:
    """A caller's process, with its namespace and user.

    `started` distinguishes the process from a later one with the same pid; empty if the process is
    not visible, for example in another PID namespace.
    """

    pid: int
    started: str = ""
    namespace: str = ""
    uid: int | None = None

    @classmethod
    def of(cls, pid: int, namespace: str = "", uid: int | None = None) -> Owner:
        return cls(pid, process_start(pid), namespace, uid)

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended, and so has no memory mapped."""
        return self.started != "" and process_start(self.pid) != self.started

    def may_follow(self, other: Owner) -> bool:
        """Whether this owner can get memory that `other` had mapped.

        Both must have the same namespace and user, and `other` must be the same process or have
        ended. A process that is not visible may still have the memory mapped.
        """
        if (self.namespace, self.uid) != (other.namespace, other.uid):
            return False
        same = (self.pid, self.started) == (other.pid, other.started)
        return other.has_ended or (same and self.started != "")


def process_start(pid: int) -> str:
    """Start time of a process in the kernel's ticks; empty if it has ended or is unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    fields = stat[stat.rindex(")") + 2 :].split()
    return "" if fields[0] in "ZX" else fields[19]
