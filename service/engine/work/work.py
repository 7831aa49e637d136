"""Work: what handlers leave to do, in one piece or in slices, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kernels.backend import Attend, AttentionState, Done, Pending
from kernels.lanes.lane import Lane, Run
from service.core.values import Extension
from service.families import Mode

Start = Callable[[], Pending[Any]]
T = TypeVar("T")
TURN_S: Final = 2e-3
"""Seconds of the engine's own small pieces of work between two turns of others."""


@dataclass(slots=True)
class Seconds:
    """Seconds of one operation in each stage; replies list them in this order."""

    queue: float = 0.0
    plan: float = 0.0
    copy_in: float = 0.0
    kernel: float = 0.0
    copy_out: float = 0.0
    encode: float = 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Additions to the metrics by an operation that has succeeded."""

    appended: int = 0
    read_bytes: int = 0
    saved_bytes: int = 0
    mode: Mode | None = None
    looked_up: int = 0
    found: int = 0


NOTHING = Counts()


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes that the device has to move, and floating-point operations to compute."""

    num_bytes: float = 0.0
    flops: float = 0.0


NO_COST: Final = Cost()


@dataclass(frozen=True, slots=True, eq=False)
class Completed:
    """The answer is in its place. `extension` is undone if the operation has to be.

    The reply waits for all `pending` launches, which still read the request's tensors.
    """

    extension: Extension | None = None
    pending: Sequence[Pending[Any]] = ()
    counts: Counts = NOTHING


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class SharedAttention:
    """Attention that may share a launch; `finish` completes the answer from its states, where
    anything is left to do."""

    attends: tuple[Attend, ...]
    finish: Callable[[list[AttentionState]], None] | None
    cost: Cost
    extension: Extension | None = None
    counts: Counts = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class SoloLaunch:
    """A launch of its own, of estimated `cost` as work of `kind`; `finish` completes the answer
    from its result."""

    start: Start
    finish: Callable[[Any], None]
    kind: str
    cost: Cost
    extension: None = None
    counts: Counts = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """One piece of long work: how to start it, and its estimated cost as work of `kind`."""

    start: Start
    kind: str
    cost: Cost


Slices = Generator[Slice, Any, None]
"""Yields slices one after another, and is sent the result of each."""


@dataclass(frozen=True, slots=True, eq=False)
class SlicedWork:
    """Work too long for one turn: others have their turns between two of its slices.

    `undo` takes back all that the operation changed, by default nothing; `undo_slices` does so
    where that is too long for one turn as well. `made` names sequences that are locked until it is
    over, beside the request's own. `must_finish`: whether it can no longer be undone. `rows`: what
    `undo` takes back.
    """

    slices: Slices
    undo: Callable[[], None] = lambda: None
    extension: None = None
    counts: Counts = NOTHING
    made: tuple[str, ...] = ()
    must_finish: Callable[[], bool] = lambda: False
    undo_slices: Callable[[], Slices] | None = None
    rows: Extension | None = None

    def run(self) -> None:
        result = None
        with suppress(StopIteration):
            while True:
                result = self.slices.send(result).start().result()


@dataclass(frozen=True, slots=True, eq=False)
class OpenedStep:
    """A step on its lane, which ends when `run` is done.

    `undo` takes back all that the operation changed, once nothing of it runs any more.
    `layer_done` is called with each layer that the engine has run itself.
    """

    run: Run
    undo: Callable[[], None]
    lane: Lane
    layer_done: Callable[[int], None]
    counts: Counts = NOTHING
    extension: None = None
    rows: Extension | None = None
    """What its `undo` takes back."""


Work = Completed | SharedAttention | SoloLaunch | SlicedWork | OpenedStep
Fields = dict[str, Any]
Answer = Work | Fields
"""A handler's result: the remaining work, or the fields of the answer."""


def in_slices(pieces: Generator[None, None, T]) -> Generator[Slice, Any, T]:
    """Run small pieces of the engine's own work, `TURN_S` of them a slice; their result."""
    ends = time.monotonic() + TURN_S
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
        if time.monotonic() >= ends:
            yield empty_slice()
            ends = time.monotonic() + TURN_S


WAIT: Final = "wait"
"""The kind of slices that wait for other threads: the next operation's slice follows at once."""


def empty_slice() -> Slice:
    """A slice without device work: others have their turns, then the operation continues."""
    return Slice(lambda: Done(None), "turn", NO_COST)
