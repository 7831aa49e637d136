"""What an operation's turn leaves to be done: nothing, a share of a launch, or its own launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernels.backend import Attend, AttentionState, Done, Pending
from service.core.values import Extension
from service.engine.inbox import Ticket
from service.engine.operations import Answer, Timings
from service.metrics import Mode


@dataclass(frozen=True, slots=True)
class Counts:
    """What an operation adds to the metrics once it has succeeded."""

    appended: int = 0
    read_bytes: int = 0
    saved_bytes: int = 0
    mode: Mode | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """Nothing is left: the answer is there. `extension` is what to undo if it is not to count."""

    answer: Answer
    extension: Extension | None = None
    counts: Counts = Counts()


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """Attention that may share a launch; `finish` makes the answer of the states of `attends`."""

    attends: tuple[Attend, ...]
    finish: Callable[[list[AttentionState]], Answer]
    extension: Extension | None = None
    counts: Counts = Counts()


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """Its own launch; `finish` makes the answer of its result."""

    start: Callable[[], Pending[Any]]
    finish: Callable[[Any], Answer]
    extension: None = None
    counts: Counts = Counts()


Work = Answered | Grouped | Alone


@dataclass(slots=True, eq=False)
class Job:
    """A ticket whose turn has come, until its reply is sent: `work` or `error`, then `answer`."""

    ticket: Ticket
    timings: Timings = field(default_factory=Timings)
    work: Work | None = None
    answer: Answer = None
    error: Exception | None = None

    @property
    def extension(self) -> Extension | None:
        return None if self.work is None else self.work.extension

    @property
    def attends(self) -> tuple[Attend, ...]:
        return self.work.attends if isinstance(self.work, Grouped) else ()


@dataclass(slots=True, eq=False)
class Launch:
    """Jobs whose replies go out together, and the device work they wait for (None: for none)."""

    jobs: list[Job]
    pending: Pending[Any] | None

    @property
    def is_done(self) -> bool:
        """Known without asking the device."""
        return self.pending is None or isinstance(self.pending, Done)
