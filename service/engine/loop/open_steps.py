"""Open steps: each follows its caller through the layers, and ends, or is aborted and undone.

A step uses its sequences from its turn to its end. Steps of one lane follow each other, so the
next may begin while one still runs; when a step is aborted, those behind it are aborted with it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kernels.lanes.lane import Lane, Lanes
from service.engine.handlers.table import HANDLERS
from service.engine.loop.job import Job
from service.engine.loop.long_work import unwanted
from service.engine.store.store import FATAL
from service.engine.work.fair import FairQueue
from service.engine.work.request import Request
from service.engine.work.work import OpenedStep
from service.errors import Cancelled, Internal, InvalidRequest

LOG: Final = logging.getLogger("attnd.engine")
SPIN_S: Final = 0.002
"""The loop polls without pause for steps and launches younger than this, then every
millisecond."""
FREE_S: Final = 0.005
"""Interval between two attempts to unblock the callers of aborted steps."""
BEHIND: Final = "a step before it on the same lane was aborted, and this one with it"


@dataclass(slots=True, eq=False)
class LaneSteps:
    """The steps on one lane, oldest first; `error`: why they are being aborted."""

    jobs: deque[tuple[Job, OpenedStep]]
    error: Exception | None = None
    was_aborted: bool = False
    """Whether a step was aborted: the lane takes none until the caller has the flags cleared."""


class OpenSteps:
    """Belongs to the engine's thread. `end` gets every step that is over, and its error, if any;
    `charge` the seconds of each piece of a layer that the engine runs itself."""

    def __init__(
        self,
        lanes: Lanes,
        end: Callable[[Job, Exception | None], None],
        charge: Callable[[Job, float], None],
    ) -> None:
        self._deep, self._polled = lanes.deep, lanes.polled
        self._end = end
        self._charge = charge
        self._by_lane: dict[Lane, LaneSteps] = {}
        self._users: dict[str, tuple[Lane, int]] = {}
        """The lane whose open steps use a sequence, and how many do."""
        self._ready: FairQueue[Lane] = FairQueue()
        """Lanes in host memory with layers that are ready."""
        self._changed_at = self._unblocked_at = 0.0
        self.count = 0
        """Number of open steps: an echo is open and has no sequence."""
        self.num_aborted = 0
        """Number of lanes with aborted steps, whose callers may still wait for flags."""

    def __contains__(self, name: str) -> bool:
        """Whether an open step uses a sequence."""
        return name in self._users

    @property
    def is_young(self) -> bool:
        """Whether a step began or ended just now, on lanes that must be polled."""
        return self._polled and time.monotonic() - self._changed_at < SPIN_S

    def blocks(self, request: Request, lane: Lane | None) -> bool:
        """Whether a request must wait: for sequences of an open step, or for room on its `lane`."""
        if lane is not None:
            steps = self._by_lane.get(lane)
            if steps is not None and (len(steps.jobs) >= self._deep or steps.error is not None):
                return True
        if not self._users:
            return False
        handler = HANDLERS[request.operation.name]
        prefix = handler.sweeps(request)
        if prefix is not None and any(name.startswith(prefix) for name in self._users):
            return True
        return self._uses(handler.reads(request), lane) or self._uses(handler.writes(request), lane)

    def _uses(self, names: Iterable[str], lane: Lane | None) -> bool:
        """Whether an open step of another lane uses one of the sequences."""
        users = self._users
        return any(name in users and users[name][0] is not lane for name in names)

    def check(self, lane: Lane) -> None:
        """Raises `InvalidRequest` on a lane that has the flags of an aborted step."""
        steps = self._by_lane.get(lane)
        if steps is not None and steps.was_aborted:
            rule = "a step of this arena was aborted: send DEVICE again before the next step"
            raise InvalidRequest("step", "given", rule)

    def begin(self, job: Job, work: OpenedStep) -> None:
        self._by_lane.setdefault(work.lane, LaneSteps(deque())).jobs.append((job, work))
        self.count += 1
        for name in HANDLERS[job.request.operation.name].writes(job.request):
            lane, count = self._users.get(name, (work.lane, 0))
            self._users[name] = (lane, count + 1)
        self._changed_at = time.monotonic()

    def layer(self, job: Job, layer: int) -> None:
        """A caller reports a layer of its step ready. One out of turn aborts the step."""
        work = job.work
        steps = self._by_lane.get(work.lane) if isinstance(work, OpenedStep) else None
        if steps is None or not isinstance(work, OpenedStep) or steps.error is not None:
            return
        try:
            if steps.jobs[0][0] is not job:
                raise ValueError(f"layer {layer} is ready, but the step before is not over")
            had_ready = work.run.has_ready
            work.run.layer(layer)
        except ValueError as error:
            steps.error = InvalidRequest("ready", layer, str(error))
            return
        if not had_ready:
            self._ready.append(job.request.tenant.namespace, work.lane)

    @property
    def jobs(self) -> list[Job]:
        """All open steps, which may yet be undone."""
        return [job for steps in self._by_lane.values() for job, _ in steps.jobs]

    @property
    def num_ready(self) -> int:
        """Lanes with layers that the engine runs itself and that are ready."""
        return self._ready.count

    def run_layers(self, seconds: float) -> None:
        """Run pieces of layers that are ready, for `seconds` or until the first piece ends."""
        ends = time.monotonic() + seconds
        while self._ready.count:
            lane = self._ready.pop()
            steps = self._by_lane.get(lane)
            if steps is None or not steps.jobs or steps.error is not None:
                continue
            job, work = steps.jobs[0]
            namespace, started = job.request.tenant.namespace, time.monotonic()
            try:
                layer = work.run.advance()
            except FATAL:
                raise
            except Exception as failure:
                LOG.error("a layer of a step failed: this is a bug", exc_info=failure)
                steps.error = Internal("the step failed, and was undone; the log has the traceback")
                continue
            if layer is not None:
                work.layer_done(layer)
            now = time.monotonic()
            self._charge(job, now - started)
            self._ready.charge(namespace, now - started)
            if work.run.has_ready:
                self._ready.append(namespace, lane)
            if now > ends:
                return

    def advance(self) -> None:
        """End finished steps, and abort failed, cancelled and late ones."""
        if self.num_aborted:
            self._unblock_callers()
        for steps in self._by_lane.values():
            while steps.jobs and steps.error is None and steps.jobs[0][1].run.done:
                self._close(steps.jobs.popleft()[0], None)
            if not steps.jobs:
                continue
            if steps.error is None:
                steps.error = unwanted(steps.jobs[0][0])
            if steps.error is not None:
                self._abort(steps, steps.error)

    def abort_all(self, error: Exception, timeout_s: float) -> None:
        """End every step with `error`, undone; waits `timeout_s` for the device at most."""
        ends = time.monotonic() + timeout_s
        for steps in self._by_lane.values():
            steps.error = steps.error or error
        while self.count and time.monotonic() < ends:
            self.advance()
            time.sleep(1e-4)

    def forget(self, lane: Lane) -> None:
        """Remove an idle lane whose caller has disconnected or has its flags cleared."""
        steps = self._by_lane.pop(lane, None)
        self.num_aborted -= steps is not None and steps.was_aborted

    def _unblock_callers(self) -> None:
        """Unblock callers of aborted steps, repeatedly: they may begin to wait at any time."""
        now = time.monotonic()
        if now - self._unblocked_at < FREE_S:
            return
        self._unblocked_at = now
        for lane, steps in self._by_lane.items():
            if steps.was_aborted:
                lane.unblock_caller()

    def _abort(self, steps: LaneSteps, error: Exception) -> None:
        """Drain the lane, then roll back newest first."""
        self.num_aborted += not steps.was_aborted
        steps.was_aborted = True
        if not all(work.run.done for _, work in steps.jobs):
            for _, work in steps.jobs:
                work.run.release()
            if not all(work.run.done for _, work in steps.jobs):
                return
        jobs = list(steps.jobs)
        steps.jobs.clear()
        steps.error = None
        for job, work in reversed(jobs):
            work.undo()
            self._close(job, error if job is jobs[0][0] else Cancelled(BEHIND))

    def _close(self, job: Job, error: Exception | None) -> None:
        self.count -= 1
        for name in HANDLERS[job.request.operation.name].writes(job.request):
            lane, count = self._users[name]
            if count > 1:
                self._users[name] = (lane, count - 1)
            else:
                del self._users[name]
        job.seconds.kernel += time.monotonic() - job.arrived - job.seconds.queue
        self._changed_at = time.monotonic()
        self._end(job, error)
