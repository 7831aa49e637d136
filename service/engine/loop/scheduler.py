"""The scheduler: gives operations their turns, in order, with long work cut into slices.

What waits is taken in order of arrival, from the namespace that has used the least time; compatible
attention shares a launch. Long work runs a slice at a time, between the turns of others, and holds
its sequences until it is done.

A round of turns ends after `ROUND_SHARE` of a slice, so that new calls are read; a launch takes in
no more than a slice of work. What a turn, a launch or a slice takes is charged to its namespace.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Final

from kernels.lanes import Lanes
from service.core.pool.budget import NO_LIMIT, EvictionPaused
from service.engine.handlers.table import begin_turn, refuse_leaving, sharing_of, turn_of
from service.engine.loop.errors import refusal_of
from service.engine.loop.fair import FairQueue
from service.engine.loop.job import Alone, Job, Opened, Sliced
from service.engine.loop.launches import Launches
from service.engine.loop.long_work import Longs
from service.engine.loop.open_steps import OpenSteps
from service.engine.loop.sequence_locks import Holds
from service.engine.store.store import FATAL, Store
from service.errors import Cancelled, DeadlineExceeded
from service.metrics import Metrics
from service.processes.watchdog import Watchdog

ABORT_S: Final = 2.0
"""How long steps may take to let go of the device when everything is given up."""
ROUND_SHARE: Final = 0.25
"""Of a slice: how long turns are given before the engine listens to its callers again."""
EVICTED_A_TURN: Final = 1024
"""Pages that one turn evicts at most: some milliseconds, or 10 where each is a node of its own."""
LEAST_ROUND_S: Final = 1e-3
LOOKS_PER_ROUND: Final = 4
"""Times as long may be spent in all, where many jobs that are held up must be looked at."""
NOTED_S: Final = 1e-3
"""What takes less says nothing of a slow pass."""


def has_been_read(_: Job) -> bool:
    """Where requests are read before they wait."""
    return True


class Scheduler:
    """One thread's. `reply` takes a job whose answer is in its place, or whose `error` is set.

    `read` reads on in a job's request, for a slice at most, and returns whether it is read now; it
    raises the refusal. `note` is told what took how long, by the operation's name.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        reply: Callable[[Job], None],
        lanes: Lanes,
        read: Callable[[Job], bool] = has_been_read,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._store = store
        self._read = read
        self._watchdog = watchdog or Watchdog("engine", metrics)
        self._round_s = max(ROUND_SHARE * store.pace.slice_s, LEAST_ROUND_S)
        self._metrics = metrics
        self._reply = reply
        self._waiting: FairQueue[Job] = FairQueue()
        self._launches = Launches(store, metrics, self._begin, self._answer, self._charge)
        self._holds = Holds()
        self._longs = Longs(store, metrics, self._end_long, self._charge)
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
        return bool(self._waiting.count or self._launches or self._longs or self.steps)

    @property
    def steps_only(self) -> bool:
        """Whether open steps, and whoever waits for them, are all there is."""
        return not (self._launches or self._longs)

    @property
    def flight_s(self) -> float:
        """Seconds since the oldest launch in flight went out; 0 when the device is idle."""
        oldest = self._launches.started or self._longs.slice_started
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

    def learn(self) -> None:
        """Let the pace of the device be corrected by what was launched since the last time."""
        self._launches.learn()

    def round(self) -> None:
        """All turns that can be given now, then one slice of long work. Raises `FATAL`."""
        self._store.tick()
        self._launches.settle()
        if not self._store.has_expired:
            self._take_turns()
        elif self._launches.settled():
            self._store.expire(self._is_in_use)
            self._take_turns()
        self._launches.submit()
        self._launches.settle()
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

    def _charge(self, job: Job, seconds: float) -> None:
        """Engine or device were at a job for so long."""
        self._waiting.charge(job.request.tenant.namespace, seconds)
        if seconds > NOTED_S:
            self._watchdog.note(job.request.operation.name, seconds)

    def _take_turns(self) -> None:
        """Give turns until the round is over, or one has to wait for the device; those held up keep
        their order."""
        waiting, launches = self._waiting, self._launches
        if not waiting.count:
            return
        held: list[Job] = []
        behind = Holds() if self._holds or self.steps else None
        ends, latest = math.inf, time.monotonic() + LOOKS_PER_ROUND * self._round_s
        while waiting.count and not (launches.is_closed and not launches.submit()):
            job, now = waiting.first(), time.monotonic()
            if now > ends or now > latest:
                break
            if not self._is_wanted(job, now):
                waiting.pop()
            elif job.is_unread and not self._has_read(job, now):
                ends = min(ends, now + self._round_s)
            elif behind is not None and self._is_held(job, behind):
                behind.take(job.request)
                held.append(waiting.pop())
                self._charge(job, time.monotonic() - now)
            elif self._turn(job):
                waiting.pop()
                if ends == math.inf:  # those held up cost little, and others stand behind them
                    ends = now + self._round_s
                held_now = self._holds or self.steps
                behind = Holds() if behind is None and held_now else behind
                if waiting.count and not waiting.depth(job.request.tenant.namespace):
                    launches.close_group()  # the namespace waits for nothing else
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

    def _has_read(self, job: Job, now: float) -> bool:
        """Read on in a request: False when it is refused, or when others have their turns first."""
        try:
            if self._read(job):
                return True
        except Exception as error:
            self._waiting.pop()
            self._refuse(job, refusal_of(job, error))
        else:
            self._waiting.pass_on()
        self._charge(job, time.monotonic() - now)
        return False

    def _is_wanted(self, job: Job, now: float) -> bool:
        """False when its deadline passed: it is answered, not run."""
        job.seconds.queue = now - job.arrived
        if now > job.deadline:
            self._metrics.rejected("deadline_exceeded")
            waited = f"it waited {job.seconds.queue:.3f} s for its turn and did not run"
            self._refuse(job, DeadlineExceeded(f"the deadline passed: {waited}"))
            return False
        return True

    def _refuse(self, job: Job, error: Exception) -> None:
        started = time.monotonic()
        job.error = error
        self._reply(job)
        self._charge(job, time.monotonic() - started)

    def _turn(self, job: Job) -> bool:
        """One job's turn; False when the device has to finish something first, or when more pages
        have to be evicted for it, before which others have their turns."""
        turn, launches = turn_of(job.request), self._launches
        sharing = sharing_of(job.request, turn)
        if not launches.has_room(sharing):
            return False
        if (turn.is_barrier or job.alone) and not launches.settled():
            return False
        opens = job.request.step is not None
        if opens and launches.uses(set(job.request.fields.ids)) and not launches.settled():
            return False
        budget = self._store.tree.budget
        budget.most_evicted = EVICTED_A_TURN
        try:
            self._begin(job)
        except EvictionPaused:
            self._waiting.pass_on()
            return False
        finally:
            budget.most_evicted = NO_LIMIT
        if isinstance(job.work, Sliced):
            return self._begin_long(job, job.work)
        if isinstance(job.work, Opened):
            self.steps.begin(job, job.work)
            return True
        launches.add(job, sharing)
        if turn.is_barrier or isinstance(job.work, Alone):
            launches.submit()  # a barrier's reply goes out here: it is never run again
        return True

    def _begin(self, job: Job) -> None:
        """The turn itself: fills `work`, or `error`."""
        started = time.monotonic()
        job.work = job.error = None
        try:
            if job.request.step is not None:
                self.steps.check(job.request.step.lane)
            if self._store.leaving:
                refuse_leaving(self._store, job.request)
            job.work = begin_turn(self._store, job.request, job.seconds)
        except (*FATAL, EvictionPaused):
            raise
        except Exception as error:
            job.error = refusal_of(job, error)
        finally:
            self._charge(job, time.monotonic() - started)

    def _begin_long(self, job: Job, work: Sliced) -> bool:
        """Long work begins when nothing before it can be undone beneath it any more."""
        if not job.alone and self._launches:
            work.steps.close()
            work.undo()
            job.work, job.alone = None, True
            self._launches.submit()
            return False
        self._holds.take(job.request, work.made)
        read = turn_of(job.request).reads(job.request)
        job.watch = self._store.tree.books.watch((*read, *work.made))
        self._longs.begin(job)
        return True

    def _end_long(self, job: Job, error: Exception | None) -> None:
        """Long work is done, or is not to go on (and has been undone)."""
        if isinstance(job.work, Sliced):
            self._holds.release(job.request, job.work.made)
        if error is not None:
            job.error = error if isinstance(error, Cancelled) else refusal_of(job, error)
        self._answer([job])

    def _end_step(self, job: Job, error: Exception | None) -> None:
        """A step is over, or was not to go on (and has been undone)."""
        job.error = error
        self._answer([job])

    # Replies.

    def _answer(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.error is None:
                self._reply(job)
            else:
                self._refuse(job, job.error)
