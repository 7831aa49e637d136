"""The engine's loop: one thread that owns pool and device, waits on its sockets, and answers."""

from __future__ import annotations

import gc
import logging
import os
import selectors
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Final

from attnd.wire.dtypes import DTYPE_NAMES

from config.settings import Settings, device_queues
from kernels.backend import NUMPY_DTYPES, TENSOR_DTYPES, Backend
from kernels.lanes import make_lanes
from service import __version__
from service.engine.loop.callers import Callers
from service.engine.loop.job import Job
from service.engine.loop.open_steps import FREE_S
from service.engine.loop.place import DoesNotFit, Place
from service.engine.loop.request import Request, RequestReader
from service.engine.loop.scheduler import Scheduler
from service.engine.loop.session_lanes import SessionLanes
from service.engine.loop.slices import Pace
from service.engine.loop.stats import QUIET_S, Telling
from service.engine.selftest import self_test
from service.engine.store.limits import Limits
from service.engine.store.store import FATAL, Store
from service.errors import AttndError, NotReady, Overloaded, kind_of
from service.keys import keys_of, read_again
from service.metrics import Metrics
from service.operations.info import InfoAnswer, LimitsAnswer
from service.operations.spec import Operation
from service.operations.step import STEP
from service.operations.table import BY_NUMBER
from service.processes.handed_files import ReadFile, from_disk
from service.processes.watchdog import Watchdog
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import STEP_ROUTE, AskedArena, Call, Cancel, Event, Ready
from service.road.messages import State
from service.tenants import Tenant

LOG: Final = logging.getLogger("attnd.engine")
DRAINING: Final = "draining: admitted work is being finished, and no more is taken"
STOPPED: Final = "stopped before the operation's turn came"
CUT_OFF: Final = "stopped while the device was at the operation; it may have taken effect"
RATES: Final[dict[str, tuple[float, float]]] = {"cpu": (4e9, 2e10), "cuda": (2e12, 2e14)}
"""First guesses of bytes and flops a second by backend; measurements correct them."""
SPIN_S: Final = 0.002
"""A launch that takes longer is looked after every millisecond; until then all the time."""
LEAST_RETRY_S: Final = 0.05
MOST_RETRY_S: Final = 30.0
BEAT_S: Final = 1.0
"""Doors are told so often that the engine is there."""
UNSENT_SHARE: Final = 0.125
"""Of what a session may leave unread: with more, its next call waits until it has read some."""
LISTEN_S: Final = 0.005
"""How long callers are read from before turns are given."""
FREEING: Final = 4
LEAST_FREEING: Final = 1024
"""Operations that give pages back may wait beyond the depth of the queue: so many times that depth,
and so many more."""
LAST_WORDS_S: Final = 1.0
"""How long the last answers may take to go out."""


def make_info(backend: Backend, settings: Settings) -> InfoAnswer:
    """What the service says of itself; the checks of requests rest on it."""
    server = settings.server
    limits = LimitsAnswer(
        max_body_bytes=server.max_body_bytes,
        max_json_body_bytes=min(server.max_body_bytes, server.max_json_bytes),
        max_answer_bytes=server.max_answer_bytes,
        max_sequences=settings.engine.max_sequences,
        queue_depth=server.queue_depth,
        deadline_s=server.deadline_s,
    )
    return InfoAnswer(
        version=__version__,
        instance_id=uuid.uuid4().hex,
        backend=backend.name,
        device=backend.device,
        tensor_dtypes=[DTYPE_NAMES[NUMPY_DTYPES[name]] for name in TENSOR_DTYPES],
        unsupported=list(backend.unsupported),
        limits=limits,
        **asdict(backend.geometry),
    )


