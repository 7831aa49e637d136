"""What all connections of a door share: the road to the engine, the limits, the drain."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections import Counter
from email.utils import formatdate
from typing import Final

from config.sections import Settings
from config.server import ServerSettings
from service.doors.http.application import make_application
from service.doors.http.long_json import Helper
from service.doors.http.protocol.body_shares import Underway
from service.doors.http.protocol.connection import Connection
from service.doors.http.protocol.exchange import Exchange
from service.doors.http.protocol.hosts import HostRule
from service.doors.kit.authentication import Gate
from service.doors.kit.ledger import Ledger
from service.doors.kit.link import QUIET_S, Link
from service.doors.kit.pieces import OneByOne
from service.doors.kit.tracing import Tracing
from service.doors.kit.upstream import MakeUpstream
from service.errors import AttndError, NotReady, Overloaded
from service.metrics import Metrics

LOG: Final = logging.getLogger("attnd.http")
READ_BYTES: Final = 64 * 2**10
"""Of the buffer that all connections read into in turn, but for bodies in their slots."""
SWEEP_S: Final = 0.5
SPARE_DESCRIPTORS: Final = 128
"""Half of them for the road, logs and listening sockets, half for connections that are being
refused."""
COMPLAIN_EVERY_S: Final = 10.0


class Door:
    """One door on its event loop."""

    def __init__(
        self,
        limits: ServerSettings,
        metrics: Metrics,
        gate: Gate | None = None,
        tracing: Tracing | None = None,
        make_upstream: MakeUpstream = Link,
        host_rule: HostRule | None = None,
    ) -> None:
        """`gate` None: everybody is let in."""
        self.limits = limits
        self.gate = gate
        self.host_rule = host_rule or HostRule(Settings())
        self.metrics = metrics
        self.loop = asyncio.get_running_loop()
        self.ledger = Ledger(metrics, tracing)
        self.link = link = make_upstream(limits, gate is not None, metrics)
        self.connect, self.ready = link.connect, link.ready
        self.take, self.slot, self.give_back = link.take, link.slot, link.give_back
        self.drained = asyncio.Event()
        self.helper = Helper(self)
        self.long_work = OneByOne()
        self.buffer = bytearray(READ_BYTES)
        self.connections: set[Connection] = set()
        self.underway = Underway(limits.max_inflight_bytes)
        soft, spare = descriptors()
        self.max_connections = min(limits.max_connections, soft - spare)
        self.max_lingering = spare // 2
        self.active = 0
        self.date = b""
        self.last_complaint = 0.0
        self.last_work = self.loop.time()
        self.is_trimmed = True
        self.app = make_application(self)
        self.sweeping = self.loop.call_soon(self.sweep)

    # the road

    @property
    def state(self) -> tuple[str, str]:
        return self.link.state

    @property
    def draining(self) -> str:
        """Why no more requests are taken; empty while they are."""
        return self.link.draining

    # connections

    def admit(self, connection: Connection) -> bool:
        """Whether one more connection may stay."""
        self.connections.add(connection)
        if self.draining:
            return False
        return len(self.connections) <= self.max_connections or self.make_room(connection)

    def make_room(self, newest: Connection) -> bool:
        """Close one idle connection for a new one; whether there was one.

        First go those without a valid request so far, then those of the host with the most, then
        those that have waited longest.
        """
        idle = [one for one in self.connections if one.is_idle and one is not newest]
        if not idle:
            return False
        counts = Counter(one.address for one in self.connections)
        min(idle, key=lambda one: (one.is_known, -counts[one.address], one.since)).give_place()
        self.complain("idle connections are closed for new ones")
        return True

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def too_many(self) -> AttndError:
        """Why a connection may not stay."""
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

    def may_linger(self, connection: Connection) -> bool:
        """Whether a closing connection may wait for its client, or would take another's place."""
        return len(self.connections) < self.max_connections + self.max_lingering

    def sweep(self) -> None:
        """Twice a second: what has taken too long, the date, memory that nobody uses."""
        now = self.loop.time()
        self.date = formatdate(usegmt=True).encode()
        for connection in list(self.connections):
            connection.check(now)
        if self.active:
            self.last_work, self.is_trimmed = now, False
        elif not self.is_trimmed and now > self.last_work + QUIET_S:
            self.is_trimmed = True
            self.link.trim()
        self.sweeping = self.loop.call_later(SWEEP_S, self.sweep)

    # requests

    def enter(self, exchange: Exchange) -> None:
        """A request has begun."""
        self.active += 1
        if self.draining:
            exchange.keep_alive = False

    def leave(self) -> None:
        """A request has ended."""
        self.active -= 1
        if self.draining and not self.active:
            self.drained.set()

    def drain(self, reason: str) -> None:
        """Take no more requests; `drained` is set when all that came before are answered."""
        self.link.draining = reason
        if not self.active:
            self.drained.set()
        for connection in list(self.connections):
            connection.drain()

    def give_up(self, error: AttndError) -> None:
        """Answer with `error` whatever is not answered yet."""
        for connection in list(self.connections):
            connection.give_up(error)

    async def close(self, seconds: float) -> None:
        """The end of the door: connections close when their answers are sent, or after a time."""
        self.sweeping.cancel()
        ends = self.loop.time() + seconds
        for connection in list(self.connections):
            connection.transport.close()
        while self.connections and self.loop.time() < ends:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.abort()
        self.ledger.settle()
        self.helper.close()
        self.link.close()


def descriptors() -> tuple[int, int]:
    """The limit of open files, and how many of them are not for connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = sys.maxsize
    return soft, min(SPARE_DESCRIPTORS, soft // 2)
