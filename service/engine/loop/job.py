"""What an operation's turn leaves to be done: nothing, a share of a launch, its own, or slices."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from kernels.backend import Attend, AttentionState, Done, Pending
from kernels.lanes import Lane, Run
from kernels.pending import StageSeconds
from service.core.sequences.books import Watch
from service.core.steps import StepExtension
from service.core.values import Extension
from service.engine.loop.request import Request

Mode = Literal["flat", "cascade", "explicit"]
Start = Callable[[], Pending[Any]]


@dataclass(slots=True)
class Seconds:
    """Seconds per stage of one operation's life."""

    queue: float = 0.0
    plan: float = 0.0
    copy_in: float = 0.0
    kernel: float = 0.0
    copy_out: float = 0.0
    encode: float = 0.0

    @property
    def stages(self) -> tuple[float, float, float, float, float, float]:
        """In the order in which answers tell them."""
        return self.queue, self.plan, self.copy_in, self.kernel, self.copy_out, self.encode


@dataclass(frozen=True, slots=True)
class Counts:
    """What an operation adds to the metrics once it has succeeded."""

    appended: int = 0
    read_bytes: int = 0
    saved_bytes: int = 0
    mode: Mode | None = None
    looked_up: int = 0
    found: int = 0

    def with_appended(self, rows: int) -> Counts:
        """The same for attention that has appended so many rows."""
        return Counts(rows, self.read_bytes, self.saved_bytes, self.mode)


NOTHING = Counts()


@dataclass(frozen=True, slots=True)
class Cost:
    """What the device has to move and to compute: bytes and floating-point operations."""

    num_bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One piece of long work: how to start it, and what it is thought to cost as work of `kind`."""

    start: Start
    kind: str
    cost: Cost


Steps = Generator[Step, Any, None]
"""Yields pieces one after another, and is sent the result of each."""


@dataclass(frozen=True, slots=True, eq=False)
class AllOf:
    """Launches that are done when the last of them is."""

    parts: tuple[Pending[None], ...]

    @property
    def seconds(self) -> StageSeconds:
        each = [part.seconds for part in self.parts]
        return StageSeconds(
            sum(one.plan for one in each),
            sum(one.copy_in for one in each),
            sum(one.kernel for one in each),
            sum(one.copy_out for one in each),
        )

    @property
    def done(self) -> bool:
        return all(part.done for part in self.parts)

    def result(self) -> None:
        for part in self.parts:
            part.result()


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """The answer lies in its place. `extension` is undone if it is not to count.

    `pending` is what still reads the request's tensors: the reply waits for it.
    """

    extension: Extension | StepExtension | None = None
    pending: Pending[Any] | None = None
    counts: Counts = NOTHING


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Grouped:
    """Attention that may share a launch; `finish` completes the answer from its states."""

    attends: tuple[Attend, ...]
    finish: Callable[[list[AttentionState]], None]
    cost: Cost
    extension: Extension | None = None
    counts: Counts = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """A launch of its own; `finish` completes the answer from its result."""

    start: Start
    finish: Callable[[Any], None]
    extension: None = None
    counts: Counts = NOTHING


def can_be_undone() -> bool:
    """What most work says: it may be stopped between two steps."""
    return False


T = TypeVar("T")
TURN_S: Final = 2e-3
"""Seconds of small pieces of work between two turns of others."""


def in_slices(pieces: Generator[None, None, T]) -> Generator[Step, Any, T]:
    """Small pieces of work of the engine's own, `TURN_S` of them at a time; their result."""
    ends = time.monotonic() + TURN_S
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
        if time.monotonic() >= ends:
            yield Step(nothing_left, "turn", Cost())
            ends = time.monotonic() + TURN_S


def nothing_left() -> Done[None]:
    return Done(None)


@dataclass(frozen=True, slots=True, eq=False)
class Sliced:
    """Work too long for one turn: `steps` yields launches and is sent their results.

    Between two steps others have their turns. `undo` takes back all that the operation changed.
    `made` names sequences that nobody else may change until it is over, beside those of the turn.
    `must_finish`: whether it has gone so far that it cannot be undone any more. `undo_steps`: what
    `undo` does, where that is too long for one turn as well.
    """

    steps: Steps
    undo: Callable[[], None]
    extension: None = None
    counts: Counts = NOTHING
    made: tuple[str, ...] = ()
    must_finish: Callable[[], bool] = can_be_undone
    undo_steps: Callable[[], Steps] | None = None

    def run(self) -> None:
        """All of it at once, waiting for every step."""
        result = None
        with suppress(StopIteration):
            while True:
                result = self.steps.send(result).start().result()


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A step on its lane: over when `run` is done, which is its caller's affair.

    `undo` takes back all that the operation changed, once nothing of it runs any more.
    """

    run: Run
    undo: Callable[[], None]
    lane: Lane
    counts: Counts = NOTHING
    extension: None = None


Work = Answered | Grouped | Alone | Sliced | Opened


@dataclass(slots=True, eq=False)
class Job:
    """An operation from its arrival to its reply.

    `arrived` and `deadline` are `time.monotonic()`. `token` is whoever asked, for the reply.
    `alone`: it is to begin when nothing before it can be undone any more. `watch`: the sequences
    that must stay as they were when its slices began. `stopped_by`: why its slices undo it now.
    `is_unread`: the request says so far only which operation and whose it is; `reading` is what has
    begun to read the rest.
    """

    request: Request
    token: Any
    arrived: float
    deadline: float
    cancelled: bool = False
    alone: bool = False
    is_unread: bool = False
    reading: Generator[None, None, Request] | None = None
    seconds: Seconds = field(default_factory=Seconds)
    work: Work | None = None
    error: Exception | None = None
    watch: Watch | None = None
    stopped_by: Exception | None = None

    @property
    def extension(self) -> Extension | StepExtension | None:
        return None if self.work is None else self.work.extension

    @property
    def attends(self) -> tuple[Attend, ...]:
        return self.work.attends if isinstance(self.work, Grouped) else ()
