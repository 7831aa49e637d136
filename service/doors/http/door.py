"""What all connections of a door share: the road to the engine, the limits, the drain."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from email.utils import formatdate
from functools import partial
from typing import Final

from config.sections import ServerSettings
from service.doors.gate import Gate
from service.doors.http.application import make_application
from service.doors.http.exchange import Exchange
from service.doors.http.helper import Helper
from service.doors.http.ledger import Ledger
from service.doors.http.protocol import Connection
from service.doors.http.spare import SpareSlots
from service.doors.http.tracing import Tracing
from service.errors import AttndError, NotReady, Overloaded
from service.metrics import Metrics
from service.road.caller import RoadCaller
from service.road.slots import ArenaFull, Slot

LOG: Final = logging.getLogger("attnd.http")
READ_BYTES: Final = 64 * 2**10
"""Of the buffer that all connections read into in turn, but for bodies in their slots."""
FIRST_ARENA_BYTES: Final = 64 * 2**20
GROW_S: Final = 5.0
"""How long a request waits for the arena to grow."""
SWEEP_S: Final = 0.5
SPARE_DESCRIPTORS: Final = 128
"""Half of them for the road, logs and listening sockets, half for connections that are being
refused."""
QUIET_S: Final = 5.0
"""A door without work for as long gives unused arena memory back."""
COMPLAIN_EVERY_S: Final = 10.0


class Door:
    """One door on its event loop."""

    def __init__(
        self,
        limits: ServerSettings,
        metrics: Metrics,
        gate: Gate | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`gate` None: everybody is let in."""
        self.limits = limits
        self.gate = gate
        self.metrics = metrics
        self.loop = asyncio.get_running_loop()
        self.ledger = Ledger(metrics, tracing)
        self.caller: RoadCaller | None = None
        self.draining = ""
        """Why no more requests are taken; empty while they are."""
        self.drained = asyncio.Event()
        self.helper = Helper(self)
        self.spare = SpareSlots()
        self.buffer = bytearray(READ_BYTES)
        self.connections: set[Connection] = set()
        soft, spare = descriptors()
        self.max_connections = min(limits.max_connections, soft - spare)
        self.max_lingering = spare // 2
        self.active = 0
        self.date = b""
        self.growing: asyncio.Task[int] | None = None
        self.last_complaint = 0.0
        self.last_work = self.loop.time()
        self.is_trimmed = True
        self.app = make_application(self)
        self.sweeping = self.loop.call_soon(self.sweep)

    # the road

    async def connect(self, path: str, name: str, secret: str) -> None:
        """Meet the engine. Raises OSError, NotReady, FrameError."""
        size = min(FIRST_ARENA_BYTES, self.limits.max_inflight_bytes)
        self.caller = await RoadCaller.connect(path, size, name=name, secret=secret)

    @property
    def state(self) -> tuple[str, str]:
        """`starting`, `ready`, `draining` or `lost`, and why."""
        if self.draining:
            return "draining", self.draining
        if self.caller is None:
            return "starting", "the service is starting: its engine has not answered yet"
        return self.caller.state.state, self.caller.state.reason

    def ready(self) -> RoadCaller:
        """The way to the engine. Raises NotReady."""
        caller = self.caller
        if self.draining or caller is None or caller.state.state != "ready":
            state, reason = self.state
            raise NotReady(reason or f"the service is {state}")
        return caller

    def engine(self) -> RoadCaller:
        """The way to the engine for a request that was admitted. Raises NotReady."""
        if self.caller is None or self.caller.lost:
            raise NotReady(self.state[1])
        return self.caller

    def take(self, size: int) -> Slot:
        """A slot from what the arena has now. Raises ArenaFull."""
        if self.caller is None or self.caller.lost:
            raise ArenaFull(size, 0, 0)
        return self.spare.take(size, self.caller.take)

    def give_back(self, slot: Slot) -> None:
        """Give up a slot that nothing here refers to any more; a call may still hold it."""
        self.spare.put(slot)

    async def slot(self, size: int, *, exactly: bool = False) -> Slot:
        """A slot, not much larger if `exactly`; the arena grows for it as far as it may.

        Raises Overloaded, NotReady.
        """
        caller = self.engine()
        if self.growing is not None:  # an arena that the device uses grows while no call has it
            await asyncio.wait((self.growing,), timeout=GROW_S)
        take = caller.take if exactly else partial(self.spare.take, cut=caller.take)
        try:
            return take(size)
        except ArenaFull as full:
            if full.size < self.limits.max_inflight_bytes:
                await self.grow(caller, full)
        try:
            return take(size)
        except ArenaFull as full:
            raise self.overloaded(full) from None

    async def grow(self, caller: RoadCaller, full: ArenaFull) -> None:
        """Ask for an arena with room for what did not fit; only once, whoever asks."""
        if self.growing is None:
            size = min(max(2 * full.size, full.size + full.needed), self.limits.max_inflight_bytes)
            self.growing = self.loop.create_task(caller.grow(size))
            self.growing.add_done_callback(self.has_grown)
        await asyncio.wait((self.growing,), timeout=GROW_S)

    def has_grown(self, growing: asyncio.Task[int]) -> None:
        """The arena is as large as it gets, or the session is over, which every call will tell."""
        self.growing = None
        if not growing.cancelled():
            growing.exception()

    def overloaded(self, full: ArenaFull) -> AttndError:
        told = (
            f"{full.needed} bytes are needed for bodies and answers in flight, {full.free} of "
            f"{full.size} are free: retry later, or raise server.max_inflight_bytes"
        )
        return Overloaded(told, retry_after_s=1.0)

    # connections

    def admit(self, connection: Connection) -> bool:
        """Whether one more connection may stay."""
        self.connections.add(connection)
        return len(self.connections) <= self.max_connections and not self.draining

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def too_many(self) -> AttndError:
        """Why a connection may not stay."""
        if self.draining:
            return NotReady(self.draining)
        told = (
            f"{self.max_connections} connections are open: close idle ones, or raise "
            "server.max_connections and the limit of open files"
        )
        now = self.loop.time()
        if now > self.last_complaint + COMPLAIN_EVERY_S:
            self.last_complaint = now
            LOG.warning("new connections are refused: %s", told)
        return Overloaded(told, retry_after_s=1.0)

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
        elif not self.is_trimmed and now > self.last_work + QUIET_S and self.caller is not None:
            self.is_trimmed = True
            self.spare.free()
            self.caller.trim()
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
        self.draining = reason
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
        self.spare.free()
        if self.caller is not None:
            self.caller.close()


def descriptors() -> tuple[int, int]:
    """The limit of open files, and how many of them are not for connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = sys.maxsize
    return soft, min(SPARE_DESCRIPTORS, soft // 2)
