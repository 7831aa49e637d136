"""State shared by all connections of an HTTP door: the link to the engine, limits, the drain; and
the FastAPI application, one router made from the table of operations."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from email.utils import formatdate
from functools import cache
from socket import socket
from typing import Any, Final

from fastapi import FastAPI

from config.sections import Settings
from config.server import ServerSettings
from service import __version__
from service.doors.http.endpoints.events import PATH as EVENTS_PATH
from service.doors.http.endpoints.events import EventStream
from service.doors.http.endpoints.openapi import DESCRIPTION, document
from service.doors.http.endpoints.operation import OperationEndpoint
from service.doors.http.endpoints.pages import Pages
from service.doors.http.endpoints.responses import Respond, route
from service.doors.http.live.page import live_routes
from service.doors.http.long_json import LongJson
from service.doors.http.protocol.admission import BusyConnections
from service.doors.http.protocol.bodies import BodyShares
from service.doors.http.protocol.connection import Connection
from service.doors.http.protocol.intake import ReadBudget
from service.doors.kit.hosts import HostRule
from service.doors.kit.ledger import Ledger, Tracing
from service.doors.kit.link import QUIET_S, Link
from service.doors.kit.pieces import OneByOne, Turns
from service.doors.kit.process import descriptors
from service.doors.kit.upstream import MakeUpstream, trim
from service.errors import AttndError, NotReady, Overloaded
from service.keys import Authenticator
from service.metrics import Metrics
from service.operations.schema.spec import Operation
from service.operations.table import OPERATIONS

LOG: Final = logging.getLogger("attnd.http")
READ_BYTES: Final = 64 * 2**10
"""The buffer into which all connections receive heads and short bodies."""
SWEEP_S: Final = 0.5
COMPLAIN_EVERY_S: Final = 10.0


class Door:
    """One door on its event loop."""

    def __init__(
        self,
        limits: ServerSettings,
        metrics: Metrics,
        authenticator: Authenticator | None = None,
        tracing: Tracing | None = None,
        make_upstream: MakeUpstream = Link,
        host_rule: HostRule | None = None,
    ) -> None:
        """`authenticator` None: the service has no keys."""
        self.limits = limits
        self.authenticator = authenticator
        self.host_rule = host_rule or HostRule(Settings())
        self.metrics = metrics
        self.loop = asyncio.get_running_loop()
        self.ledger = Ledger(metrics, tracing)
        self.link = link = make_upstream(limits, authenticator is not None, metrics)
        self.take, self.give_back = link.arena.take, link.arena.give_back
        self.drained = asyncio.Event()
        self.long_json = LongJson(self)
        self.long_work = OneByOne()
        self.turns = Turns()
        self.buffer = bytearray(READ_BYTES)
        self.connections: set[Connection] = set()
        self.handshakes: dict[asyncio.Task[None], None] = {}
        """TLS handshakes under way, the oldest first."""
        self.shares = BodyShares(limits.max_inflight_bytes)
        self.read_budget = ReadBudget(self.loop)
        soft, spare = descriptors()
        self.max_connections = min(limits.max_connections, soft - spare)
        self.busy = BusyConnections(max(1, self.max_connections // 2))
        self.max_lingering = spare // 2
        self.active = 0
        """Requests without a response."""
        self.date = b""
        self.last_complaint = 0.0
        self.last_work = self.loop.time()
        self.is_trimmed = True
        self.app, self.endpoints = make_application(self)
        self.sweeping = self.loop.call_soon(self.sweep)

    @property
    def draining(self) -> str:
        """Why no more requests are accepted; empty while they are."""
        return self.link.draining

    # connections

    def admit(self, connection: Connection) -> bool:
        """Add a connection; returns whether it may stay."""
        self.connections.add(connection)
        if self.draining:
            return False
        return len(self.connections) <= self.max_connections or self.make_room(connection)

    def make_room(self, newest: Connection) -> bool:
        """Close a connection for a new one; returns whether there was one.

        Connections without a valid request go first, whatever they do; then idle connections of the
        host with the most, then the longest idle.
        """
        idle = [one for one in self.connections if one.may_give_place and one is not newest]
        if not idle:
            return False
        counts = Counter(one.address for one in self.connections)
        chosen = min(idle, key=lambda one: (one.is_known, -counts[one.address], one.since))
        self.connections.discard(chosen)
        chosen.give_place()
        self.complain("idle connections are closed for new ones")
        return True

    def too_many(self) -> AttndError:
        """The error for a connection that may not stay."""
        if self.draining:
            return NotReady(self.draining)
        self.complain("new connections are refused")
        return Overloaded(self.full, retry_after_s=1.0)

    @property
    def full(self) -> str:
        return (
            f"{self.max_connections} connections are open: close some, or raise "
            "server.max_connections and the limit of open files"
        )

    def complain(self, what: str) -> None:
        """Log that connections are short, not too often."""
        now = self.loop.time()
        if now > self.last_complaint + COMPLAIN_EVERY_S:
            self.last_complaint = now
            LOG.warning("%s: %s", what, self.full)

    def begin_handshake(self, client: socket, work: Coroutine[Any, Any, None]) -> None:
        """Begin and count a handshake; cancels the oldest one if there are too many of both
        kinds."""

        def end(task: asyncio.Task[None]) -> None:
            self.handshakes.pop(task, None)
            if task.cancelled():
                client.close()

        task = self.loop.create_task(work)
        self.handshakes[task] = None
        task.add_done_callback(end)
        if len(self.connections) + len(self.handshakes) > self.max_connections + self.max_lingering:
            oldest = next(iter(self.handshakes))
            del self.handshakes[oldest]
            oldest.cancel()

    def may_linger(self, connection: Connection) -> bool:
        """Whether a closing connection may wait for its client without taking another's place."""
        return len(self.connections) < self.max_connections + self.max_lingering

    def sweep(self) -> None:
        """Check deadlines, the date, and unused memory, twice a second."""
        now = self.loop.time()
        self.date = formatdate(usegmt=True).encode()
        for connection in list(self.connections):
            connection.check(now)
        if self.active:
            self.last_work, self.is_trimmed = now, False
        elif not self.is_trimmed and now > self.last_work + QUIET_S:
            self.is_trimmed = True
            trim(self.loop, self.link)
        self.sweeping = self.loop.call_later(SWEEP_S, self.sweep)

    # the end

    def drain(self, reason: str) -> None:
        """Accept no more requests; `drained` is set when the accepted ones have responses."""
        self.link.draining = reason
        if not self.active:
            self.drained.set()
        for connection in list(self.connections):
            connection.drain()

    def give_up(self, error: AttndError) -> None:
        for connection in list(self.connections):
            connection.give_up(error)

    async def close(self, seconds: float) -> None:
        """Close connections once their responses are sent, or after `seconds`; then the link."""
        self.sweeping.cancel()
        ends = self.loop.time() + seconds
        for handshake in self.handshakes:
            handshake.cancel()
        for connection in list(self.connections):
            connection.transport.close()
        while self.connections and self.loop.time() < ends:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.abort()
        self.ledger.settle()
        self.long_json.close()
        self.link.close()


