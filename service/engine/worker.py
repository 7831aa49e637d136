"""The worker: gives waiting operations their turns, in order, on the thread that owns the store.

Attention that is compatible shares a launch; up to two launches are in flight. Replies go out in
order of arrival, so all that is not settled yet is still the worker's to undo and run again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final

from kernels.backend import DeviceLost, StageSeconds, Unsupported
from service.core.errors import CoreError, IntegrityError, InvalidRequest, OutOfPages
from service.engine.inbox import Inbox, Ticket
from service.engine.store import Store, StoreLost
from service.engine.turns import BARRIERS, begin, sharing_of
from service.engine.work import Alone, Answered, Grouped, Job, Launch
from service.errors import AttndError, DeadlineExceeded, Internal
from service.metrics import Metrics

MAX_IN_FLIGHT: Final = 2
FATAL: Final = (DeviceLost, StoreLost, IntegrityError)
"""After these nothing in the pool can be trusted."""

log = logging.getLogger(__name__)


class Worker:
    """Runs on one thread, from `run` to its end. `deliver` sends replies to where they are due."""

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        metrics: Metrics,
        deliver: Callable[[Sequence[Job]], None],
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._metrics = metrics
        self._deliver = deliver
        self._group: list[Job] = []
        self._sharing: Hashable | None = None
        self._launches: deque[Launch] = deque()
        self._round: deque[Ticket] = deque()

    def run(self) -> None:
        """Until the inbox is closed and all is answered. Raises what is in `FATAL`."""
        while True:
            tickets = self._inbox.take(wait=not self._launches)
            if not tickets and not self._launches:
                return
            started = time.monotonic()
            self._round.extend(tickets)
            while self._round:
                self._turn(self._round[0])
            self._submit()
            self._settle(keep=1 if self._inbox.num_waiting else 0)
            if tickets:
                self._inbox.paced(len(tickets), time.monotonic() - started)

    def unanswered(self) -> list[Ticket]:
        """What it has taken and not answered, in order; for whoever must answer in its place."""
        jobs = [job for launch in self._launches for job in launch.jobs] + self._group
        return [job.ticket for job in jobs] + list(self._round)

    # An operation's turn.

    def _turn(self, ticket: Ticket) -> None:
        """The ticket is the first of the round, and leaves it when the group has it."""
        if ticket.future.cancelled():
            self._round.popleft()
            self._metrics.rejected("cancelled")
            return
        operation = ticket.operation
        sharing = sharing_of(operation)
        if sharing is not None and self._sharing not in (None, sharing):
            self._submit()
        is_barrier = isinstance(operation, BARRIERS)
        if is_barrier:
            self._submit()
            self._settle(keep=0)
        job = Job(ticket)
        self._group.append(job)
        self._round.popleft()
        now = time.monotonic()
        job.timings.queue = now - ticket.arrived
        if now > ticket.deadline:
            self._metrics.rejected("deadline_exceeded")
            waited = f"it waited {job.timings.queue:.3f} s for its turn and did not run"
            job.error = DeadlineExceeded(f"the deadline passed: {waited}")
            return
        self._begin(job)
        if sharing is not None and job.error is None:
            self._sharing = sharing
        if is_barrier or isinstance(job.work, Alone):
            self._submit()  # a barrier's reply goes out here: it is never run again

    def _begin(self, job: Job) -> None:
        """The turn itself: fills `work`, or `error`."""
        job.work = job.error = None
        try:
            job.work = begin(self._store, job.ticket.operation, job.timings)
        except FATAL:
            raise
        except Exception as error:
            job.error = self._refusal(job, error)

    # Launches.

    def _submit(self) -> None:
        """Hand the group to the device; its jobs are then in flight."""
        self._settle(keep=MAX_IN_FLIGHT - 1)
        if not self._group:
            return
        try:
            pending = self._start(self._group)
        except FATAL:
            raise
        except Exception as error:
            self._settle(keep=0)
            if self._group:
                self._replay(error)
            return
        self._launches.append(Launch(self._group, pending))
        self._group, self._sharing = [], None
        self._settle(keep=MAX_IN_FLIGHT)

    def _start(self, jobs: list[Job]) -> Any:
        """The device work of jobs that go together: one launch, or none (None)."""
        for job in jobs:
            if isinstance(job.work, Alone):  # then no other of them has a share in a launch
                return job.work.start()
        attends = [attend for job in jobs for attend in job.attends]
        if not attends:
            return None
        pending = self._store.backend.attend(attends)
        self._metrics.batch(sum(attend.q.shape[0] for attend in attends))
        return pending

    def _settle(self, keep: int) -> None:
        """Answer launches, oldest first, waiting for them until `keep` are left in flight."""
        while self._launches and (len(self._launches) > keep or self._launches[0].is_done):
            launch = self._launches[0]
            try:
                self._finish(launch)
            except FATAL:
                raise
            except Exception as error:
                launch.pending = None
                self._replay(error)
                return
            self._launches.popleft()
            self._answer(launch.jobs)

    def _finish(self, launch: Launch) -> None:
        """Wait for the device, and make the answers."""
        result: Any = () if launch.pending is None else launch.pending.result()
        spent = StageSeconds() if launch.pending is None else launch.pending.seconds
        taken = 0
        for job in launch.jobs:
            match job.work:
                case Answered(answer):
                    job.answer = answer
                    continue
                case Grouped(attends, finish):
                    job.answer = finish(result[taken : taken + len(attends)])
                    taken += len(attends)
                case Alone():
                    job.answer = job.work.finish(result)
                case None:  # its error is the answer
                    continue
            job.timings.plan += spent.plan
            job.timings.copy_in += spent.copy_in
            job.timings.kernel += spent.kernel
            job.timings.copy_out += spent.copy_out

    def _answer(self, jobs: list[Job]) -> None:
        """Count what succeeded, and send the replies."""
        metrics = self._metrics
        for job in jobs:
            if isinstance(job.error, OutOfPages):
                metrics.out_of_pages()
            if job.error is not None or job.work is None:
                continue
            counts = job.work.counts
            if counts.appended:
                metrics.appended(counts.appended)
            if counts.mode is not None:
                metrics.kv_read(counts.read_bytes, counts.saved_bytes, counts.mode)
        metrics.pool(self._store.numbers())
        self._deliver(jobs)

    # When a launch fails.

    def _replay(self, error: Exception) -> None:
        """Undo all that is not settled, newest first, and run each operation again by itself.

        So an operation that fails takes nobody with it, and leaves no trace. One that was alone
        already is not run twice.
        """
        jobs = [job for launch in self._launches for job in launch.jobs] + self._group
        self._wait_out(launch for launch in self._launches if launch.pending is not None)
        for job in reversed(jobs):
            if job.extension is not None:
                self._store.undo(job.extension)
        if len(jobs) == 1:
            jobs[0].error = self._refusal(jobs[0], error)
        else:
            log.warning(
                "a launch of %d operations failed, running each alone: %r", len(jobs), error
            )
            for job in jobs:
                if not isinstance(job.error, AttndError):
                    self._run_alone(job)
        self._launches.clear()
        self._group, self._sharing = [], None
        self._answer(jobs)

    def _run_alone(self, job: Job) -> None:
        self._begin(job)
        if job.error is not None:
            return
        launch = Launch([job], None)
        try:
            launch.pending = self._start(launch.jobs)
            self._finish(launch)
        except FATAL:
            raise
        except Exception as error:
            if job.extension is not None:
                self._store.undo(job.extension)
            job.error = self._refusal(job, error)

    def _wait_out(self, launches: Iterable[Launch]) -> None:
        """Launches whose results are not wanted any more must still be done with the pool."""
        for launch in launches:
            try:
                if launch.pending is not None:
                    launch.pending.result()
            except FATAL:
                raise
            except Exception as error:
                log.warning("a launch to be run again failed too: %r", error)

    def _refusal(self, job: Job, error: Exception) -> Exception:
        """The error as the caller is to see it; a bug is logged here, with its traceback."""
        match error:
            case CoreError() | AttndError():
                return error
            case Unsupported():
                return InvalidRequest(error.field, error.value, error.rule)
            case _:
                name = job.ticket.operation.name
                log.error("%s failed: this is a bug", name, exc_info=error)
                return Internal(f"{name} failed, and changed nothing; the log has the traceback")
