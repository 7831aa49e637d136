"""Launches: jobs that go to the device together, those in flight, and what happens when one fails.

Replies of launches go out in order, so all that is not settled yet can still be undone and run
again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from kernels.backend import Pending
from service.engine.handlers.table import turn_of
from service.engine.loop.errors import refusal_of
from service.engine.loop.job import Alone, Answered, Cost, Grouped, Job, Sliced
from service.engine.store.store import FATAL, Store
from service.metrics import Metrics

MAX_IN_FLIGHT: Final = 2

LOG: Final = logging.getLogger("attnd.engine")


@dataclass(slots=True, eq=False)
class Launch:
    """Jobs whose replies go out together, and the device work they wait for (None: for none)."""

    jobs: list[Job]
    pending: Pending[Any] | None
    started: float = 0.0
    finished: float = 0.0

    @property
    def done(self) -> bool:
        """Known without waiting."""
        if self.pending is not None and not self.pending.done:
            return False
        for job in self.jobs:
            work = job.work
            if type(work) is Answered and work.pending is not None and not work.pending.done:
                return False
        return True

    def finish(self) -> None:
        """Complete the jobs' answers; the launch is done, or this waits for it."""
        result: Any = () if self.pending is None else self.pending.result()
        taken = 0
        for job in self.jobs:
            match job.work:
                case Grouped(attends, finish):
                    finish(result[taken : taken + len(attends)])
                    taken += len(attends)
                case Alone():
                    job.work.finish(result)
                case _:  # nothing was left to do, or its error is the answer
                    continue
            if self.pending is not None:
                spent = self.pending.seconds
                job.seconds.plan += spent.plan
                job.seconds.copy_in += spent.copy_in
                job.seconds.kernel += spent.kernel
                job.seconds.copy_out += spent.copy_out
        self.finished = time.monotonic()


@dataclass(slots=True)
class Landed:
    """What is to be learned from a launch of attention that is done."""

    num_rows: int = 0
    """Of queries."""
    cost: Cost | None = None
    """Of all that had the device alone, and took `seconds`."""
    seconds: float = 0.0
    num_jobs: int = 0
    """That shared the launch."""


def landed_of(launch: Launch, was_alone: bool) -> Landed | None:
    """None where nothing attended. `was_alone`: nothing else was on the device."""
    landed = Landed(seconds=launch.finished - launch.started)
    num_bytes = flops = 0.0
    for job in launch.jobs:
        work = job.work
        if isinstance(work, Grouped):
            landed.num_jobs += 1
            num_bytes += work.cost.num_bytes
            flops += work.cost.flops
            for attend in work.attends:
                landed.num_rows += attend.q.shape[0]
    if was_alone:
        landed.cost = Cost(num_bytes, flops)
    return landed if landed.num_jobs else None


