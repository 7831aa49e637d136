"""A door's session with one engine: its state, and its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

from config.server import ServerSettings
from service.doors.kit.arena import MAX_BYTES, DoorArena
from service.errors import AnswerTooLarge, NotReady, Overloaded
from service.metrics import Metrics
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered, RoadCaller
from service.road.caller_end.slots import Slot
from service.tenants import Tenant

CHECK_S: Final = 0.25
"""Interval of checks of deadlines: a timer for each call would cost more."""
GRACE_S: Final = 5.0
"""An engine keeps deadlines itself. A call fails when the engine is silent this long after one."""
GROW_S: Final = 5.0
"""How long a request waits for the engine to map the grown arena."""
SPARE_BYTES: Final = 64 * 2**10
"""Room for a reply beyond the length of its request; for a longer reply the call is repeated."""
MAX_FIELDS_BYTES: Final = 2**20
"""Most room for a reply without tensors."""
STALE_S: Final = 5.0
"""An engine reports its state every second; one silent for this long is not ready."""
QUIET_S: Final = 5.0
"""A door idle for this long returns unused arena memory to the system."""
LESS: Final = (
    "request less per call (gather takes start and stop), or raise server.max_answer_bytes"
)


class Link:
    """The session of one door with its engine, on the door's event loop."""

    def __init__(
        self,
        limits: ServerSettings,
        has_keys: bool = False,
        metrics: Metrics | None = None,
        arena: DoorArena | None = None,
    ) -> None:
        """`has_keys`: calls are made for the tenants of keys. `metrics` is unused: the engine
        counts its own. `arena`: that of a router, which checks deadlines and frees it itself."""
        self.is_routed = arena is not None
        self.arena = arena or DoorArena(limits)
        self.limits = limits
        self.has_keys = has_keys
        self.loop = asyncio.get_running_loop()
        self.caller: RoadCaller | None = None
        self.draining = ""
        """Why no more requests are accepted; empty while they are."""
        self.checking: asyncio.TimerHandle | None = None
        """Checks deadlines while calls are in flight. A router checks its own."""
        self.growing: asyncio.Task[int] | None = None
        self.on_reached: Callable[[], object] | None = None
        """Called when the engine's socket accepts the connection, before the engine replies."""
        self.needed: dict[str, int] = {}
        """Room for replies by operation, where all have about the same length."""

    async def connect(self, path: str, name: str, secret: str) -> None:
        """Open the session, as a door by the service's secret.

        Raises OSError, NotReady, FrameError.
        """
        own = self.arena.own
        self.caller = await RoadCaller.connect(
            path, own.mapping.size, name=name, secret=secret, own=own, on_reached=self.on_reached
        )

    @property
    def state(self) -> tuple[str, str]:
        """`starting`, `ready`, `draining` or `lost`, and the reason."""
        if self.draining:
            return "draining", self.draining
        if self.caller is None:
            return "starting", "the service is starting: its engine has not replied yet"
        return self.caller.state.state, self.caller.state.reason

    def ready(self) -> RoadCaller:
        """The session. Raises NotReady unless requests are served."""
        caller = self.caller
        if self.draining or caller is None or caller.state.state != "ready":
            state, reason = self.state
            raise NotReady(reason or f"the service is {state}")
        return caller

    def check_heard(self) -> None:
        """Raises NotReady if the engine has been silent for a while, for example stopped.

        Calls are sent nevertheless: their deadlines limit how long they wait.
        """
        caller = self.ready()
        if (age := self.loop.time() - caller.beat) > STALE_S:
            text = f"the engine has been silent for {age:.0f} s, and reports its state every second"
            raise NotReady(f"{text}: resume its process, or restart the service")

    def engine(self) -> RoadCaller:
        """The session, for a request that was accepted. Raises NotReady."""
        if self.caller is None or self.caller.lost:
            raise NotReady(self.state[1])
        return self.caller

    @property
    def is_pinned(self) -> bool:
        """Whether a device holds the arena."""
        return self.caller is not None and self.caller.pinned_bytes > 0

    async def grow(self, caller: RoadCaller, size: int) -> None:
        """Have the engine map more of the arena, or wait for a request in flight."""
        if self.growing is None:
            self.growing = self.loop.create_task(caller.grow(size))
            self.growing.add_done_callback(self.has_grown)
        await asyncio.wait((self.growing,), timeout=GROW_S)

    async def reach(self, end: int) -> None:
        """Have the engine map the arena, which has grown, up to `end`. Raises Overloaded,
        NotReady."""
        for _ in range(2):  # a request in flight may be for less
            if self.growing is None and end <= self.engine().reach:
                return
            await self.grow(self.engine(), self.arena.mapping.size)
        if end > self.engine().reach:
            text = f"the engine maps {self.engine().reach} bytes of the door's arena of {end}"
            raise Overloaded(
                f"{text}: set server.max_arena_bytes to the same value", retry_after_s=1.0
            )

    def has_grown(self, growing: asyncio.Task[int]) -> None:
        """The engine has mapped it, or the session is over, which the next call reports."""
        self.growing = None
        if not growing.cancelled():
            growing.exception()

    async def call(
        self,
        operation: Operation,
        request: Slot,
        length: int,
        most: int,
        deadline_us: int,
        request_id: bytes,
        tenant: Tenant,
    ) -> tuple[Answered, Slot]:
        """The engine's reply, of at most `most` bytes, and the slot that holds it.

        Raises AnswerTooLarge, Overloaded, NotReady, and DeadlineExceeded if the engine is silent
        `GRACE_S` after the deadline. An error of the engine's is a reply, too.
        """
        room = (length if operation.gives else min(length, MAX_FIELDS_BYTES)) + SPARE_BYTES
        if self.needed:
            room = max(room, self.needed.get(operation.name, 0))
        ends = inf
        if not self.is_routed:
            ends = self.loop.time() + GRACE_S + (deadline_us * 1e-6 or self.limits.deadline_s)
            if self.checking is None:
                self.checking = self.loop.call_later(CHECK_S, self.check_deadlines)
        engine, arena = self.caller, self.arena
        while True:
            size = min(room, most)
            if self.has_keys:
                arena.answers.check(tenant.namespace, size)
            slot = arena.slot(size, exactly=room > most)
            if self.has_keys and slot.size > MAX_BYTES:
                arena.answers.count(tenant.namespace, slot)
            try:
                if engine is None or engine.lost:
                    raise NotReady(self.state[1])
                if engine.reach < arena.mapping.size:
                    await self.reach(max(one.offset + one.size for one in (request, slot)))
                answered = await engine.call(
                    operation.number,
                    request,
                    length,
                    slot,
                    deadline_us=deadline_us,
                    request_id=request_id,
                    tenant=engine.number_of(tenant) if self.has_keys else 0,
                    ends=ends,
                )
            except BaseException:
                arena.give_back(slot)
                raise
            if not answered.needed:
                return answered, slot
            arena.give_back(slot)
            if answered.needed > most:
                raise AnswerTooLarge(answered.needed, most, LESS)
            if operation.gives and not operation.has_body:
                self.needed[operation.name] = answered.needed + SPARE_BYTES
            room = answered.needed

    def check_deadlines(self) -> None:
        """Fail overdue calls; repeated while calls are in flight."""
        caller = self.caller
        self.checking = None
        if caller is not None and caller.pending:
            caller.time_out(self.loop.time())
            self.checking = self.loop.call_later(CHECK_S, self.check_deadlines)

    def close(self) -> None:
        if self.checking is not None:
            self.checking.cancel()
        if self.caller is not None:
            self.caller.close()
        if not self.is_routed:
            self.arena.close()
