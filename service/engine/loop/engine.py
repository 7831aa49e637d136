"""The engine's loop: one thread that owns pool and device, reads its sockets, and replies."""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final

from config.settings import Settings, device_queues
from kernels.backend import Backend
from kernels.lanes.lane_factory import make_lanes
from kernels.no_pool import NO_POOL
from service import __version__
from service.engine.loop.callers import Callers
from service.engine.loop.job import Job
from service.engine.loop.open_steps import FREE_S, SPIN_S
from service.engine.loop.reader import RequestReader
from service.engine.loop.scheduler import NOTED_S, Scheduler
from service.engine.loop.selftest import calibrate, self_test
from service.engine.loop.session_lanes import SessionLanes
from service.engine.loop.stats import MOST_REPLIES, QUIET_S, Stats
from service.engine.records.setup import open_records
from service.engine.store.setup import make_info
from service.engine.store.store import FATAL, Store
from service.engine.tiers.loading import CLOSE_S
from service.engine.tiers.setup import open_tiers, restore_quotas
from service.engine.work.pace import first_pace
from service.engine.work.request import AnswerPlace, DoesNotFit, Request
from service.errors import AttndError, NotReady, NotSupported, Overloaded, kind_of
from service.keys import keys_of, read_again
from service.metrics import Metrics
from service.operations.step import STEP
from service.operations.table import BY_NUMBER
from service.processes.handed_files import ReadFile, from_disk
from service.processes.watchdog import Watchdog
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import STEP_ROUTE, Call, Cancel, Ready
from service.road.engine_end.listening import Listener
from service.road.messages import State

LOG: Final = logging.getLogger("attnd.engine")
DRAINING: Final = "draining: finishing accepted requests, accepting no new ones"
STOPPED: Final = "the engine stopped before the operation was done; nothing was changed"
CUT_OFF: Final = "the engine stopped mid-operation; the change may have been applied"
LEAST_RETRY_S: Final = 0.05
MOST_RETRY_S: Final = 30.0
BEAT_S: Final = 1.0
"""Interval between two state frames to doors, which show that the engine is alive."""
UNSENT_SHARE: Final = 0.125
"""Share of a session's output limit: with more unread answers, its next call waits."""
FREEING: Final = 4
LEAST_FREEING: Final = 1024
"""Operations that free pages may wait beyond the queue's depth: up to `FREEING` times that depth
plus `LEAST_FREEING`."""
LAST_ANSWERS_S: Final = 1.0
"""Longest time for sending the last answers when the engine ends."""


