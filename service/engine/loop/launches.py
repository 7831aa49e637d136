"""Launches: jobs that go to the device together, and what happens when one fails.

Replies of launches go out in order, so whatever is not answered yet can still be undone and run
again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from kernels.backend import Attend, Pending
from service.engine.handlers.table import HANDLERS
from service.engine.loop.job import Job, refusal_of
from service.engine.store.store import FATAL, Store
from service.engine.work.work import Completed, Cost, SharedAttention, SlicedWork, SoloLaunch
from service.metrics import Metrics

MAX_IN_FLIGHT: Final = 2
GROUP_SHARE: Final = 0.25
"""Share of a slice from which a group takes no more jobs: with a last job of almost a slice, a
launch takes little more than a slice."""

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
        """Whether `finish` returns without waiting."""
        if self.pending is not None and not self.pending.done:
            return False
        for job in self.jobs:
            if type(work := job.work) is Completed and not all(one.done for one in work.pending):
                return False
        return True

    def finish(self) -> None:
        """Complete the jobs' answers, after waiting for the device where it is not done."""
        result: Any = () if self.pending is None else self.pending.result()
        taken = 0
        for job in self.jobs:
            match job.work:
                case SharedAttention(attends, finish):
                    if finish is not None:
                        finish(result[taken : taken + len(attends)])
                    taken += len(attends)
                case SoloLaunch():
                    job.work.finish(result)
                case _:  # the answer is complete, or an error
                    continue
            if self.pending is not None:
                spent = self.pending.seconds
                job.seconds.plan += spent.plan
                job.seconds.copy_in += spent.copy_in
                job.seconds.kernel += spent.kernel
                job.seconds.copy_out += spent.copy_out
        self.finished = time.monotonic()


@dataclass(slots=True)
class LaunchSample:
    """A launch of attention as it was measured: `num_jobs` shared it, with `num_rows` of queries.

    `was_alone`: nothing else was on the device, so that `cost` took these `seconds`.
    """

    num_jobs: int
    num_rows: int
    cost: Cost
    seconds: float
    was_alone: bool


