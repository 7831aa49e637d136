"""A scheduler over a `FakeBackend`, without sockets: tests run its rounds one by one."""

from __future__ import annotations

import time
from typing import Any

from config.settings import Settings
from kernels.geometry import PoolGeometry
from kernels.lanes.host_lanes import HostLanes
from service.engine.loop.job import Job
from service.engine.loop.scheduler import Scheduler
from service.engine.store.setup import make_info
from service.engine.store.store import Store
from service.engine.work.pace import DevicePace
from service.engine.work.request import AnswerPlace, Request
from service.metrics import Metrics
from service.operations.schema.spec import validate
from service.operations.table import BY_NAME
from tests.engine.fake_backend import GEOMETRY, FakeBackend
from tests.engine.harness import NewCall


class Rounds:
    """The scheduler, and the jobs that it has answered."""

    def __init__(
        self, lanes: Any = None, slice_s: float = 1.0, geometry: PoolGeometry = GEOMETRY
    ) -> None:
        self.backend = FakeBackend(geometry)
        info = make_info(self.backend, Settings())
        self.store = Store(self.backend, DevicePace(4e9, 2e10, slice_s), info)
        self.answered: list[Job] = []
        self.scheduler = Scheduler(
            self.store, Metrics(), self.answered.append, lanes or HostLanes(self.backend)
        )

    def ask(self, call: NewCall, seconds: float = 60.0) -> Job:
        """An operation whose turn comes with the next round, due in some seconds."""
        operation = BY_NAME[call.name]
        fields = validate(operation.fields, call.fields)
        return self.admit(Request(operation, fields, call.tensors, AnswerPlace()), seconds)

    def admit(self, request: Request, seconds: float = 60.0) -> Job:
        now = time.monotonic()
        job = Job(request, None, now, now + seconds)
        self.scheduler.queue.append(request.tenant.namespace, job)
        return job

    def run(self, rounds: int = 1) -> None:
        scheduler = self.scheduler
        for _ in range(rounds):
            if scheduler.expire():
                scheduler.take_turns()
            scheduler.launches.submit()
            scheduler.long_work.run_slice()
            scheduler.run_layers()
            scheduler.steps.advance()
            scheduler.launches.reply()

    def finish(self) -> None:
        while self.scheduler.is_busy:
            self.run()