class Engine:
    """Serves sessions on one listening socket until it is drained. Raises the errors in `FATAL`."""

    def __init__(
        self,
        listener: Listener,
        settings: Settings,
        backend: Backend,
        metrics: Metrics,
        secret: str = "",
        remote: Listener | None = None,
        read_file: ReadFile = from_disk,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        """`secret` authenticates the service's own doors; doors on other hosts connect to `remote`,
        and where `listener` is an embedded engine's inbox, all of its doors.
        `read_file` returns the contents of the key file. `selector` waits for the sockets. Raises
        `KeysError`."""
        self.info = make_info(backend, settings)
        self.state = State("ready", "ready")
        self.scheduler: Scheduler
        self._settings = settings
        self._read_file = read_file
        self._backend = backend
        self._metrics = metrics
        pace = first_pace(backend.name, settings.engine.slice_ms / 1e3)
        tiers, server = settings.cache, settings.server
        kept = (tiers.high_watermark, tiers.events_history, server.live)
        self.store = Store(backend, pace, self.info, *kept, settings.pool.window_slack)
        share = 1.0 if settings.auth.keys_file is None else settings.engine.namespace_share
        self.store.limit(settings.engine.max_sequences, settings.engine.max_leases, share)
        self.store.counts = metrics.own
        if backend.name != "none":
            self_test(self.store)
        if backend.name == "cpu":  # processors differ more than devices do
            calibrate(self.store)
        self.lanes = lanes = make_lanes(
            backend, server.device_arena_bytes, server.max_device_sessions, device_queues()
        )
        self._watchdog = Watchdog("engine", metrics)
        self.scheduler = Scheduler(
            self.store, metrics, self._reply, lanes, self._read, self._watchdog, must_wait
        )
        self._reader = RequestReader(self.info)
        self._unread = cache(lambda op, tenant: Request(op, None, {}, AnswerPlace(), tenant))
        self.jobs: dict[Call, Job] = {}
        """Calls that have no answer yet."""
        self._stats = Stats(metrics, self.store, self.scheduler.launches.learn)
        self._selector = selector or selectors.DefaultSelector()
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
        look_after = self.callers.look_after
        self._lanes = SessionLanes(lanes, self.scheduler.steps, self.info, look_after)
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        empty_pipe = partial(os.read, self._wake_reader, 4096)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, empty_pipe)
        self.store.loading = open_tiers(self.store, settings.cache_of_pages, metrics, self._wake)
        if self.store.loading is not None:
            self.store.loading.tiers.share = 1.0 - settings.records_share
        if self.store.loading is not None:
            launches = self.scheduler.launches
            self.store.loading.tiers.idle_s = lambda: launches.idle_s
        self.store.records = open_records(
            self.store.ledger, tiers, settings.records_share, metrics, self._wake
        )
        restore_quotas(self.store)
        self._beat_due = 0.0
        self._drain_ends: float | None = None
        self._must_drain = self._must_read_keys = False

    def drain(self) -> None:
        """Accept no more calls, finish those accepted, and end; from any thread, or a signal."""
        self._must_drain = True
        self._wake()

    def read_keys_again(self) -> None:
        """The key file has changed; from any thread, or a signal."""
        self._must_read_keys = True
        self._wake()

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        """Call `ready` whenever `fd` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def run(self) -> None:
        self._metrics.set(1.0, "build_info", __version__, self._backend.name)
        self._stats.record()
        info = self.info
        LOG.info("ready: %s on %s, %d pages", info.backend, info.device, info.num_pages)
        try:
            while self._drain_ends is None or not self.is_drained():
                self.round()
        finally:
            self.close()

    def close(self) -> None:
        """Send the last answers, and close all sessions."""
        self._stats.record()
        self.callers.close(LAST_ANSWERS_S)
        self.lanes.end()
        if self.store.loading is not None:
            self.store.loading.close(writes_pool=self.state.state != "lost")
        if self.store.records is not None:
            self.store.records.close(time.monotonic() + CLOSE_S)
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def round(self) -> None:
        """All that the engine does, in order. After an error all callers get a 503, and the engine
        must end."""
        scheduler = self.scheduler
        try:
            ready = self._selector.select(self.wait_s())
            began = time.monotonic()
            self._receive(ready, began)  # calls wait in their namespaces' lines
            received = time.monotonic()
            scheduler.launches.reply()  # to launches that are done
            if scheduler.expire():  # idle sequences, leases and pins
                scheduler.take_turns()  # handlers prepare work; attention of one kind is grouped
            scheduler.launches.submit()  # the group, to the device
            if self.store.loading is not None:
                self.store.loading.advance()  # pages that came from other tiers, or went there
            if self.store.records is not None:
                self.store.records.advance()  # records that were copied, read or written
            if scheduler.long_work.count:
                scheduler.run_slice(received)
            scheduler.run_layers()  # of steps in host memory
            if scheduler.steps.count or scheduler.steps.num_aborted:
                scheduler.steps.advance()  # through their layers
            scheduler.name_pages()  # that are complete
            scheduler.launches.reply()
            if self._lanes.by_session:
                self._lanes.serve()  # device arenas, to sessions
            self._account(began, received)
        except FATAL as error:
            self._mark_lost(f"lost: {error}: restart the service")
            raise
        except Exception as error:
            LOG.exception("the engine failed: this is a bug")
            self._mark_lost(f"lost: the engine failed: {error}")
            raise

    # Receive.

    def wait_s(self) -> float:
        """Seconds to wait for sockets: none while calls that come could join work in hand."""
        scheduler, launches = self.scheduler, self.scheduler.launches.in_flight
        poll_s = None if self.store.loading is None else self.store.loading.poll_s
        if poll_s == 0.0 or self._lanes.is_behind:
            return 0.0
        if (oldest := launches[0] if launches else scheduler.long_work.running) is not None:
            return 1e-3 if time.monotonic() - oldest.started > SPIN_S else 0.0
        if scheduler.is_busy:
            steps = scheduler.steps
            is_due = scheduler.long_work.num_ready or steps.num_ready or steps.is_young
            return 0.0 if is_due or scheduler.is_behind else 1e-3
        if self._stats.replies:
            return QUIET_S
        if poll_s is not None:
            return poll_s
        if scheduler.steps.num_aborted:
            return FREE_S
        ends = min(self.store.next_end, self._beat_due)
        left = max(0.0, ends - time.monotonic())
        return min(left, 1.0) if self.callers.ungreeted else left

    def _receive(self, ready: list[Any], began: float) -> None:
        """Admit the calls that have come, and handle everything else that has."""
        if began >= self._beat_due:
            self._beat_due = began + BEAT_S
            self.callers.beat()
            self._stats.record()  # what expires without a call is recorded, too
        elif not ready and self._stats.replies:
            self._stats.record()
        for event in self.callers.receive(ready, began):
            if isinstance(event, Call):
                self._admit(event)
            elif isinstance(event, Cancel):
                self._cancel(event.call)
            elif not isinstance(event, Ready):
                self._lanes.request_arena(event)
            elif job := self.jobs.get(event.call):
                self.scheduler.steps.layer(job, event.layer)
        if self.callers.ended or self.callers.ungreeted:
            for call in self.callers.close_ended():
                self._cancel(call)
        if self._must_read_keys or (self._must_drain and self._drain_ends is None):
            self._handle_signals()

    def _admit(self, call: Call) -> None:
        """Let a call wait for its turn, or refuse it. Its request is read when its turn comes: that
        may take longer than all else, and is charged to its namespace.
        """
        operation = STEP if call.operation == STEP_ROUTE else BY_NUMBER[call.operation]
        tenant, queue = call.tenant, self.scheduler.queue
        try:
            if self.state.state != "ready":
                raise NotReady(self.state.reason)
            if self._backend.name == "none" and operation.needs_pool:
                raise NotSupported(NO_POOL)
            depth = queue.depth(tenant.namespace)
            if depth >= self._settings.server.queue_depth:
                self._refuse_overload(operation.frees, depth)
            if operation is STEP:
                self._lanes.check(call)
        except AttndError as error:
            self.callers.fail(call, error)
            is_of_door = call.session.standing.is_door
            self._stats.refused(operation, tenant.namespace, kind_of(error).code, is_of_door)
            return
        now = time.monotonic()
        unread = self._unread(operation, tenant)
        job = Job(unread, call, now, now + call.deadline_s, is_unread=True)
        self.jobs[call] = job
        queue.append(tenant.namespace, job)

    def _refuse_overload(self, frees: bool, depth: int) -> None:
        """Raises Overloaded: the queue is full. Operations that free pages have a higher limit."""
        limit = self._settings.server.queue_depth
        if frees and depth < FREEING * limit + LEAST_FREEING:
            return
        retry_s = 0.5 * limit * self._stats.seconds_per_operation
        raise Overloaded(
            f"{depth} operations are waiting: retry later, send larger batches, "
            "or raise server.queue_depth",
            retry_after_s=round(min(max(retry_s, LEAST_RETRY_S), MOST_RETRY_S), 3),
        )

    def _cancel(self, call: Call) -> None:
        if job := self.jobs.get(call):
            self.scheduler.cancel(job)

    def _read(self, job: Job) -> None:
        """Read a job's request when its turn has come. Raises the refusal."""
        call: Call = job.token
        if call.operation == STEP_ROUTE:
            job.request = self._lanes.read(STEP, call)
        else:
            job.request = self._reader.read(job.request.operation, call)
        job.is_unread = False

    # Reply, and account for it.

    def _reply(self, job: Job) -> None:
        call: Call = job.token
        del self.jobs[call]
        spent, error = job.seconds, job.error
        stages = spent.queue, spent.plan, spent.copy_in, spent.kernel, spent.copy_out, spent.encode
        if error is None:
            request = job.request
            status, length = request.operation.status, request.place.length
            pool, cached = self.store.tree.allocator, self.store.tree.cache.named.num_cached
            held = pool.num_pages - pool.num_free - cached
            call.session.answer(call, status, length, stages, held)
            self.callers.look_after(call.session)
        else:
            needed = error.needed if isinstance(error, DoesNotFit) else 0
            self.callers.fail(call, error, stages, needed)
        self._stats.add(job)

    def _account(self, began: float, received: float) -> None:
        """End a round: record its replies, now or once no call has come for a while."""
        now, stats, reading_s = time.monotonic(), self._stats, received - began
        if stats.replies:
            stats.spent_s += now - received
            if now > stats.due or len(stats.replies) >= MOST_REPLIES:
                self._stats.record()
                now = time.monotonic()
        if not stats.replies:  # else the next round soon sets them
            metrics = self._metrics
            metrics.set(len(self.jobs), "inflight")
            metrics.set(self.scheduler.queue.count, "waiting")
            metrics.set(len(self.callers.sessions), "sessions")
        if reading_s > NOTED_S:
            self._watchdog.note("reading of frames", reading_s)
        self._watchdog.passed(now - began)

    # Wake up, and end.

    def _wake(self) -> None:
        with suppress(OSError):  # the engine has ended
            os.write(self._wake_writer, b"\0")

    def _handle_signals(self) -> None:
        """Begin to drain, or read the keys again, as another thread or a signal has requested."""
        if self._must_drain and self._drain_ends is None:
            self._drain_ends = time.monotonic() + self._settings.server.drain_timeout_s
            self.state = State("draining", DRAINING)
            self.callers.send_state(self.state)
        if self._must_read_keys:
            self._must_read_keys = False
            self._admission.keys = read_again(
                self._settings.auth, self._admission.keys, self._read_file
            )
            self.callers.check_keys()

    def is_drained(self) -> bool:
        """Whether the engine drains and all accepted calls have answers; at the drain's end, the
        others are refused."""
        if self._drain_ends is None:
            return False
        if not self.scheduler.is_busy:
            return True
        if time.monotonic() < self._drain_ends:
            return False
        timeout = self._settings.server.drain_timeout_s
        LOG.error("drain: %d operations were not done in %g s", len(self.jobs), timeout)
        self.scheduler.give_up(NotReady(STOPPED))
        self._fail_all(NotReady(CUT_OFF))
        return True

    def _mark_lost(self, reason: str) -> None:
        """Pool or device cannot be trusted any more: refuse all waiting calls with the reason."""
        LOG.error("%s", reason)
        self.state = State("lost", reason)
        self._fail_all(NotReady(reason))
        self.callers.send_state(self.state)

    def _fail_all(self, error: AttndError) -> None:
        for job in list(self.jobs.values()):
            job.error = error
            self._reply(job)
        self._stats.record()


def must_wait(job: Job) -> bool:
    """A session with many unread answers first reads those: a door has many calls in flight, and
    would lose them all if its output limit were reached."""
    call: Call = job.token
    output = call.session.output
    return len(output.waiting) > output.limit * UNSENT_SHARE