class Launches:
    """The group of jobs that gathers, and the launches in flight before it.

    `begin` gives a job its turn (again); `answer` gets jobs that are over, `charge` the seconds of
    the device for each. A group takes `GROUP_SHARE` of a slice and one job more at most. Methods
    raise `FATAL`.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        begin: Callable[[Job], None],
        answer: Callable[[Job], None],
        charge: Callable[[Job, float], None],
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._begin = begin
        self._answer = answer
        self._charge = charge
        self.group: list[Job] = []
        self._group_s = 0.0
        """Estimated seconds of the group."""
        self.sharing: Hashable | None = None
        """The kind of launch that the group needs: `sharing_of` its jobs."""
        self.is_closed = False
        """Whether the group takes no more jobs."""
        self.in_flight: deque[Launch] = deque()
        """Launches on the device, oldest first."""
        self._free_at = 0.0
        """When the device finished the latest launch."""
        self._samples: list[LaunchSample] = []

    @property
    def jobs(self) -> list[Job]:
        """All that may yet be undone and run again, oldest first."""
        return [job for launch in self.in_flight for job in launch.jobs] + self.group

    @property
    def idle_s(self) -> float:
        """Seconds since callers last waited for the device; 0 while they do."""
        return 0.0 if self.in_flight else time.monotonic() - self._free_at

    def add(self, job: Job, sharing: Hashable | None) -> None:
        self.group.append(job)
        if sharing is not None and job.error is None:
            self.sharing = sharing
        if type(job.work) is SharedAttention:
            pace = self._store.pace
            self._group_s += pace.seconds("attend", job.work.cost)
            if self._group_s > GROUP_SHARE * pace.slice_s:
                self.is_closed = True

    def submit(self) -> bool:
        """Start the group on the device; False while the device has `MAX_IN_FLIGHT` launches."""
        if not self.group:
            return True
        self.reply()  # a launch that fails runs the group again, too, and answers it
        if not (group := self.group):
            return True
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return False
        started = time.monotonic()
        try:
            pending = self._start(group)
        except FATAL:
            raise
        except Exception as error:
            solo = next((job for job in group if isinstance(job.work, SoloLaunch)), None)
            if solo is None:
                self._replay(group, error)
                return True
            # it has changed nothing, so what is in flight need not be undone
            solo.work = pending = None
            solo.error = refusal_of(solo, error)
        self.in_flight.append(Launch(group, pending, started))
        self.group, self._group_s, self.sharing, self.is_closed = [], 0.0, None, False
        self.reply()
        return True

    def drained(self) -> bool:
        """Submit the group; whether every launch is answered."""
        return self.submit() and not self.in_flight

    def reply(self) -> None:
        """Answer the launches that are done, oldest first."""
        while self.in_flight and self.in_flight[0].done:
            launch = self.in_flight[0]
            try:
                launch.finish()
            except FATAL:
                raise
            except Exception as error:
                launch.pending = None
                jobs = self.jobs
                wait_for(self.in_flight)
                self.in_flight.clear()
                self._replay(jobs, error)
                return
            self.in_flight.popleft()
            jobs, began = launch.jobs, max(launch.started, self._free_at)
            self._free_at = launch.finished
            share_s = (launch.finished - began) / len(jobs)
            for job in jobs:
                self._charge(job, share_s)
                self._answer(job)
            self._take_sample(launch)

    def uses(self, names: set[str]) -> bool:
        """Whether what may yet be undone and run again reads or writes one of these sequences."""
        for job in self.jobs:
            handler = HANDLERS[job.request.operation.name]
            if not names.isdisjoint(handler.reads(job.request)):
                return True
            if not names.isdisjoint(handler.writes(job.request)):
                return True
        return False

    def _start(self, jobs: list[Job]) -> Any:
        """Start the device work of jobs that go together: one launch, or none (None)."""
        attends: list[Attend] = []
        for job in jobs:
            if type(job.work) is SharedAttention:
                attends += job.work.attends
            elif isinstance(job.work, SoloLaunch):  # then no other job of them has a launch
                return job.work.start()
        return self._store.backend.attend(attends) if attends else None

    # What launches teach about the device's pace.

    def _take_sample(self, launch: Launch) -> None:
        """Keep the measurement of a launch of attention; learn at once from one above a slice, and
        from a launch of other work."""
        num_jobs = num_rows = 0
        num_bytes = flops = 0.0
        seconds = launch.finished - launch.started
        for job in launch.jobs:
            if type(solo := job.work) is SoloLaunch and not self.in_flight:
                self._store.pace.correct(solo.kind, solo.cost, seconds)
            if type(work := job.work) is SharedAttention:
                num_jobs += 1
                num_bytes += work.cost.num_bytes
                flops += work.cost.flops
                for attend in work.attends:
                    num_rows += attend.q.shape[0]
        if not num_jobs:
            return
        cost = Cost(num_bytes, flops)
        self._samples.append(LaunchSample(num_jobs, num_rows, cost, seconds, not self.in_flight))
        if seconds > self._store.pace.slice_s:
            self.learn()  # before others like it are started

    def learn(self) -> None:
        """Count the latest launches of attention, and correct the estimates by launches that
        had the device alone.

        Jobs that share a launch may take less together than one by one, so a shared launch only
        shows that estimates were too low.
        """
        samples, self._samples = self._samples, []
        pace = self._store.pace
        for sample in samples:
            self._metrics.sample(sample.num_rows, "batch_rows")
            if not sample.was_alone:
                continue
            expected_s = max(pace.slice_s, pace.seconds("attend", sample.cost))
            if sample.num_jobs == 1 or (
                sample.seconds > expected_s and not pace.is_short(sample.cost)
            ):
                pace.correct("attend", sample.cost, sample.seconds)

    # When a launch fails.

    def _replay(self, jobs: list[Job], error: Exception) -> None:
        """Undo the newest jobs, newest first, answer those before them, and run each of `jobs`
        again by itself.

        So an operation that fails harms no other and leaves no trace. One that was alone already
        is not run twice.
        """
        was_alone = len(jobs) == 1 and not self.in_flight
        wait_for(self.in_flight)
        self.group, self._group_s, self.sharing, self.is_closed = [], 0.0, None, False
        for job in reversed(jobs):
            self._store.undo(job.extension)
        self.reply()
        if was_alone:
            jobs[0].error = refusal_of(jobs[0], error)
        else:
            LOG.warning("a launch of %d operations failed, each runs alone: %r", len(jobs), error)
            for job in jobs:  # a refusal may be due to what is undone now; a step's is not
                if job.work is not None or job.request.step is None:
                    self._run_alone(job)
        for job in jobs:
            self._answer(job)

    def _run_alone(self, job: Job) -> None:
        self._begin(job)
        if job.error is not None:
            return
        started = time.monotonic()
        try:
            if isinstance(job.work, SlicedWork):  # the estimate has risen since
                job.work.run()
            else:
                Launch([job], self._start([job])).finish()
                if type(job.work) is Completed:
                    for one in job.work.pending:
                        one.result()  # it still reads the request's tensors
        except FATAL:
            raise
        except Exception as error:
            if isinstance(job.work, SlicedWork):
                job.work.undo()
            else:
                self._store.undo(job.extension)
            job.error = refusal_of(job, error)
        self._charge(job, time.monotonic() - started)


def wait_for(launches: Iterable[Launch]) -> None:
    """Wait until launches are done, and no longer use the pool and the requests' tensors."""
    for launch in launches:
        appends = [job.work.pending for job in launch.jobs if type(job.work) is Completed]
        for one in (launch.pending, *chain.from_iterable(appends)):
            try:
                if one is not None:
                    one.result()
            except FATAL:
                raise
            except Exception as error:
                LOG.warning("a launch to be run again failed too: %r", error)
