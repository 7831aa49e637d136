"""The scheduler: gives operations their turns, in order, and cuts long work into slices.

docs/structures.md shows a round. Long work locks its sequences until it is done. The time of a
turn, a launch or a slice is charged to its namespace.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from kernels.lanes.lane import Lanes
from service.core.nodes import Leaf
from service.core.pool.budget import NO_LIMIT, EvictionPaused
from service.core.sequences.windows import Windows
from service.core.values import Extension
from service.engine.handlers.table import HANDLERS, sharing_of
from service.engine.loop.job import Job, refusal_of
from service.engine.loop.launches import Launches
from service.engine.loop.long_work import LongWork, SequenceLocks
from service.engine.loop.open_steps import OpenSteps
from service.engine.store.store import FATAL, Store
from service.engine.work.fair import FairQueue
from service.engine.work.request import Request
from service.engine.work.work import Completed, OpenedStep, Seconds, SlicedWork, SoloLaunch, Work
from service.errors import Cancelled, DeadlineExceeded
from service.image.json_text import dump_json
from service.metrics import Metrics
from service.processes.watchdog import Watchdog

ABORT_S: Final = 2.0
"""Longest wait for open steps to leave the device when the engine gives up."""
ROUND_SHARE: Final = 0.25
"""Share of a slice that a round of turns may take."""
LONG_SHARE: Final = 0.5
"""Share of a slice after which a round's turns and launches have taken long."""
EVICTED_A_TURN: Final = 1024
"""Maximum pages that one turn evicts: some milliseconds, or 10 where each is a node of its own."""
LEAST_ROUND_S: Final = 1e-3
LOOKS_PER_ROUND: Final = 4
"""Factor by which a round may be longer where many jobs wait for locked sequences."""
NAMING_S: Final = 1e-3
"""Longest time for naming pages before a reply, and in a round."""
LONGEST: Final = 2**31
"""More tokens than a sequence has."""
NOTED_S: Final = 1e-3
"""Shortest time that is reported to the watchdog."""


