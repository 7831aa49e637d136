"""Records metrics after replying, off the critical path.

A caller is often woken on the core that its answer came from, and runs when the engine rests: work
between an answer and the next wait for calls would delay the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from service.core.nodes import Namespace
from service.engine.loop.job import Job
from service.engine.store.store import Store
from service.engine.work.work import NOTHING, Counts, Seconds
from service.errors import KINDS, OutOfPages, kind_of
from service.families import REASONS, STAGES, STATES
from service.metrics import Metrics
from service.namespace_counts import APPENDED, QUEUE_S, REQUESTS, Held
from service.operations.schema.spec import Operation
from service.operations.status import SNAPSHOT

QUIET_S: Final = 0.0003
"""Replies are recorded when no call has come for this long, ..."""
LATEST_S: Final = 0.002
"""... when the oldest is this old, ..."""
MOST_REPLIES: Final = 64
"""... or when there are this many."""
OUT_OF_PAGES: Final = KINDS[OutOfPages].code
HELD_S: Final = 0.25
"""Least seconds between two looks at what each namespace holds, ..."""
HELD_SHARE: Final = 0.005
"""... which takes at most this share of the engine's time."""
PACE_WEIGHT: Final = 0.1
"""Weight of the latest replies in the running mean of seconds per operation."""


@dataclass(slots=True)
class ReplyRecord:
    """What metrics need of one reply; holds no tensors.

    `code` is "ok" or an error's code, `whole_s` the seconds from arrival to reply.
    """

    operation: Operation
    namespace: str
    code: str
    seconds: Seconds
    counts: Counts
    whole_s: float
    is_of_door: bool


class Stats:
    """Belongs to the engine's thread."""

    def __init__(self, metrics: Metrics, store: Store, learn: Callable[[], None]) -> None:
        """`learn` corrects the pace by the latest launches."""
        self._learn = learn
        self._metrics = metrics
        self._store = store
        self.replies: list[ReplyRecord] = []
        """Replies that are not recorded yet."""
        self.due = 0.0
        """When they must be recorded, even if calls are waiting."""
        self.spent_s = 0.0
        """Time of the rounds that these replies took."""
        self.seconds_per_operation = 0.0
        self._held_due = 0.0

    def add(self, job: Job) -> None:
        """Note a job that was answered just now."""
        now, error, work = time.monotonic(), job.error, job.work
        if not self.replies:
            self.due = now + LATEST_S
        self.replies.append(
            ReplyRecord(
                job.request.operation,
                job.request.tenant.namespace,
                "ok" if error is None else kind_of(error).code,
                job.seconds,
                NOTHING if error is not None or work is None else work.counts,
                now - job.arrived,
                job.token.session.standing.is_door,
            )
        )

    def refused(self, operation: Operation, namespace: str, code: str, is_of_door: bool) -> None:
        """Record a call that was answered with an error before it became a job."""
        metrics = self._metrics
        metrics.namespaces.of(namespace)[REQUESTS] += 1.0
        metrics.namespaces.rejected(namespace, code)
        if code in REASONS:
            metrics.add(1, "rejected", code)
        if not is_of_door:
            metrics.observe(operation.name, code, 0.0)

    def record(self) -> None:
        """Record all replies and the pool as it is now, with an event if its pressure changed."""
        self._learn()
        metrics = self._metrics
        replies, self.replies = self.replies, []
        for reply in replies:
            counts, spent = reply.counts, reply.seconds
            if reply.operation is not SNAPSHOT:  # of no interest to readers of snapshots
                metrics.sample(spent.queue, "queue_duration_seconds")
                own = metrics.namespaces.of(reply.namespace)
                own[REQUESTS] += 1.0
                own[QUEUE_S] += spent.queue
                own[APPENDED] += counts.appended
                for stage in STAGES:
                    if (stage_s := getattr(spent, stage)) > 0.0:
                        metrics.sample(stage_s, "stage_duration_seconds", stage)
            if not reply.is_of_door:
                metrics.observe(reply.operation.name, reply.code, reply.whole_s)
            if reply.code != "ok":
                metrics.namespaces.rejected(reply.namespace, reply.code)
            if reply.code in REASONS:
                metrics.add(1, "rejected", reply.code)
            elif reply.code == OUT_OF_PAGES:
                metrics.add(1, "out_of_pages")
            if counts.appended:
                metrics.add(counts.appended, "tokens_appended")
            if counts.looked_up:
                metrics.add(counts.found, "prefix_tokens", "hit")
                metrics.add(counts.looked_up - counts.found, "prefix_tokens", "miss")
                metrics.namespaces.looked_up(reply.namespace, counts.looked_up, counts.found)
            if counts.mode is not None:
                metrics.add(counts.read_bytes, "kv_bytes_read")
                metrics.add(counts.saved_bytes, "kv_bytes_saved")
                metrics.add(1, "cascade_batches", counts.mode)
        if replies:
            mean, self.spent_s = self.spent_s / len(replies), 0.0
            self.seconds_per_operation += PACE_WEIGHT * (mean - self.seconds_per_operation)
        numbers, tree = self._store.numbers(), self._store.tree
        for state in STATES:
            metrics.set(numbers[state], "kv_pages", state)
        metrics.set(numbers["leases"], "leases")
        metrics.set(numbers["sequences"], "sequences")
        metrics.set(tree.links.count, "prefix_nodes")
        metrics.set(tree.budget.num_evicted, "pages_evicted")
        self._store.emit_pressure_event(numbers)
        if (now := time.monotonic()) >= self._held_due:
            self._count_held(now)

    def _count_held(self, began: float) -> None:
        """Set what each namespace holds."""
        tree, numbers = self._store.tree, self._store.numbers()
        every = tree.budget.namespaces
        total = (*(numbers[state] for state in STATES[1:]), tree.num_sequences)
        self._metrics.namespaces.hold(
            [(one.used, one.name) for one in every.values()],
            lambda name: held_by(tree.budget.look(name)),
            total,
        )
        self._held_due = began + max(HELD_S, (time.monotonic() - began) / HELD_SHARE)


def held_by(one: Namespace) -> Held:
    return one.referenced, one.cached, one.pinned, one.num_sequences
