"""The contract of lanes: where a session's steps run, layer by layer, as their tensors get ready.

A step is one decode or prefill of a batch through many layers. Its plan and the slots of its new
tokens are known before the first layer's tensors are there. A lane runs them in its own order,
beside everything else that the backend does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from kernels.backend import Int32, Plan, Scoring

FLAG_BYTES: Final = 4
LAYER_FLAGS: Final = 2
"""Flags of a layer, one behind the other: ready, which the caller sets, and done."""


class NoRoom(RuntimeError):
    """The device has no memory for another lane, or as many are open as may be."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a layer's tensors lie: bytes from the beginning of the arena."""

    q: int
    k: int
    v: int
    o: int
    lse: int


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """What a step does at each of its `layers`, in order; layer l of the pool uses `slots[l % n]`.

    q and o are `[rows, num_qo_heads, head_dim]` of `dtype`, k and v `[rows, num_kv_heads,
    head_dim]` of it, lse `[rows, num_qo_heads]` float32, times `lse_scale`. k and v go to the token
    slots `append_slots` first, unless that is None. `scorings` has one for each layer. `flags` is
    where the flags of layer 0 of the pool lie. Without a `plan` the layers are only handed
    over, to measure that: all that is done is to multiply the first number of lse by one.
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


class Run(Protocol):
    """A step on its lane, from its beginning until every layer has been gone through."""

    @property
    def done(self) -> bool:
        """Known without waiting. May raise `DeviceLost`."""
        ...

    def layer(self, layer: int) -> None:
        """The layer's tensors are ready: for lanes whose caller says so in words, not by flags.

        Raises `ValueError` out of turn.
        """
        ...

    def release(self) -> None:
        """Let the layers that wait go through, whatever is in their tensors; may be repeated."""
        ...


class Lane(Protocol):
    """One session's; used by the thread that uses the backend."""

    @property
    def arena_bytes(self) -> int: ...

    @property
    def told(self) -> dict[str, Any]:
        """What the caller has to know to reach the arena."""
        ...

    def begin(self, work: StepWork) -> Run:
        """Start a step behind those that are on the lane already; it waits for its caller there.

        Raises `Unsupported`, having started nothing.
        """
        ...

    def free_caller(self) -> None:
        """Set every flag that the caller of an aborted step may be waiting for; to be repeated."""
        ...

    def clear(self) -> None:
        """Set all flags back; nothing may be on the lane, at either end."""
        ...


class Lanes(Protocol):
    """The lanes of one backend. `deep`: how many steps a lane takes at once."""

    @property
    def deep(self) -> int: ...

    @property
    def polled(self) -> bool:
        """Whether only looking tells that a step goes on: its caller sets flags on a device."""
        ...

    def open(self, arena: memoryview, arena_bytes: int, owner: Owner) -> Lane:
        """A lane for `owner`, with `arena_bytes` at least; raises `NoRoom`.

        `arena` is the caller's host memory, for lanes that have no other.
        """
        ...

    def close(self, lane: Lane) -> None:
        """Nothing runs on it any more."""
        ...

    def unpin(self, memory: memoryview) -> None:
        """`Backend.unregister` of host memory, without waiting for steps that are open."""
        ...


def address_of(memory: memoryview) -> int:
    """Where host memory begins."""
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)


@dataclass(frozen=True, slots=True)
class Owner:
    """A caller's process, and the namespace and user that it acts for.

    `started` distinguishes the process from a later one with the same pid. It is empty for a
    process that this one cannot see, in another PID namespace for example.
    """

    pid: int
    started: str = ""
    namespace: str = ""
    uid: int | None = None

    @classmethod
    def of(cls, pid: int, namespace: str = "", uid: int | None = None) -> Owner:
        return cls(pid, process_start(pid), namespace, uid)

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended, and has no memory mapped any more."""
        return self.started != "" and process_start(self.pid) != self.started

    def may_follow(self, other: Owner) -> bool:
        """Whether this owner may get memory that `other` had mapped.

        Both act for one namespace and one user, and `other` is the same process or has ended.
        Nobody follows a process that cannot be seen: it may have the memory mapped still.
        """
        if (self.namespace, self.uid) != (other.namespace, other.uid):
            return False
        same = (self.pid, self.started) == (other.pid, other.started)
        return other.is_gone or (same and self.started != "")


def process_start(pid: int) -> str:
    """When a process began, in the system's own ticks; empty when it has ended or is unknown."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    fields = told[told.rindex(")") + 2 :].split()
    return "" if fields[0] in "ZX" else fields[19]
