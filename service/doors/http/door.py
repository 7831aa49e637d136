"""The state of an HTTP door: the link to the engine, its limits, its connections and the drain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Final

from config.sections import PoolSettings, Settings
from config.server import ServerSettings
from service.doors.http.bodies import Body, BodyShares, ReadBudget
from service.doors.http.exchange import ClientConnection, Exchange, Scope
from service.doors.kit.hosts import HostRule
from service.doors.kit.ledger import RequestLedger, Tracing
from service.doors.kit.link import QUIET_S, Link
from service.doors.kit.process import descriptors
from service.doors.kit.turns import Turns
from service.doors.kit.upstream import MakeUpstream, trim
from service.errors import AttndError, NotReady, Overloaded, RequestTimeout
from service.keys import Authenticator
from service.metrics import Metrics
from service.tenants import ANONYMOUS

LOG: Final = logging.getLogger("attnd.http")
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
        pool: PoolSettings | None = None,
    ) -> None:
        """`authenticator` None: the service has no keys. `pool`: of the examples in its OpenAPI
        document."""
        self.limits = limits
        self.authenticator = authenticator
        self.host_rule = host_rule or HostRule(Settings())
        self.pool = pool or PoolSettings()
        self.metrics = metrics
        self.loop = asyncio.get_running_loop()
        self.ledger = RequestLedger(metrics, tracing)
        self.link = make_upstream(limits, authenticator is not None, metrics)
        self.turns = Turns()
        self.connections: dict[ClientConnection, None] = {}
        self.shares = BodyShares(limits.max_inflight_bytes)
        self.read_budget = ReadBudget(self.loop)
        soft, spare = descriptors()
        self.max_connections = min(limits.max_connections, soft - spare)
        self.busy: Counter[str] = Counter()
        """Requests under way of each namespace."""
        self.active: dict[Exchange, None] = {}
        """Requests without a response."""
        self.receiving: dict[Exchange, None] = {}
        """Requests whose bodies are not whole, the oldest first."""
        self.last_complaint = 0.0
        self.last_work = self.loop.time()
        self.is_trimmed = True
        self.sweeping = self.loop.call_soon(self.sweep)

    @property
    def draining(self) -> str:
        """Why no more requests are accepted; empty while they are."""
        return self.link.draining

    def begin(self, scope: Scope) -> Exchange:
        """Read a request's head: its tenant, or its refusal."""
        exchange = Exchange(scope)
        if self.authenticator is None:
            exchange.caller = exchange.address
        else:
            self.authenticate(self.authenticator, exchange)
        if exchange.host not in self.host_rule.accepted or exchange.origin is not None:
            foreign = self.host_rule.refusal(exchange.host, exchange.origin)
            exchange.refusal = foreign or exchange.refusal
        return exchange

    def authenticate(self, authenticator: Authenticator, exchange: Exchange) -> None:
        """Set the request's tenant, or its refusal."""
        try:
            exchange.tenant = authenticator.tenant_of(exchange.authorization)
            exchange.caller = exchange.tenant.namespace
            if self.busy[exchange.caller] >= max(1, self.max_connections // 2):
                raise Overloaded(
                    f"this namespace has {self.busy[exchange.caller]} requests under way, the "
                    "limit is half of server.max_connections: wait for responses, or end streams",
                    retry_after_s=1.0,
                )
        except AttndError as error:
            exchange.tenant = ANONYMOUS
            exchange.refuse(error)

    def book(self, exchange: Exchange) -> Body | None:
        """The room of a large body of declared length; None where it will not be received, or is
        longer than any operation accepts."""
        size, limit = exchange.content_length or 0, self.limits.max_body_bytes
        if exchange.refusal is not None or size > limit:
            return None
        try:
            if self.draining:
                raise NotReady(self.draining)
            return Body(self.shares, self.link.arena, exchange.caller, size)
        except AttndError as error:
            exchange.refuse(error)
            return None

    # connections

    def admit(self, connection: ClientConnection) -> AttndError | None:
        """Add a connection, in the place of an idle one if there are too many: of the host with the
        most, the longest idle. Returns the error for one that may not stay."""
        self.connections[connection] = None
        if self.draining:
            return NotReady(self.draining)
        if len(self.connections) <= self.max_connections:
            return None
        full = (
            f"{self.max_connections} connections are open: close some, or raise "
            "server.max_connections and the limit of open files"
        )
        idle = [one for one in self.connections if one.idle_until and one is not connection]
        if idle:
            counts = Counter(one.address for one in self.connections)
            chosen = min(idle, key=lambda one: (-counts[one.address], one.idle_until))
            del self.connections[chosen]
            chosen.transport.abort()
        if self.loop.time() > self.last_complaint + COMPLAIN_EVERY_S:
            self.last_complaint = self.loop.time()
            what = "idle connections are closed for new ones" if idle else "new ones are refused"
            LOG.warning("%s: %s", what, full)
        return None if idle else Overloaded(full, retry_after_s=1.0)

    def sweep(self) -> None:
        """Check the deadlines of bodies, and unused memory, twice a second."""
        seconds = self.limits.receive_timeout_s
        late = time.perf_counter() - seconds
        for exchange in list(self.receiving):
            if exchange.started > late:
                break
            exchange.fail(
                RequestTimeout(
                    f"the request was not received within {seconds:g} s: send it faster, or raise "
                    "server.receive_timeout_s"
                )
            )
        now = self.loop.time()
        if self.active:
            self.last_work, self.is_trimmed = now, False
        elif not self.is_trimmed and now > self.last_work + QUIET_S:
            self.is_trimmed = True
            trim(self.loop, self.link)
        self.sweeping = self.loop.call_later(SWEEP_S, self.sweep)

    # the end

    def drain(self, reason: str) -> None:
        """Accept no more requests, and none that have not been received to their end."""
        self.link.draining = reason
        for exchange in list(self.receiving):
            exchange.fail(NotReady(reason))

    def close(self) -> None:
        self.sweeping.cancel()
        self.ledger.settle()
        self.link.close()