class Launches:
    """The group that gathers, and the launches before it. `begin` gives a job its turn (again);
    `answer` is told of jobs that are settled, `charge` how long the device was at each. A group
    takes in about a slice of work. Methods raise `FATAL`."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        begin: Callable[[Job], None],
        answer: Callable[[Iterable[Job]], None],
        charge: Callable[[Job, float], None],
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._begin = begin
        self._answer = answer
        self._charge = charge
        self._group: list[Job] = []
        self._group_s = 0.0
        """What the group is thought to take."""
        self._free_at = 0.0
        """When the device was done with the latest launch, as far as that is known."""
        self._sharing: Hashable | None = None
        self.is_closed = False
        """The group takes nobody in any more."""
        self._flying: deque[Launch] = deque()
        self._landed: list[Landed] = []

    def __bool__(self) -> bool:
        return bool(self._group or self._flying)

    @property
    def started(self) -> float | None:
        """When the oldest launch in flight went out; None while there is none."""
        return self._flying[0].started if self._flying else None

    @property
    def jobs(self) -> list[Job]:
        """All that may yet be undone and run again, oldest first."""
        return [job for launch in self._flying for job in launch.jobs] + self._group

    def has_room(self, sharing: Hashable | None) -> bool:
        """Let a job with this `sharing` into the group, which goes out first if the two do not go
        together; False when the device has to finish something before."""
        if sharing is None or self._sharing in (None, sharing):
            return True
        return self.submit()

    def add(self, job: Job, sharing: Hashable | None) -> None:
        """A job that has had its turn joins the group."""
        self._group.append(job)
        if sharing is not None and job.error is None:
            self._sharing = sharing
        if type(job.work) is Grouped:
            pace = self._store.pace
            self._group_s += pace.seconds("attend", job.work.cost)
            if self._group_s > pace.slice_s:
                self.is_closed = True

    def close_group(self) -> None:
        """Those of the group wait for nobody else."""
        self.is_closed = bool(self._group)

    def submit(self) -> bool:
        """Hand the group to the device; False while that is full of launches."""
        if not self._group:
            return True
        self.settle()
        if len(self._flying) >= MAX_IN_FLIGHT:
            return False
        started = time.monotonic()
        try:
            pending = self._start(self._group)
        except FATAL:
            raise
        except Exception as error:
            self._replay(error)
            return True
        self._flying.append(Launch(self._group, pending, started))
        self._empty_group()
        self.settle()
        return True

    def settled(self) -> bool:
        """Submit what there is; whether every launch is answered."""
        return self.submit() and not self._flying

    def settle(self) -> None:
        """Answer the launches that are done, oldest first."""
        while self._flying and self._flying[0].done:
            launch = self._flying[0]
            try:
                launch.finish()
            except FATAL:
                raise
            except Exception as error:
                launch.pending = None
                self._replay(error)
                return
            self._flying.popleft()
            self._account(launch)
            self._answer(launch.jobs)
            landed = landed_of(launch, not self._flying)
            if landed is not None:
                self._landed.append(landed)
                if landed.seconds > self._store.pace.slice_s:
                    self.learn()  # before others like it are let in

    def _empty_group(self) -> None:
        self._group, self._group_s, self._sharing, self.is_closed = [], 0.0, None, False

    def _account(self, launch: Launch) -> None:
        """Charge the jobs of a launch that is done for the device's time, in equal shares."""
        spent = launch.finished - max(launch.started, self._free_at)
        self._free_at = launch.finished
        for job in launch.jobs:
            self._charge(job, spent / len(launch.jobs))

    def learn(self) -> None:
        """Count the launches of attention since the last time; those that had the device alone
        correct the estimates. Jobs that share a launch may take less together than each alone, so
        those only tell that estimates were too low."""
        landed, self._landed = self._landed, []
        for one in landed:
            self._metrics.batch(one.num_rows)
            if one.cost is not None and self._tells(one, one.cost):
                self._store.pace.correct("attend", one.cost, one.seconds)

    def _tells(self, landed: Landed, cost: Cost) -> bool:
        """Whether estimates are corrected by a launch: of one job always."""
        pace = self._store.pace
        if landed.num_jobs == 1:
            return True
        is_late = landed.seconds > max(pace.slice_s, pace.seconds("attend", cost))
        return is_late and not pace.is_short(cost)

    def uses(self, names: set[str]) -> bool:
        """Whether what may yet be undone and run again reads or writes one of these sequences."""
        for job in self.jobs:
            turn = turn_of(job.request)
            if not names.isdisjoint(turn.reads(job.request)):
                return True
            if not names.isdisjoint(turn.writes(job.request)):
                return True
        return False

    def _start(self, jobs: list[Job]) -> Any:
        """The device work of jobs that go together: one launch, or none (None)."""
        for job in jobs:
            if isinstance(job.work, Alone):  # then no other of them has a share in a launch
                return job.work.start()
        attends = [attend for job in jobs for attend in job.attends]
        if not attends:
            return None
        return self._store.backend.attend(attends)

    # When a launch fails.

    def _replay(self, error: Exception) -> None:
        """Undo all that is not settled, newest first, and run each operation again by itself.

        So an operation that fails takes nobody with it, and leaves no trace. One that was alone
        already is not run twice.
        """
        jobs = self.jobs
        wait_out(self._flying)
        self._flying.clear()
        self._empty_group()
        for job in reversed(jobs):
            if job.extension is not None:
                self._store.undo(job.extension)
        if len(jobs) == 1:
            jobs[0].error = refusal_of(jobs[0], error)
        else:
            LOG.warning("a launch of %d operations failed, each runs alone: %r", len(jobs), error)
            for job in jobs:
                if job.work is not None:
                    self._run_alone(job)
        self._answer(jobs)

    def _run_alone(self, job: Job) -> None:
        self._begin(job)
        if job.error is not None:
            return
        try:
            if isinstance(job.work, Sliced):  # by now it is thought to take longer
                job.work.run()
            else:
                Launch([job], self._start([job])).finish()
        except FATAL:
            raise
        except Exception as error:
            if isinstance(job.work, Sliced):
                job.work.undo()
            elif job.extension is not None:
                self._store.undo(job.extension)
            job.error = refusal_of(job, error)


def wait_out(launches: Iterable[Launch]) -> None:
    """Launches whose results are not wanted any more must still be done with the pool."""
    for launch in launches:
        try:
            if launch.pending is not None:
                launch.pending.result()
        except FATAL:
            raise
        except Exception as error:
            LOG.warning("a launch to be run again failed too: %r", error)