class Engine:
    """Serves sessions on one listening socket until it is drained. Raises what is in `FATAL`."""

    def __init__(
        self,
        listener: socket.socket,
        settings: Settings,
        backend: Backend,
        metrics: Metrics,
        secret: str = "",
        remote: socket.socket | None = None,
        read_file: ReadFile = from_disk,
    ) -> None:
        """`secret` is what doors of the service show; those of other hosts come in at `remote`.
        `read_file` gives the contents of the key file. Raises `KeysError`."""
        self.info = make_info(backend, settings)
        self.state = State("ready", "ready")
        self.scheduler: Scheduler
        self._settings = settings
        self._read_file = read_file
        self._backend = backend
        self._metrics = metrics
        slice_s = settings.engine.slice_ms / 1e3
        pace = Pace(*RATES.get(backend.name, RATES["cpu"]), slice_s)
        cache, server = settings.cache, settings.server
        self.store = Store(
            backend, pace, self.info, cache.high_watermark, cache.events_history, server.live
        )
        share = 1.0 if settings.auth.keys_file is None else settings.engine.namespace_share
        self.store.limits = Limits(settings.engine.max_sequences, settings.engine.max_leases, share)
        self.store.counts = metrics.own
        self_test(self.store)
        lanes = make_lanes(
            backend, server.device_arena_bytes, server.max_device_sessions, device_queues()
        )
        self._watchdog = Watchdog("engine", metrics)
        self.scheduler = Scheduler(
            self.store, metrics, self._reply, lanes, self._read, self._watchdog
        )
        self._lanes = SessionLanes(lanes, self.scheduler.steps, self.info)
        self._reader = RequestReader(self.info)
        self._unread: dict[tuple[Operation, Tenant], Request] = {}
        self._jobs: dict[Call, Job] = {}
        self._telling = Telling(metrics, self.store)
        self._selector = selectors.DefaultSelector()
        self._admission = Admission(keys_of(settings.auth, read_file), secret)
        self.callers = Callers(
            listener,
            self._selector,
            server,
            backend,
            self.info,
            self._admission,
            lanes.unpin,
            remote,
            share,
        )
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._beat_due = 0.0
        self._drain_ends: float | None = None
        self._asked_to_drain = self._asked_to_read_keys = False

    @property
    def num_admitted(self) -> int:
        """Calls that have no answer yet."""
        return len(self._jobs)

    def drain(self) -> None:
        """Take no more calls, finish what is admitted, and end; from any thread, or a signal."""
        self._asked_to_drain = True
        with suppress(OSError):  # it has ended already
            os.write(self._wake, b"\0")

    def read_keys_again(self) -> None:
        """The file of keys has changed; from any thread, or a signal."""
        self._asked_to_read_keys = True
        with suppress(OSError):
            os.write(self._wake, b"\0")

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        """Call `ready` whenever `fd` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def run(self) -> None:
        """Until drained."""
        self._metrics.build(__version__, self._backend.name)
        self._telling.tell_pool()
        gc.collect()
        gc.freeze()  # what the start made stays out of later collections
        told = self.info
        LOG.info("ready: %s on %s, %d pages", told.backend, told.device, told.num_pages)
        try:
            while not self._is_over():
                began = self._listen()
                started = time.monotonic()
                self._watchdog.note("reading of frames", started - began)
                self.scheduler.round()
                if self._lanes:
                    self._lanes.look_after()
                self._watchdog.passed(self._rest(started) - began)
        except FATAL as error:
            self._lose(f"lost: {error}: restart the service")
            raise
        except Exception as error:
            LOG.exception("the engine failed: this is a bug")
            self._lose(f"lost: the engine failed: {error}")
            raise
        finally:
            self._tell()
            self.callers.close(LAST_WORDS_S)
            self._selector.close()
            os.close(self._woken)
            os.close(self._wake)

    # What comes in.

    def _listen(self) -> float:
        """Wait until there is something to do, and take in what has come, for `LISTEN_S` at most;
        when the waiting was over."""
        ready = self._selector.select(self._patience())
        began = time.monotonic()
        if began >= self._beat_due:
            self._beat_due = began + BEAT_S
            self.callers.beat()
        if not ready and self._telling:
            self._tell()
        for number, (key, mask) in enumerate(ready):
            if number and time.monotonic() - began > LISTEN_S:
                break  # the others are ready again the next time
            if key.fd == self._woken:
                os.read(self._woken, 4096)
            elif key.data is None or callable(key.data):
                if key.data is not None:
                    key.data()
            else:
                for event in self.callers.ready(key.data, mask):
                    self._take(event)
        for call in self.callers.left():
            self._cancel(call)
        if self._asked_to_drain and self._drain_ends is None:
            self._begin_drain()
        if self._asked_to_read_keys:
            self._asked_to_read_keys = False
            self._admission.keys = read_again(
                self._settings.auth, self._admission.keys, self._read_file
            )
            self.callers.check_keys()
        return began

    def _take(self, event: Event) -> None:
        """What a session says."""
        match event:
            case Call():
                self._admit(event)
            case Cancel():
                self._cancel(event.call)
            case Ready():
                self._run_layer(event)
            case AskedArena():
                self._lanes.asked(event)

    def _run_layer(self, event: Ready) -> None:
        """A layer of a step in host memory."""
        job = self._jobs.get(event.call)
        if job is not None and self.scheduler.steps.layer(job, event.layer) is None:
            self._lanes.tell_done(event.call, event.layer)

    def _patience(self) -> float | None:
        """Seconds to wait for sockets: none while there is work that they could join."""
        scheduler = self.scheduler
        if not scheduler.busy:
            if self._telling:
                return QUIET_S
            return FREE_S if scheduler.steps.any_spoilt else self._idle_patience()
        if scheduler.steps_only and not scheduler.steps.is_young:
            return 1e-3
        return 1e-3 if scheduler.flight_s > SPIN_S else 0.0

    def _idle_patience(self) -> float:
        """Seconds until time alone changes something, with nothing else to do."""
        ends = min(self.store.next_end, self._beat_due)
        left = max(0.0, ends - time.monotonic())
        patience = self.callers.patience
        return left if patience is None else min(left, patience)

    def _admit(self, call: Call) -> None:
        """Let a call wait for its turn, or answer it with what speaks against it. Its request is
        read when its turn comes: that may take longer than all else, and is its namespace's time.
        """
        operation = STEP if call.operation == STEP_ROUTE else BY_NUMBER[call.operation]
        tenant = call.tenant
        try:
            if self.state.state != "ready":
                self._metrics.rejected("not_ready")
                raise NotReady(self.state.reason)
            depth = self.scheduler.depth(tenant.namespace)
            if depth >= self._settings.server.queue_depth:
                self._refuse_overload(operation.frees, depth)
            if operation is STEP:
                self._lanes.check(call)
        except AttndError as error:
            self.callers.fail(call, error)
            self._count_refused(call, operation.name, error)
            return
        unread = self._unread.get((operation, tenant))
        if unread is None:
            unread = self._unread[operation, tenant] = Request(operation, None, {}, Place(), tenant)
        now = time.monotonic()
        job = Job(unread, call, now, now + call.deadline_s, is_unread=True)
        self._jobs[call] = job
        self.scheduler.admit(job)

    def _read(self, job: Job) -> bool:
        """Read on in a job's request; whether it is read now. Raises the refusal.

        A session that has much to read of earlier answers first reads those: a door, which calls
        for many, would be dropped with all that it has in flight.
        """
        call: Call = job.token
        output = call.session.output
        if len(output.waiting) > output.limit * UNSENT_SHARE:
            return False
        if job.reading is not None:
            try:
                next(job.reading)
            except StopIteration as end:
                found = end.value
            else:
                return False
        elif call.operation == STEP_ROUTE:
            found = self._lanes.read(STEP, call)
        else:
            found = self._reader.read(job.request.operation, call)
            if not isinstance(found, Request):
                job.reading = found
                return False
        job.request, job.is_unread, job.reading = found, False, None
        return True

    def _refuse_overload(self, frees: bool, waiting: int) -> None:
        """The queue is full: only what gives pages back is still let in, up to a limit, too."""
        depth = self._settings.server.queue_depth
        if frees and waiting < FREEING * depth + LEAST_FREEING:
            return
        self._metrics.rejected("overloaded")
        half = 0.5 * depth * self._telling.seconds_per_operation
        raise Overloaded(
            f"{waiting} operations wait already: retry later, send larger batches, "
            "or raise server.queue_depth",
            retry_after_s=round(min(max(half, LEAST_RETRY_S), MOST_RETRY_S), 3),
        )

    def _cancel(self, call: Call) -> None:
        job = self._jobs.get(call)
        if job is not None:
            self.scheduler.cancel(job)

    # What goes out.

    def _reply(self, job: Job) -> None:
        """One answer."""
        call: Call = job.token
        del self._jobs[call]
        stages = job.seconds.stages
        error = job.error
        if error is None:
            request = job.request
            status, length = request.operation.status, request.place.length
            self.callers.answer(call, status, length, stages, self.store.tree.num_held)
        else:
            needed = error.needed if isinstance(error, DoesNotFit) else 0
            self.callers.fail(call, error, stages, needed)
        self._telling.add(job)

    def _rest(self, started: float) -> float:
        """A round is over: what is counted is counted now, or when nothing comes for a while; when
        the round was over."""
        now = time.monotonic()
        if not self._telling:
            self._tell_load()
        elif self._telling.is_due(now, now - started):
            self._tell()
            now = time.monotonic()
        return now

    def _tell(self) -> None:
        """Count what was answered."""
        self.scheduler.learn()
        self._telling.tell()
        self._tell_load()

    def _tell_load(self) -> None:
        self._metrics.load(len(self._jobs), self.scheduler.num_waiting)
        self._metrics.sessions(self.callers.count)

    def _count_refused(self, call: Call, name: str, error: AttndError) -> None:
        if not call.session.standing.is_door:
            self._metrics.observe(name, kind_of(error).code, 0.0)

    # The end.

    def _begin_drain(self) -> None:
        self._drain_ends = time.monotonic() + self._settings.server.drain_timeout_s
        self.state = State("draining", DRAINING)
        self.callers.tell(self.state)

    def _is_over(self) -> bool:
        if self._drain_ends is None:
            return False
        if not self.scheduler.busy:
            return True
        if time.monotonic() < self._drain_ends:
            return False
        given_up = len(self._jobs)
        timeout = self._settings.server.drain_timeout_s
        LOG.error("drain: %d operations were not done in %g s", given_up, timeout)
        self.scheduler.give_up(NotReady(STOPPED))
        self._fail_all(NotReady(CUT_OFF))
        return True

    def _lose(self, reason: str) -> None:
        """Nothing can be served any more: say so to all who wait."""
        LOG.error("%s", reason)
        self.state = State("lost", reason)
        self._fail_all(NotReady(reason))
        self.callers.tell(self.state)

    def _fail_all(self, error: AttndError) -> None:
        for job in list(self._jobs.values()):
            job.error = error
            self._reply(job)
        self._tell()
