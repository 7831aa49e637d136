"""The engine from the event loop's side: submit an operation, await its reply."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from threading import Thread
from typing import Final, Literal

from kernels.backend import Backend
from service.engine.inbox import Inbox, Ticket
from service.engine.operations import Operation, Reply, ServiceInfo
from service.engine.selftest import self_test
from service.engine.store import Store
from service.engine.work import Job
from service.engine.worker import FATAL, Worker
from service.errors import NotReady, Overloaded
from service.metrics import Metrics

State = Literal["starting", "ready", "draining", "lost", "stopped"]

STARTING: Final = "starting: making the backend ready"
DRAINING: Final = "draining: admitted work is being finished, and no more is taken"
STOPPED: Final = "stopped"

log = logging.getLogger(__name__)


class Engine:
    """One worker thread that owns pool and device, behind a bounded queue.

    `make` makes the backend, on the worker thread (it compiles and allocates). `submit` and
    `drain` belong to event loops; everything else may be read from anywhere.
    """

    def __init__(
        self,
        make: Callable[[], Backend],
        *,
        queue_depth: int,
        metrics: Metrics,
        version: str = "unknown",
    ) -> None:
        self.instance_id = uuid.uuid4().hex
        """A new one for every start: the sequences of another instance are gone."""
        self._make = make
        self._metrics = metrics
        self._version = version
        self._inbox = Inbox(queue_depth, STARTING)
        self._state: State = "starting"
        self._reason = STARTING
        self._info: ServiceInfo | None = None
        self._thread = Thread(target=self._run, name="attnd-worker", daemon=True)

    def start(self) -> None:
        """Start the worker and return at once; `state` tells when it is ready."""
        self._thread.start()

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> str:
        """Why it is in its state, in words."""
        return self._reason

    @property
    def info(self) -> ServiceInfo:
        """What is served. Raises `NotReady` until the backend is there."""
        if self._info is None:
            raise NotReady(self._reason)
        return self._info

    @property
    def num_waiting(self) -> int:
        return self._inbox.num_waiting

    async def submit(self, operation: Operation, *, deadline_s: float | None = None) -> Reply:
        """Let `operation` wait for its turn, and await its reply.

        Cancelled before its turn, or not begun within `deadline_s` seconds, it does not run.
        Raises `Overloaded`, `NotReady`, `DeadlineExceeded`, `Internal`, and the core's refusals.
        """
        now = time.monotonic()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        deadline = math.inf if deadline_s is None else now + deadline_s
        ticket = Ticket(operation, future, now, deadline)
        try:
            self._inbox.put(ticket)
        except Overloaded:
            self._metrics.rejected("overloaded")
            raise
        except NotReady:
            self._metrics.rejected("not_ready")
            raise
        # Last in the loop's round: woken sooner, the worker would wait for the interpreter's lock,
        # and it would begin before the round's other requests are there to share its launch.
        loop.call_soon(self._inbox.wake)
        self._metrics.inflight(1)
        try:
            return await future
        except asyncio.CancelledError:
            if self._inbox.discard(ticket):
                self._metrics.rejected("cancelled")
            elif not future.cancelled():
                future.exception()  # it had arrived, and nobody will ask for it any more
            raise
        finally:
            self._metrics.inflight(-1)

    async def drain(self, timeout_s: float) -> None:
        """Take no more, finish what was admitted, stop; after `timeout_s` give up on the rest."""
        if self._state in ("starting", "ready"):
            self._state, self._reason = "draining", DRAINING
        self._inbox.close(self._reason)
        if self._thread.ident is None:
            self._state = self._reason = STOPPED
            return
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            given_up = self._inbox.take(wait=False)
            log.error("drain: %d operations did not run in %g s", len(given_up), timeout_s)
            refuse(given_up, "stopped before the operation's turn came")

    # On the worker's thread.

    def _run(self) -> None:
        try:
            backend = self._make()
        except Exception as error:
            log.exception("the backend did not start")
            self._lose(f"the backend did not start: {error}", [])
            return
        try:
            self._serve(backend)
        finally:
            try:
                backend.close()
            except Exception:
                log.exception("the backend did not close")
        if self._state != "lost":
            self._state = self._reason = STOPPED

    def _serve(self, backend: Backend) -> None:
        """Self-test, then serve until drained or lost."""
        try:
            store = Store(backend)
            self_test(store)
        except Exception as error:
            log.exception("the self-test failed")
            self._lose(f"the self-test failed: {error}", [])
            return
        self._become_ready(store)
        worker = Worker(store, self._inbox, self._metrics, deliver)
        try:
            worker.run()
        except FATAL as error:
            log.exception("the pool is lost")
            self._lose(f"lost: {error}: restart the service", worker.unanswered())
        except Exception as error:
            log.exception("the worker failed: this is a bug")
            self._lose(f"lost: the worker failed: {error}", worker.unanswered())

    def _become_ready(self, store: Store) -> None:
        backend, geometry = store.backend, store.geometry
        self._info = ServiceInfo(
            num_layers=geometry.num_layers,
            num_pages=geometry.num_pages,
            page_size=geometry.page_size,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            layout=geometry.layout,
            dtype=geometry.dtype,
            k_scale=geometry.k_scale,
            v_scale=geometry.v_scale,
            backend=backend.name,
            device=backend.device,
            unsupported=backend.unsupported,
        )
        self._metrics.build(self._version, backend.name)
        self._metrics.pool(store.numbers())
        if self._inbox.open():
            self._state, self._reason = "ready", "ready"
            log.info("ready: %s on %s, %d pages", backend.name, backend.device, geometry.num_pages)

    def _lose(self, reason: str, unanswered: Iterable[Ticket]) -> None:
        """Nothing can be served any more: say so to all who wait, and to all who come."""
        self._state, self._reason = "lost", reason
        self._inbox.close(reason)
        refuse([*unanswered, *self._inbox.take(wait=False)], reason)


def deliver(jobs: Sequence[Job]) -> None:
    """Send replies to the event loops that await them, one call for each run of one loop's."""
    begin = 0
    for end in range(1, len(jobs) + 1):
        loop = jobs[begin].ticket.future.get_loop()
        if end < len(jobs) and jobs[end].ticket.future.get_loop() is loop:
            continue
        call_soon(loop, resolve, jobs[begin:end])
        begin = end


def resolve(jobs: Sequence[Job]) -> None:
    """On the event loop: hand every job's reply, or error, to whoever still awaits it."""
    for job in jobs:
        future = job.ticket.future
        if future.done():
            continue
        if job.error is None:
            future.set_result(Reply(job.answer, job.timings))
        else:
            future.set_exception(job.error)


def refuse(tickets: Iterable[Ticket], reason: str) -> None:
    """Tell those who wait that their operation will not run."""
    jobs = []
    for ticket in tickets:
        job = Job(ticket)
        job.error = NotReady(reason)
        jobs.append(job)
    deliver(jobs)


def call_soon(
    loop: asyncio.AbstractEventLoop, call: Callable[[Sequence[Job]], None], jobs: Sequence[Job]
) -> None:
    try:
        loop.call_soon_threadsafe(call, jobs)
    except RuntimeError:
        log.warning("%d replies had no event loop left to go to", len(jobs))
