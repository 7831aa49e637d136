"""Open steps: each goes through its layers as its caller does, and is ended, or aborted and undone.

A step holds its sequences from its turn to its end. Steps of one lane follow each other, so the
next may begin while one still runs; when a step is aborted, those behind it are aborted with it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kernels.lanes import Lane, Lanes
from service.engine.handlers.table import turn_of
from service.engine.loop.job import Job, Opened
from service.engine.loop.long_work import unwanted
from service.engine.store.store import FATAL
from service.errors import Cancelled, DeadlineExceeded, Internal, InvalidRequest
from service.metrics import Metrics

LOG: Final = logging.getLogger("attnd.engine")
SPIN_S: Final = 0.002
"""A step that is younger is looked after all the time, an older one every millisecond."""
FREE_S: Final = 0.005
"""Between two looks after callers whose steps were aborted."""
BEHIND: Final = "a step before it on the same lane was aborted, and this one with it"


@dataclass(slots=True, eq=False)
class Track:
    """The steps on one lane, oldest first; `error`: why they are being aborted."""

    jobs: deque[tuple[Job, Opened]]
    error: Exception | None = None
    spoilt: bool = False
    """A step was aborted: none is taken until the caller has had the flags cleared."""


class OpenSteps:
    """One thread's. `end` is told of every step that is over, and how."""

    def __init__(
        self, metrics: Metrics, lanes: Lanes, end: Callable[[Job, Exception | None], None]
    ) -> None:
        self._metrics = metrics
        self._deep, self._polled = lanes.deep, lanes.polled
        self._end = end
        self._tracks: dict[Lane, Track] = {}
        self._owners: dict[str, tuple[Lane, int]] = {}
        """Whose open steps a sequence belongs to, and how many of them."""
        self._open = 0
        """How many there are: an echo is open and has no sequence."""
        self._latest = self._freed = 0.0

    def __bool__(self) -> bool:
        """Whether any is open."""
        return self._open > 0

    def __contains__(self, name: str) -> bool:
        """Whether a sequence is an open step's."""
        return name in self._owners

    @property
    def is_young(self) -> bool:
        """Whether a step began or ended just now, on lanes that have to be looked at."""
        return self._polled and time.monotonic() - self._latest < SPIN_S

    def stop(self, job: Job, lane: Lane | None) -> bool:
        """Whether a job has to wait: for sequences of an open step, or for room on its `lane`."""
        if lane is not None:
            track = self._tracks.get(lane)
            if track is not None and (len(track.jobs) >= self._deep or track.error is not None):
                return True
        if not self._owners:
            return False
        turn, request = turn_of(job.request), job.request
        prefix = turn.sweeps(request)
        if prefix is not None and any(name.startswith(prefix) for name in self._owners):
            return True
        return self._belong(turn.reads(request), lane) or self._belong(turn.writes(request), lane)

    def _belong(self, names: Iterable[str], lane: Lane | None) -> bool:
        """Whether one of the sequences is an open step's of another lane."""
        owners = self._owners
        return any(name in owners and owners[name][0] is not lane for name in names)

    def check(self, lane: Lane) -> None:
        """Raises `InvalidRequest` on a lane whose flags are not what they should be."""
        track = self._tracks.get(lane)
        if track is not None and track.spoilt:
            rule = "a step of this arena was aborted: send DEVICE again before the next step"
            raise InvalidRequest("step", "given", rule)

    def begin(self, job: Job, work: Opened) -> None:
        track = self._tracks.setdefault(work.lane, Track(deque()))
        track.jobs.append((job, work))
        self._open += 1
        for name in turn_of(job.request).writes(job.request):
            lane, count = self._owners.get(name, (work.lane, 0))
            self._owners[name] = (lane, count + 1)
        self._latest = time.monotonic()

    def layer(self, job: Job, layer: int) -> Exception | None:
        """The caller says that a layer of its step is ready; what is wrong with that, if it is."""
        work = job.work
        track = self._tracks.get(work.lane) if isinstance(work, Opened) else None
        if track is None or not isinstance(work, Opened) or track.error is not None:
            return InvalidRequest("ready", layer, "its step is not open")
        try:
            if track.jobs[0][0] is not job:
                raise ValueError(f"layer {layer} is ready, but the step before is not over")
            work.run.layer(layer)
        except ValueError as error:
            track.error = InvalidRequest("ready", layer, str(error))
        except FATAL:
            raise
        except Exception as failure:
            LOG.error("layer %d of a step failed: this is a bug", layer, exc_info=failure)
            track.error = Internal("the step failed, and was undone; the log has the traceback")
        return track.error

    def advance(self) -> None:
        """End the steps that are over, and let those go through that are not to go on."""
        if self.any_spoilt:
            self._free_callers()
        for track in self._tracks.values():
            while track.jobs and track.error is None and track.jobs[0][1].run.done:
                self._close(track.jobs.popleft()[0], None)
            if not track.jobs:
                continue
            if track.error is None:
                track.error = unwanted(track.jobs[0][0])
            if track.error is not None:
                self._abort(track, track.error)

    def abort_all(self, error: Exception, timeout_s: float) -> None:
        """End every step with `error`, undone; waits for the device, but not for ever."""
        ends = time.monotonic() + timeout_s
        for track in self._tracks.values():
            track.error = track.error or error
        while self and time.monotonic() < ends:
            self.advance()
            time.sleep(1e-4)

    # The lanes themselves.

    def is_idle(self, lane: Lane) -> bool:
        """Whether nothing runs on the lane."""
        track = self._tracks.get(lane)
        return track is None or not track.jobs

    @property
    def any_spoilt(self) -> bool:
        """Whether callers of aborted steps may still wait for flags."""
        return bool(self._tracks) and any(track.spoilt for track in self._tracks.values())

    def _free_callers(self) -> None:
        """Now and then, since nobody knows when they begin to wait."""
        now = time.monotonic()
        if now - self._freed < FREE_S:
            return
        self._freed = now
        for lane, track in self._tracks.items():
            if track.spoilt:
                lane.free_caller()

    def forget(self, lane: Lane) -> None:
        """The lane is idle, and its caller has gone or starts afresh."""
        self._tracks.pop(lane, None)

    # Ends.

    def _abort(self, track: Track, error: Exception) -> None:
        """Let all that is on the lane go through; then undo it, the latest first."""
        track.spoilt = True
        if not all(work.run.done for _, work in track.jobs):
            for _, work in track.jobs:
                work.run.release()
            if not all(work.run.done for _, work in track.jobs):
                return
        jobs = list(track.jobs)
        track.jobs.clear()
        track.error = None
        for job, work in reversed(jobs):
            work.undo()
            self._close(job, error if job is jobs[0][0] else Cancelled(BEHIND))

    def _close(self, job: Job, error: Exception | None) -> None:
        self._open -= 1
        for name in turn_of(job.request).writes(job.request):
            lane, count = self._owners[name]
            if count > 1:
                self._owners[name] = (lane, count - 1)
            else:
                del self._owners[name]
        if isinstance(error, Cancelled):
            self._metrics.rejected("cancelled")
        elif isinstance(error, DeadlineExceeded):
            self._metrics.rejected("deadline_exceeded")
        job.seconds.kernel += time.monotonic() - job.arrived - job.seconds.queue
        self._latest = time.monotonic()
        self._end(job, error)
