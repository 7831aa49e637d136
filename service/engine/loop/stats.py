"""What is counted of answered calls: a moment later, when nobody waits for the engine.

A caller is often woken on the core that its answer came from, and runs when the engine rests: what
is done between an answer and the next wait for calls is the caller's time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from service.engine.loop.job import NOTHING, Counts, Job, Seconds
from service.engine.store.store import Store
from service.errors import KINDS, OutOfPages, kind_of
from service.metrics import Metrics
from service.operations.snapshot import SNAPSHOT
from service.operations.spec import Operation

QUIET_S: Final = 0.0003
"""When no call has come for so long, what was answered is counted."""
LATEST_S: Final = 0.002
"""It is counted after so long in any case, between two rounds."""
MOST: Final = 64
"""So many answers are counted at once."""
OUT_OF_PAGES: Final = KINDS[OutOfPages].code
PACE_WEIGHT: Final = 0.1
"""Share of the latest answers in the running mean of seconds per operation."""


@dataclass(slots=True)
class Answer:
    """What is counted of one answered call; nothing of its tensors."""

    operation: Operation
    code: str
    """ "ok", or an error's code."""
    seconds: Seconds
    counts: Counts
    whole_s: float
    """From its arrival to its answer."""
    is_of_door: bool


class Telling:
    """Belongs to the engine's thread."""

    def __init__(self, metrics: Metrics, store: Store) -> None:
        self._metrics = metrics
        self._store = store
        self._answered: list[Answer] = []
        self._ends = 0.0
        self._spent = 0.0
        self.seconds_per_operation = 0.0

    def __bool__(self) -> bool:
        """Whether there are answers to be counted."""
        return bool(self._answered)

    def add(self, job: Job) -> None:
        """A job was answered just now."""
        now, error, work = time.monotonic(), job.error, job.work
        if not self._answered:
            self._ends = now + LATEST_S
        code = "ok" if error is None else kind_of(error).code
        counts = NOTHING if error is not None or work is None else work.counts
        is_of_door = job.token.session.standing.is_door
        operation = job.request.operation
        self._answered.append(
            Answer(operation, code, job.seconds, counts, now - job.arrived, is_of_door)
        )

    def is_due(self, now: float, spent: float) -> bool:
        """Whether answers are to be counted whatever comes; a round ended `now`, after `spent`
        seconds."""
        self._spent += spent
        return now > self._ends or len(self._answered) >= MOST

    def tell(self) -> None:
        """Count all that was answered, and the pool as it is now."""
        answered, self._answered = self._answered, []
        for answer in answered:
            self._count(answer)
        self.tell_pool()
        if answered:
            mean, self._spent = self._spent / len(answered), 0.0
            self.seconds_per_operation += PACE_WEIGHT * (mean - self.seconds_per_operation)

    def tell_pool(self) -> None:
        numbers, metrics = self._store.numbers(), self._metrics
        metrics.cache(
            numbers.cached, numbers.pinned, numbers.leases, self._store.tree.budget.num_evicted
        )
        metrics.pool(numbers.free, numbers.referenced, numbers.sequences, numbers.nodes)
        self._store.press(numbers)

    def _count(self, answer: Answer) -> None:
        metrics, counts = self._metrics, answer.counts
        if answer.operation is not SNAPSHOT:  # nobody who watches wants to see that
            metrics.stages(*answer.seconds.stages)
        if not answer.is_of_door:
            metrics.observe(answer.operation.name, answer.code, answer.whole_s)
        if answer.code == OUT_OF_PAGES:
            metrics.out_of_pages()
        if counts.appended:
            metrics.appended(counts.appended)
        if counts.looked_up:
            metrics.looked_up(counts.looked_up, counts.found)
        if counts.mode is not None:
            metrics.kv_read(counts.read_bytes, counts.saved_bytes, counts.mode)
