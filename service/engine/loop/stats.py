"""Records metrics after replying, off the critical path.

A caller is often woken on the core that its answer came from, and runs when the engine rests: work
between an answer and the next wait for calls would delay the caller.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from service.engine.loop.job import NOTHING, Counts, Job, Seconds
from service.engine.store.store import Store
from service.errors import KINDS, OutOfPages, kind_of
from service.metrics import Metrics
from service.operations.schema.spec import Operation
from service.operations.status import SNAPSHOT

QUIET_S: Final = 0.0003
"""Replies are recorded when no call has come for this long, ..."""
LATEST_S: Final = 0.002
"""... when the oldest is this old, ..."""
MOST_REPLIES: Final = 64
"""... or when there are this many."""
OUT_OF_PAGES: Final = KINDS[OutOfPages].code
PACE_WEIGHT: Final = 0.1
"""Weight of the latest replies in the running mean of seconds per operation."""


@dataclass(slots=True)
class ReplyRecord:
    """What metrics need of one reply; holds no tensors.

    `code` is "ok" or an error's code, `whole_s` the seconds from arrival to reply.
    """

    operation: Operation
    code: str
    seconds: Seconds
    counts: Counts
    whole_s: float
    is_of_door: bool


class Stats:
    """Belongs to the engine's thread."""

    def __init__(self, metrics: Metrics, store: Store) -> None:
        self._metrics = metrics
        self._store = store
        self.replies: list[ReplyRecord] = []
        """Replies that are not recorded yet."""
        self.due = 0.0
        """When they must be recorded, even if calls are waiting."""
        self.spent_s = 0.0
        """Time of the rounds that these replies took."""
        self.seconds_per_operation = 0.0

    def add(self, job: Job) -> None:
        """Note a job that was answered just now."""
        now, error, work = time.monotonic(), job.error, job.work
        if not self.replies:
            self.due = now + LATEST_S
        self.replies.append(
            ReplyRecord(
                job.request.operation,
                "ok" if error is None else kind_of(error).code,
                job.seconds,
                NOTHING if error is not None or work is None else work.counts,
                now - job.arrived,
                job.token.session.standing.is_door,
            )
        )

    def record(self) -> None:
        """Record all replies, and the pool as it is now."""
        replies, self.replies = self.replies, []
        for reply in replies:
            self._record_reply(reply)
        self.record_pool()
        if replies:
            mean, self.spent_s = self.spent_s / len(replies), 0.0
            self.seconds_per_operation += PACE_WEIGHT * (mean - self.seconds_per_operation)

    def record_pool(self) -> None:
        """Record pages and counts of the pool, and emit an event where its pressure changed."""
        numbers, metrics, tree = self._store.numbers(), self._metrics, self._store.tree
        cached, pinned, leases = numbers["cached"], numbers["pinned"], numbers["leases"]
        metrics.cache(cached, pinned, leases, tree.budget.num_evicted)
        free, referenced = numbers["free"], numbers["referenced"]
        metrics.pool(free, referenced, numbers["sequences"], tree.num_nodes)
        self._store.emit_pressure_event(numbers)

    def _record_reply(self, reply: ReplyRecord) -> None:
        metrics, counts, spent = self._metrics, reply.counts, reply.seconds
        if reply.operation is not SNAPSHOT:  # of no interest to readers of snapshots
            metrics.stages(
                spent.queue, spent.plan, spent.copy_in, spent.kernel, spent.copy_out, spent.encode
            )
        if not reply.is_of_door:
            metrics.observe(reply.operation.name, reply.code, reply.whole_s)
        if reply.code == OUT_OF_PAGES:
            metrics.out_of_pages()
        if counts.appended:
            metrics.appended(counts.appended)
        if counts.looked_up:
            metrics.looked_up(counts.looked_up, counts.found)
        if counts.mode is not None:
            metrics.kv_read(counts.read_bytes, counts.saved_bytes, counts.mode)
