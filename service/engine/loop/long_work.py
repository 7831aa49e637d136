"""Long operations: their slices, one after another, each operation in its turn; and the locks on
the sequences that they read or write, many readers or one writer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kernels.backend import Pending
from service.engine.handlers.table import HANDLERS
from service.engine.loop.job import Job
from service.engine.store.store import FATAL, Store
from service.engine.work.fair import FairQueue
from service.engine.work.request import Request
from service.engine.work.work import WAIT, Slice, SlicedWork
from service.errors import Cancelled, DeadlineExceeded, Internal
from service.metrics import Metrics

LOG: Final = logging.getLogger("attnd.engine")
LAST_WAIT_S: Final = 2.0
"""Longest wait for other threads when everything ends."""
CHANGED: Final = "a sequence changed while it was read, and the result is void; see the log"


@dataclass(slots=True, eq=False)
class RunningSlice:
    """A slice on the device."""

    job: Job
    work: SlicedWork
    slice: Slice
    pending: Pending[Any]
    started: float


class LongWork:
    """Runs one slice at a time. `end` gets every operation that is over, and its error, if any;
    `charge` the seconds of each slice."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        end: Callable[[Job, Exception | None], None],
        charge: Callable[[Job, float], None],
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._end = end
        self._charge = charge
        self._queue: FairQueue[tuple[Job, Any, bool]] = FairQueue()
        """Jobs in turn, each with the result of its latest slice, and whether it is ready."""
        self.running: RunningSlice | None = None
        """The slice on the device."""
        self.count = 0
        """Number of operations under way, ..."""
        self.num_ready = 0
        """... and of those whose next slice waits for nothing but its turn."""

    def begin(self, job: Job) -> None:
        self.count += 1
        self._wait(job, None)

    def run_slice(self) -> None:
        """Take the result of a finished slice, and start the next one; any number that wait."""
        if self.running is not None and self.running.pending.done:
            self._finish_slice(self.running)
        for _ in range(self._queue.count):
            if self.running is not None:
                return
            job, result, is_ready = self._queue.pop()
            self.num_ready -= is_ready
            self._start_slice(job, result)
            if (current := self.running) is None:
                return
            if current.pending.done:
                self._finish_slice(current)  # where the device is the processor
            if current.slice.kind != WAIT:
                return

    def stop_all(self, error: Exception) -> None:
        """End every operation with `error`, undone. Those that can no longer be undone run to their
        end, unless they wait for other threads longer than `LAST_WAIT_S`."""
        ends = time.monotonic() + LAST_WAIT_S
        while self.running is not None or self._queue.count:
            if self.running is not None:
                self._finish_slice(self.running)
                continue
            job, result, is_ready = self._queue.pop()
            self.num_ready -= is_ready
            work = job.work
            is_late = not is_ready and time.monotonic() > ends
            if isinstance(work, SlicedWork) and (is_late or not work.must_finish()):
                self._stop(job, work, error)
                continue
            if not is_ready:
                time.sleep(1e-3)
                if self._store.loading is not None:
                    self._store.loading.advance()
                if self._store.records is not None:
                    self._store.records.advance()
            self._start_slice(job, result)

    def _start_slice(self, job: Job, result: Any) -> None:
        """Start the next slice of a job, unless it is over, cancelled or out of time: its namespace
        is charged for its last piece, or its undo, too."""
        work, started = job.work, time.monotonic()
        if not isinstance(work, SlicedWork):
            raise RuntimeError("a long operation without slices: this is a bug")
        if (error := unwanted(job)) is not None and not work.must_finish():
            self._stop(job, work, error)
        elif job.watch is not None and (changed := self._store.tree.books.changed(job.watch)):
            LOG.error("%s changed during %s: this is a bug", changed, job.request.operation.name)
            self._stop(job, work, Internal(CHANGED))
        else:
            try:
                piece = work.slices.send(result)
                self.running = RunningSlice(job, work, piece, piece.start(), started)
                self._metrics.add(1, "slices")
                return
            except StopIteration:
                self._over(job, job.stopped_by)
            except FATAL:
                raise
            except Exception as failure:
                self._stop(job, work, failure)
        self._spend(job, time.monotonic() - started)

    def _finish_slice(self, current: RunningSlice) -> None:
        """Account for a finished slice, and keep its result for the operation's next one."""
        self.running = None
        try:
            result = current.pending.result()
        except FATAL:
            raise
        except Exception as error:
            self._stop(current.job, current.work, error)
            return
        spent = time.monotonic() - current.started
        self._store.pace.correct(current.slice.kind, current.slice.cost, spent)
        current.job.seconds.kernel += spent
        self._spend(current.job, spent)
        self._wait(current.job, result, is_ready=current.slice.kind != WAIT)

    def _spend(self, job: Job, seconds: float) -> None:
        self._charge(job, seconds)
        self._queue.charge(job.request.tenant.namespace, seconds)

    def _over(self, job: Job, error: Exception | None) -> None:
        self.count -= 1
        self._end(job, error)

    def _wait(self, job: Job, result: Any, is_ready: bool = True) -> None:
        """Queue a job's next slice behind other jobs' slices."""
        self.num_ready += is_ready
        self._queue.append(job.request.tenant.namespace, (job, result, is_ready))

    def _stop(self, job: Job, work: SlicedWork, error: Exception) -> None:
        """End an operation between two slices and undo it, in slices where that is long as well."""
        work.slices.close()
        if work.undo_slices is None:
            work.undo()
            self._over(job, error)
            return
        job.stopped_by, job.watch = error, None
        job.work = SlicedWork(
            work.undo_slices(), lambda: None, made=work.made, must_finish=lambda: True
        )
        self._wait(job, None)