class Scheduler:
    """Belongs to the engine's thread.

    `reply` gets jobs whose answer is in its place, or whose `error` is set. `read` reads a job's
    request, and raises the refusal.
    `must_wait`: whether a job's caller first has to read earlier answers.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        reply: Callable[[Job], None],
        lanes: Lanes,
        read: Callable[[Job], None] = lambda _: None,
        watchdog: Watchdog | None = None,
        must_wait: Callable[[Job], bool] = lambda _: False,
    ) -> None:
        self._store = store
        self._read = read
        self._must_wait = must_wait
        self._watchdog = watchdog or Watchdog("engine", metrics)
        self._round_s = max(ROUND_SHARE * store.pace.slice_s, LEAST_ROUND_S)
        self._has_passed = False
        """Whether the latest round passed the slice of long work on to the next."""
        self.is_behind = False
        """Whether the latest round ended before all that could have turns had them."""
        self._reply = reply
        self._locks = SequenceLocks()
        self.queue: FairQueue[Job] = FairQueue()
        """Jobs whose turn has not come."""
        self.launches = Launches(store, metrics, self._begin, self._answer, self._charge)
        self.long_work = LongWork(store, metrics, self._end, self._charge)
        self.steps = OpenSteps(lanes, self._end, self._charge)
        self._unnamed: dict[Leaf, None] = {}
        """Sequences that may have pages to name now."""

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to do but wait for callers."""
        return bool(
            self.queue.count
            or self.launches.in_flight
            or self.launches.group
            or self.long_work.count
            or self.steps.count
            or self._unnamed
        )

    def cancel(self, job: Job) -> None:
        """The caller wants no answer: a waiting job ends at once, long work at its next slice."""
        job.cancelled = True
        if job.work is None and self.queue.remove(job.request.tenant.namespace, job):
            job.seconds.queue = time.monotonic() - job.arrived
            self._refuse(job, Cancelled("cancelled by the caller before its turn"))

    def give_up(self, error: Exception) -> None:
        """Fail all waiting and long jobs with `error`; launches in flight still finish."""
        waiting, self.queue = self.queue, FairQueue()
        self.long_work.stop_all(error)
        self.steps.abort_all(error, ABORT_S)
        for job in waiting:
            self._refuse(job, error)

    def run_slice(self, began: float) -> None:
        """A slice of long work. After turns and launches that took long since `began`, new calls
        have their turns first, but not twice running."""
        spent = time.monotonic() - began
        self._has_passed = not self._has_passed and spent > LONG_SHARE * self._store.pace.slice_s
        if not self._has_passed:
            self.long_work.run_slice()

    def run_layers(self) -> None:
        """Pieces of layers that the engine runs itself, for a round's share of a slice."""
        if self.steps.num_ready:
            self.steps.run_layers(self._round_s)

    # Turns.

    def expire(self) -> bool:
        """End the leases, pins, and idle sequences whose time is over.

        False where sequences have to wait for the launches in flight: no turn may come before.
        """
        store = self._store
        if not store.tick():
            return True
        if not self.launches.drained():
            return False
        store.expire(lambda name: name in self._locks or name in self.steps)
        return True

    def take_turns(self) -> None:
        """Give turns until the round is over, or one has to wait for the device.

        Jobs whose sequences are in use, or whose callers do not read, are passed over and keep
        their order.
        """
        queue, launches = self.queue, self.launches
        self.is_behind = False
        if not queue.count:
            return
        blocked: list[Job] = []
        behind = SequenceLocks() if self._locks.count or self.steps.count else None
        ends, latest = math.inf, time.monotonic() + LOOKS_PER_ROUND * self._round_s
        while queue.count and not (launches.is_closed and not launches.submit()):
            job, now = queue.first(), time.monotonic()
            if now > ends or now > latest:
                self.is_behind = True
                break
            job.seconds.queue = now - job.arrived
            if now > job.deadline:
                queue.pop()
                waited = f"it waited {job.seconds.queue:.3f} s for its turn and did not run"
                self._refuse(job, DeadlineExceeded(f"the deadline passed: {waited}"))
            elif job.is_unread and self._must_wait(job):
                blocked.append(queue.pop())
                self._charge(job, time.monotonic() - now)
            elif job.is_unread and not self._has_read(job, now):
                ends = min(ends, now + self._round_s)
            elif behind is not None and self._is_blocked(job, behind):
                behind.take(job.request)
                blocked.append(queue.pop())
                self._charge(job, time.monotonic() - now)
            elif self._turn(job):
                queue.pop()
                if ends == math.inf:  # blocked jobs cost little, and others wait behind them
                    ends = now + self._round_s
                if behind is None and (self._locks.count or self.steps.count):
                    behind = SequenceLocks()
                if queue.count and not queue.depth(job.request.tenant.namespace):
                    launches.is_closed = bool(launches.group)  # it waits for nothing else
            else:
                break
        for job in reversed(blocked):
            queue.append(job.request.tenant.namespace, job, first=True)

    def _has_read(self, job: Job, now: float) -> bool:
        """Read a job's request; False where it is refused."""
        try:
            self._read(job)
        except Exception as error:
            self.queue.pop()
            self._refuse(job, refusal_of(job, error))
            self._charge(job, time.monotonic() - now)
            return False
        return True

    def _is_blocked(self, job: Job, behind: SequenceLocks) -> bool:
        """Whether long work, an open step, or a job that waits for these uses its sequences."""
        request = job.request
        lane = None if request.step is None else request.step.lane
        return (
            self._locks.blocks(request)
            or behind.blocks(request)
            or self.steps.blocks(request, lane)
        )

    def _turn(self, job: Job) -> bool:
        """One job's turn; False when the device has to finish something first, or when more pages
        have to be evicted for it, before which others have their turns."""
        request, launches = job.request, self.launches
        handler = HANDLERS[request.operation.name]
        sharing = request.known.get("sharing") or sharing_of(request, handler)
        is_other = sharing is not None and launches.sharing not in (None, sharing)
        if is_other and not launches.submit():
            return False
        if (handler.is_barrier or job.alone) and not launches.drained():
            return False
        in_use = request.step is not None and launches.uses(set(request.fields.ids))
        if in_use and not launches.drained():
            return False
        budget = self._store.tree.budget
        budget.most_evicted = EVICTED_A_TURN
        try:
            self._begin(job)
        except EvictionPaused:
            self.queue.pass_on()
            return False
        finally:
            budget.most_evicted = NO_LIMIT
        if isinstance(job.work, SlicedWork):
            return self._begin_long(job, job.work)
        if isinstance(job.work, OpenedStep):
            self.steps.begin(job, job.work)
            return True
        launches.add(job, sharing)
        if handler.is_barrier or isinstance(job.work, SoloLaunch):
            launches.submit()  # a barrier's reply goes out here: it is never run again
        return True

    def _begin(self, job: Job) -> None:
        """Call the job's handler, which fills `work`, or `error`."""
        started = time.monotonic()
        job.work = job.error = None
        try:
            if job.request.step is not None:
                self.steps.check(job.request.step.lane)
            self._store.deadline = job.deadline
            job.work = handle(self._store, job.request, job.seconds)
        except (*FATAL, EvictionPaused):
            raise
        except Exception as error:
            job.error = refusal_of(job, error)
        finally:
            self._charge(job, time.monotonic() - started)

    def _begin_long(self, job: Job, work: SlicedWork) -> bool:
        """Start long work once nothing before it can be undone; False while something can."""
        launches = self.launches
        if not job.alone and (launches.group or launches.in_flight):
            work.slices.close()
            work.undo()
            job.work, job.alone = None, True
            launches.submit()
            return False
        self._locks.take(job.request, work.made)
        read = HANDLERS[job.request.operation.name].reads(job.request)
        job.watch = self._store.tree.books.watch((*read, *work.made))
        self.long_work.begin(job)
        return True

    # Ends.

    def _end(self, job: Job, error: Exception | None) -> None:
        """Long work or a step is done, or was stopped and undone with an error."""
        if isinstance(job.work, SlicedWork):
            self._locks.release(job.request, job.work.made)
        if error is not None:
            job.error = error if isinstance(error, Cancelled) else refusal_of(job, error)
        self._answer(job)

    def _answer(self, job: Job) -> None:
        if job.error is None:
            if self._store.tree.naming.due:
                started = time.monotonic()
                self._find_unnamed(job)
                self.name_pages()
                self._charge(job, time.monotonic() - started)
            if self._store.tree.windows is not None and job.rows is not None:
                self._return_windows(self._store.tree.windows, job.request, job.rows)
            if job.request.report is not None:
                job.request.report()
            self._reply(job)
        else:
            self._refuse(job, job.error)

    def _find_unnamed(self, job: Job) -> None:
        """Rows of a job's sequences are stored for good: their pages may be named now."""
        books, due = self._store.tree.books, self._store.tree.naming.due
        for name in HANDLERS[job.request.operation.name].writes(job.request):
            if name in books and (leaf := books.leaf(name)) in due:
                self._unnamed[leaf] = None

    def name_pages(self) -> None:
        """Name pages whose rows are stored, for a fraction of a slice; the next round continues.
        Rows that may yet be undone, and all behind them, do not count."""
        if not self._unnamed:
            return
        ends, naming = time.monotonic() + NAMING_S, self._store.tree.naming
        stored = self._stored()
        for leaf in list(self._unnamed):
            if leaf.id in self._locks:
                continue
            if not naming.name(leaf, stored.get(leaf, LONGEST)):
                del self._unnamed[leaf]
            if time.monotonic() > ends:
                return

    def _stored(self) -> dict[Leaf, int]:
        """The tokens before the rows that may yet be undone, of each sequence that has such."""
        stored: dict[Leaf, int] = {}
        for rows in (job.rows for job in (*self.launches.jobs, *self.steps.jobs)):
            if rows is not None:
                for leaf, before in zip(rows.leaves, rows.before.tolist(), strict=True):
                    stored[leaf] = min(before, stored.get(leaf, before))
        return stored

    def _return_windows(self, windows: Windows, request: Request, rows: Extension) -> None:
        """Return pages that windows have passed, of the sequences to which a request has added
        `rows`. Rows of an append may be attended by a later call, with all that they see. Sequences
        that calls without rows of their own read, or that have pages to name, keep theirs."""
        is_append = request.operation.name == "append"
        lengths = rows.before.tolist() if is_append else rows.lengths.tolist()
        if not windows.is_due(rows.leaves, lengths):
            return
        stored, reading = self._stored(), set[str]()
        for job in (*self.launches.jobs, *self.steps.jobs):
            if job.rows is None or not job.rows.num_stored:
                handler = HANDLERS[job.request.operation.name]
                reading.update(handler.reads(job.request), handler.writes(job.request))
        due = self._store.tree.naming.due
        kept = {
            leaf
            for leaf in rows.leaves
            if leaf.id in reading or leaf.id in self._locks or leaf in due
        }
        if is_append:
            for leaf, before in zip(rows.leaves, lengths, strict=True):
                stored[leaf] = min(before, stored.get(leaf, before))
        windows.settle(rows.leaves, stored, kept)

    def _refuse(self, job: Job, error: Exception) -> None:
        started = time.monotonic()
        job.error = error
        self._reply(job)
        self._charge(job, time.monotonic() - started)

    def _charge(self, job: Job, seconds: float) -> None:
        """Count time that the engine or the device spent on a job."""
        self.queue.charge(job.request.tenant.namespace, seconds)
        if seconds > NOTED_S:
            self._watchdog.note(job.request.operation.name, seconds)


def handle(store: Store, request: Request, seconds: Seconds) -> Work:
    """Call a request's handler, and write the answer's fields where it returns them."""
    handler, place = HANDLERS[request.operation.name], request.place
    if handler.room is not None:
        place.require(handler.room)
    answer = handler.begin(store, request, seconds)
    if not isinstance(answer, dict):
        return answer
    text = dump_json(answer)
    if handler.room is None:
        place.require(2 * len(text))  # quotes are escaped in the header
    place.lay_text(text)
    return Completed()