def make_application(door: Door) -> tuple[FastAPI, dict[tuple[str, str], Respond]]:
    """The application of one door, and the endpoints of its fixed paths, by method and path.

    Steps call the latter, without a walk through the router. Errors leave the application as
    exceptions.
    """
    app = FastAPI(
        title="attnd",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.openapi = cache(document)  # type: ignore[method-assign]
    routes = app.router.routes
    fixed: dict[tuple[str, str], Respond] = {}
    for path, operations in by_path().items():
        by_method = {one.method: OperationEndpoint(door, one).run for one in operations}
        routes.append(route(path, by_method))
        if "{" not in path:
            fixed |= {(method, path): run for method, run in by_method.items()}
    routes.append(route(EVENTS_PATH, {"GET": EventStream(door).run}))
    if door.limits.live:
        routes.extend(live_routes(door))
    routes.extend(Pages(door, app.openapi).routes())
    return app, fixed


def by_path() -> dict[str, list[Operation]]:
    """The operations of each path; fixed paths come before paths with parameters, which have the
    methods that those do not: of a sequence named `delete`, for example."""
    paths: dict[str, list[Operation]] = {}
    for operation in sorted(OPERATIONS, key=lambda one: "{" in one.path):
        paths.setdefault(operation.path, []).append(operation)
    return paths