def unwanted(job: Job) -> Exception | None:
    """The error for a job that was cancelled or is out of time."""
    if job.cancelled:
        return Cancelled("cancelled by the caller; it was undone")
    if time.monotonic() > job.deadline:
        return DeadlineExceeded("the deadline passed while it ran; it was stopped and undone")
    return None


class SequenceLocks:
    """Locked sequences; `count` is the number of requests that hold locks."""

    def __init__(self) -> None:
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._prefixes: Counter[str] = Counter()
        """Beginnings of ids: every sequence whose id has one is written."""
        self.count = 0

    def __contains__(self, name: str) -> bool:
        return name in self._read or name in self._written or self._has_prefix((name,))

    def take(self, request: Request, made: Sequence[str] = ()) -> None:
        """Lock a request's sequences, and those `made` for it under ids that it does not name."""
        handler = HANDLERS[request.operation.name]
        self.count += 1
        self._read.update(handler.reads(request))
        self._written.update(handler.writes(request))
        self._written.update(made)
        if (prefix := handler.sweeps(request)) is not None:
            self._prefixes[prefix] += 1

    def release(self, request: Request, made: Sequence[str] = ()) -> None:
        handler = HANDLERS[request.operation.name]
        self.count -= 1
        decrement(self._read, handler.reads(request))
        decrement(self._written, handler.writes(request))
        decrement(self._written, made)
        if (prefix := handler.sweeps(request)) is not None:
            decrement(self._prefixes, (prefix,))

    def blocks(self, request: Request) -> bool:
        """Whether a request has to wait: it writes a locked sequence, or reads a written one."""
        handler = HANDLERS[request.operation.name]
        if self._written and not self._written.keys().isdisjoint(handler.reads(request)):
            return True
        writes = set(handler.writes(request))
        if not (writes.isdisjoint(self._read) and writes.isdisjoint(self._written)):
            return True
        if self._prefixes and self._has_prefix((*writes, *handler.reads(request))):
            return True
        prefix = handler.sweeps(request)
        if prefix is None:
            return False
        locked = (*self._read, *self._written)
        return bool(self._prefixes) or any(name.startswith(prefix) for name in locked)

    def _has_prefix(self, names: Iterable[str]) -> bool:
        return any(name.startswith(prefix) for prefix in self._prefixes for name in names)


def decrement(counts: Counter[str], names: Iterable[str]) -> None:
    """Count each name once less, and remove those at 0."""
    for name in names:
        counts[name] -= 1
        if counts[name] <= 0:
            del counts[name]
