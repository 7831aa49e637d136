"""The scheduler: gives operations their turns, in order, with long work cut into slices.

What waits is taken in order of arrival, from each namespace in turn; compatible attention shares a
launch. Replies of launches go out in order, so all that is not settled yet can still be undone and
run again. Long work runs a slice at a time, between the turns of others, and holds its sequences
until it is done.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

from kernels.backend import DeviceLost
from kernels.lanes import Lanes
from service.core.errors import IntegrityError
from service.engine.fair import FairQueue
from service.engine.holds import Holds
from service.engine.longs import Longs
from service.engine.open_steps import OpenSteps
from service.engine.refusals import as_refusal
from service.engine.store import Store, StoreLost
from service.engine.turns import sharing_of, turn_of
from service.engine.work import Alone, Grouped, Job, Launch, Opened, Sliced
from service.errors import Cancelled, DeadlineExceeded, Internal, OutOfPages
from service.metrics import Metrics

MAX_IN_FLIGHT: Final = 2
ABORT_S: Final = 2.0
"""How long steps may take to let go of the device when everything is given up."""
FATAL: Final = (DeviceLost, StoreLost, IntegrityError)
"""After these nothing in the pool can be trusted."""

LOG: Final = logging.getLogger("attnd.engine")


class Scheduler:
    """One thread's. `reply` takes a job whose answer is in its place, or whose `error` is set."""

    def __init__(
        self, store: Store, metrics: Metrics, reply: Callable[[Job], None], lanes: Lanes
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._reply = reply
        self._waiting: FairQueue[Job] = FairQueue()
        self._group: list[Job] = []
        self._sharing: Hashable | None = None
        self._is_closed = False
        """The group takes nobody in any more: one of its namespaces waits for nothing else."""
        self._launches: deque[Launch] = deque()
        self._holds = Holds()
        self._longs = Longs(store, metrics, self._end_long)
        self.steps = OpenSteps(metrics, lanes, self._end_step)

    @property
    def num_waiting(self) -> int:
        """Operations whose turn has not come."""
        return self._waiting.count

    def depth(self, namespace: str) -> int:
        """Those of one namespace."""
        return self._waiting.depth(namespace)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do but wait for callers."""
        return bool(
            self._waiting.count or self._launches or self._group or self._longs or self.steps
        )

    @property
    def steps_only(self) -> bool:
        """Whether open steps, and whoever waits for them, are all there is."""
        return not (self._launches or self._group or self._longs)

    @property
    def flight_s(self) -> float:
        """Seconds since the oldest launch in flight went out; 0 when the device is idle."""
        oldest = self._launches[0].started if self._launches else self._longs.slice_started
        return 0.0 if oldest is None else time.monotonic() - oldest

    def admit(self, job: Job) -> None:
        self._waiting.append(job.request.tenant.namespace, job)

    def cancel(self, job: Job) -> None:
        """Nobody wants the answer: what waits leaves at once, long work at its next slice."""
        job.cancelled = True
        if job.work is None and self._waiting.remove(job.request.tenant.namespace, job):
            job.seconds.queue = time.monotonic() - job.arrived
            self._metrics.rejected("cancelled")
            self._refuse(job, Cancelled("the caller took the operation back before its turn"))

    def round(self) -> None:
        """All turns that can be given now, then one slice of long work. Raises `FATAL`."""
        self._store.tick()
        self._settle()
        if not self._store.has_outlived:
            self._take_turns()
        elif self._settled():
            self._store.drop_outlived(self._is_in_use)
            self._take_turns()
        self._submit()
        self._settle()
        self._longs.advance()
        self.steps.advance()

    def give_up(self, error: Exception) -> None:
        """Answer all that waits or is long with `error`; what a launch holds still finishes."""
        waiting, self._waiting = self._waiting, FairQueue()
        self._longs.stop_all(error)
        self.steps.abort_all(error, ABORT_S)
        for job in waiting:
            self._refuse(job, error)

    # Turns.

    def _take_turns(self) -> None:
        """Give turns until one has to wait for the device; those held up keep their order."""
        waiting = self._waiting
        if not waiting.count:
            return
        held: list[Job] = []
        behind = Holds() if self._holds or self.steps else None
        while waiting.count and not (self._is_closed and not self._submit()):
            job = waiting.first()
            if not self._is_wanted(job):
                waiting.pop()
            elif behind is not None and self._is_held(job, behind):
                behind.take(job.request)
                held.append(waiting.pop())
            elif self._turn(job):
                waiting.pop()
                held_now = self._holds or self.steps
                behind = Holds() if behind is None and held_now else behind
                if waiting.count and not waiting.depth(job.request.tenant.namespace):
                    self._is_closed = bool(self._group)
            else:
                break
        for job in reversed(held):
            waiting.put_back(job.request.tenant.namespace, job)

    def _is_held(self, job: Job, behind: Holds) -> bool:
        """Whether long work, or one that waits for it, has a sequence of the job's."""
        request = job.request
        lane = None if request.step is None else request.step.lane
        return self._holds.stop(request) or behind.stop(request) or self.steps.stop(job, lane)

    def _is_in_use(self, name: str) -> bool:
        """Whether long work or an open step has a sequence."""
        return name in self._holds or name in self.steps

    def _is_wanted(self, job: Job) -> bool:
        """False when its deadline passed: it is answered, not run."""
        now = time.monotonic()
        job.seconds.queue = now - job.arrived
        if now > job.deadline:
            self._metrics.rejected("deadline_exceeded")
            waited = f"it waited {job.seconds.queue:.3f} s for its turn and did not run"
            self._refuse(job, DeadlineExceeded(f"the deadline passed: {waited}"))
            return False
        return True

    def _refuse(self, job: Job, error: Exception) -> None:
        job.error = error
        self._reply(job)

    def _turn(self, job: Job) -> bool:
        """One job's turn; False when the device has to finish something first."""
        turn, sharing = turn_of(job.request), sharing_of(job.request)
        if sharing is not None and self._sharing not in (None, sharing) and not self._submit():
            return False
        if (turn.is_barrier or job.alone) and not self._settled():
            return False
        if job.request.step is not None and self._is_unsettled(job) and not self._settled():
            return False
        self._begin(job)
        if isinstance(job.work, Sliced):
            return self._begin_long(job, job.work)
        if isinstance(job.work, Opened):
            self.steps.begin(job, job.work)
            return True
        self._group.append(job)
        if sharing is not None and job.error is None:
            self._sharing = sharing
        if turn.is_barrier or isinstance(job.work, Alone):
            self._submit()  # a barrier's reply goes out here: it is never run again
        return True

    def _begin(self, job: Job) -> None:
        """The turn itself: fills `work`, or `error`."""
        job.work = job.error = None
        try:
            if job.request.step is not None:
                self.steps.check(job.request.step.lane)
            job.work = turn_of(job.request).begin(self._store, job.request, job.seconds)
        except FATAL:
            raise
        except Exception as error:
            job.error = self._refusal(job, error)

    def _begin_long(self, job: Job, work: Sliced) -> bool:
        """Long work begins when nothing before it can be undone beneath it any more."""
        if not job.alone and (self._group or self._launches):
            work.steps.close()
            work.undo()
            job.work, job.alone = None, True
            self._submit()
            return False
        self._holds.take(job.request, work.made)
        self._longs.begin(job)
        return True

    def _end_long(self, job: Job, error: Exception | None) -> None:
        """Long work is done, or is not to go on (and has been undone)."""
        if isinstance(job.work, Sliced):
            self._holds.release(job.request, job.work.made)
        if error is not None:
            job.error = error if isinstance(error, Cancelled) else self._refusal(job, error)
        self._answer([job])

    def _is_unsettled(self, job: Job) -> bool:
        """Whether what may yet be undone and run again has a sequence of the job's."""
        names = set(job.request.fields.ids)
        others = [one for launch in self._launches for one in launch.jobs] + self._group
        for other in others:
            turn = turn_of(other.request)
            if not names.isdisjoint(turn.reads(other.request)):
                return True
            if not names.isdisjoint(turn.writes(other.request)):
                return True
        return False

    def _end_step(self, job: Job, error: Exception | None) -> None:
        """A step is over, or was not to go on (and has been undone)."""
        job.error = error
        self._answer([job])

    # Launches.

    def _submit(self) -> bool:
        """Hand the group to the device; False while that is full of launches."""
        if not self._group:
            return True
        self._settle()
        if len(self._launches) >= MAX_IN_FLIGHT:
            return False
        started = time.monotonic()
        try:
            pending = self._start(self._group)
        except FATAL:
            raise
        except Exception as error:
            self._replay(error)
            return True
        self._launches.append(Launch(self._group, pending, started))
        self._group, self._sharing, self._is_closed = [], None, False
        self._settle()
        return True

    def _settled(self) -> bool:
        """Submit what there is; whether every launch is answered."""
        return self._submit() and not self._launches

    def _start(self, jobs: list[Job]) -> Any:
        """The device work of jobs that go together: one launch, or none (None)."""
        for job in jobs:
            if isinstance(job.work, Alone):  # then no other of them has a share in a launch
                return job.work.start()
        attends = [attend for job in jobs for attend in job.attends]
        if not attends:
            return None
        return self._store.backend.attend(attends)

    def _settle(self) -> None:
        """Answer the launches that are done, oldest first."""
        while self._launches and self._launches[0].done:
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
            self._learn(launch)

    def _finish(self, launch: Launch) -> None:
        """Complete the answers of a launch that is done."""
        result: Any = () if launch.pending is None else launch.pending.result()
        taken = 0
        for job in launch.jobs:
            match job.work:
                case Grouped(attends, finish):
                    finish(result[taken : taken + len(attends)])
                    taken += len(attends)
                case Alone():
                    job.work.finish(result)
                case _:  # nothing was left to do, or its error is the answer
                    continue
            if launch.pending is not None:
                spent = launch.pending.seconds
                job.seconds.plan += spent.plan
                job.seconds.copy_in += spent.copy_in
                job.seconds.kernel += spent.kernel
                job.seconds.copy_out += spent.copy_out
        launch.finished = time.monotonic()

    def _learn(self, launch: Launch) -> None:
        """Count a launch of attention, and hold its estimate against what it took, if it had the
        device alone."""
        grouped = [job.work for job in launch.jobs if isinstance(job.work, Grouped)]
        if grouped:
            attends = [attend for work in grouped for attend in work.attends]
            self._metrics.batch(sum(attend.q.shape[0] for attend in attends))
        if len(grouped) == 1 and not self._launches:
            spent = launch.finished - launch.started
            self._store.pace.correct("attend", grouped[0].cost, spent)

    def _answer(self, jobs: Iterable[Job]) -> None:
        """Count what succeeded, so that whoever is answered finds it counted; send the replies."""
        for job in jobs:
            self._count(job)
            self._reply(job)

    def _count(self, job: Job) -> None:
        metrics = self._metrics
        if isinstance(job.error, OutOfPages):
            metrics.out_of_pages()
        if job.error is not None or job.work is None:
            return
        counts = job.work.counts
        if counts.appended:
            metrics.appended(counts.appended)
        if counts.looked_up:
            metrics.looked_up(counts.looked_up, counts.found)
        if counts.mode is not None:
            metrics.kv_read(counts.read_bytes, counts.saved_bytes, counts.mode)

    # When a launch fails.

    def _replay(self, error: Exception) -> None:
        """Undo all that is not settled, newest first, and run each operation again by itself.

        So an operation that fails takes nobody with it, and leaves no trace. One that was alone
        already is not run twice.
        """
        jobs = [job for launch in self._launches for job in launch.jobs] + self._group
        self._wait_out(launch for launch in self._launches if launch.pending is not None)
        self._launches.clear()
        self._group, self._sharing, self._is_closed = [], None, False
        for job in reversed(jobs):
            if job.extension is not None:
                self._store.undo(job.extension)
        if len(jobs) == 1:
            jobs[0].error = self._refusal(jobs[0], error)
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
        launch = Launch([job], None)
        try:
            if isinstance(job.work, Sliced):  # by now it is thought to take longer
                job.work.run()
                return
            launch.pending = self._start(launch.jobs)
            self._finish(launch)
        except FATAL:
            raise
        except Exception as error:
            if isinstance(job.work, Sliced):
                job.work.undo()
            elif job.extension is not None:
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
                LOG.warning("a launch to be run again failed too: %r", error)

    def _refusal(self, job: Job, error: Exception) -> Exception:
        """The error as the caller is to see it; a bug is logged here, with its traceback."""
        refusal = as_refusal(error, job.request.tenant)
        if refusal is not None:
            return refusal.with_traceback(None)  # its frames would keep the job, and it the tensors
        name = job.request.operation.name
        LOG.error("%s failed: this is a bug", name, exc_info=error)
        return Internal(f"{name} failed, and changed nothing; the log has the traceback")
