"""What a door's requests share of the road: the session with the engine, its slots, its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from attnd.wire.dtypes import Part

from config.server import ServerSettings
from service.doors.kit.answer_shares import AnswerShares
from service.doors.kit.arena import DoorArena, overloaded
from service.doors.kit.spare_slots import SpareSlots
from service.doors.kit.timeouts import Timeouts
from service.errors import AnswerTooLarge, NotReady, Overloaded
from service.metrics import Metrics
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered, RoadCaller
from service.road.caller_end.slots import ArenaFull, Slot
from service.tenants import Tenant

FIRST_ARENA_BYTES: Final = 64 * 2**20
GROW_S: Final = 5.0
"""How long a request waits for the arena to grow."""
SPARE_BYTES: Final = 64 * 2**10
"""Room for an answer beyond the length of its request; one that is longer is asked for again."""
MOST_FIELDS: Final = 2**20
"""Room for an answer without tensors, whatever the length of its request."""
STALE_S: Final = 5.0
"""An engine says every second that it is there; one that has not for so long is not ready."""
QUIET_S: Final = 5.0
"""A door without work for as long gives unused arena memory back."""
LESS: Final = "ask for less at once (gather takes start and stop), or raise server.max_answer_bytes"


class Link:
    """The way to the engine of one door, on its event loop."""

    def __init__(
        self,
        limits: ServerSettings,
        has_keys: bool = False,
        metrics: Metrics | None = None,
        arena: DoorArena | None = None,
    ) -> None:
        """`has_keys`: calls are made for the tenants who showed them. The engine counts by itself,
        so there is nothing for `metrics`. `arena`: that of a door with other engines, too."""
        self.arena = arena
        self.limits = limits
        self.has_keys = has_keys
        self.loop = asyncio.get_running_loop()
        self.caller: RoadCaller | None = None
        self.draining = ""
        """Why no more requests are taken; empty while they are."""
        self.spare = SpareSlots() if arena is None else arena.spare
        self.answers = AnswerShares(limits.max_inflight_bytes) if arena is None else arena.answers
        self.timeouts = None if arena is not None else Timeouts()
        """A router has its own."""
        self.growing: asyncio.Task[int] | None = None
        self.on_reached: Callable[[], object] | None = None
        """Called when a connection is made, before the engine has answered."""
        self.needed: dict[str, int] = {}
        """What answers need that are about as long every time."""

    async def connect(self, path: str, name: str, secret: str) -> None:
        """Meet the engine, as a door by the service's secret.

        Raises OSError, NotReady, FrameError.
        """
        own = None if self.arena is None else self.arena.own
        first = min(FIRST_ARENA_BYTES, self.limits.max_inflight_bytes)
        size = first if own is None else own.slots.size
        self.caller = await RoadCaller.connect(
            path, size, name=name, secret=secret, own=own, on_reached=self.on_reached
        )

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

    def check_heard(self) -> None:
        """Raises NotReady where the engine has not been heard for a while, as when it is stopped.

        Calls are sent all the same: their deadlines bound what they wait.
        """
        caller = self.ready()
        if (age := self.loop.time() - caller.beat) > STALE_S:
            told = f"the engine was last heard {age:.0f} s ago, and says every second that it runs"
            raise NotReady(f"{told}: resume its process, or restart the service")

    def engine(self) -> RoadCaller:
        """The way to the engine for a request that was admitted. Raises NotReady."""
        if self.caller is None or self.caller.lost:
            raise NotReady(self.state[1])
        return self.caller

    @property
    def arena_fd(self) -> int:
        """The arena's file, for a process beside the door. Raises NotReady."""
        return self.engine().mapping.fd

    @property
    def is_pinned(self) -> bool:
        """Whether a device holds the arena."""
        return self.caller is not None and self.caller.pinned_bytes > 0

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
        if self.arena is not None:
            return self.arena.slot(size, exactly=exactly)
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
            raise overloaded(full) from None

    async def lay(self, parts: Sequence[Part]) -> tuple[Slot, int]:
        """An image's parts in a slot, and its length. Raises Overloaded, NotReady."""
        slot = await self.slot(sum(map(len, parts)))
        into, at = slot.view(), 0
        for part in parts:
            into[at : at + len(part)] = part
            at += len(part)
        return slot, at

    async def grow(self, caller: RoadCaller, full: ArenaFull) -> None:
        """Ask for an arena with room for what did not fit; only once, whoever asks."""
        size = min(max(2 * full.size, full.size + full.needed), self.limits.max_inflight_bytes)
        await self.grow_to(caller, size)

    async def grow_to(self, caller: RoadCaller, size: int) -> None:
        if self.growing is None:
            self.growing = self.loop.create_task(caller.grow(size))
            self.growing.add_done_callback(self.has_grown)
        await asyncio.wait((self.growing,), timeout=GROW_S)

    async def reach(self, arena: DoorArena, end: int) -> None:
        """Have the engine reach the door's arena up to there, which has grown. Raises Overloaded,
        NotReady."""
        for _ in range(2):  # it may have been growing by less
            if self.growing is None and end <= self.engine().reach:
                return
            await self.grow_to(self.engine(), arena.slots.size)
        if end > self.engine().reach:
            told = f"the engine reaches {self.engine().reach} bytes of the door's arena of {end}"
            raise Overloaded(f"{told}: set server.max_arena_bytes alike", retry_after_s=1.0)

    def has_grown(self, growing: asyncio.Task[int]) -> None:
        """The arena is as large as it gets, or the session is over, which every call will tell."""
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
        """The engine's answer, of at most `most` bytes, and the slot that it lies in.

        Raises AnswerTooLarge, Overloaded, NotReady, and DeadlineExceeded where the engine has said
        nothing `GRACE_S` after the deadline; what the engine refuses is an answer too.
        """
        timeouts = self.timeouts
        if timeouts is None:
            return await self.exchange(
                operation, request, length, most, deadline_us, request_id, tenant
            )
        with timeouts.limit(deadline_us * 1e-6 or self.limits.deadline_s):
            return await self.exchange(
                operation, request, length, most, deadline_us, request_id, tenant
            )

    async def exchange(
        self,
        operation: Operation,
        request: Slot,
        length: int,
        most: int,
        deadline_us: int,
        request_id: bytes,
        tenant: Tenant,
    ) -> tuple[Answered, Slot]:
        """As `call`, for as long as it takes."""
        room = (length if operation.gives else min(length, MOST_FIELDS)) + SPARE_BYTES
        room = max(room, self.needed.get(operation.name, 0))
        slot = await self.answer_slot(tenant, min(room, most), exactly=room > most)
        while True:
            try:
                engine = self.engine()
                if self.arena is not None and engine.reach < self.arena.slots.size:
                    ends = (one.offset + one.size for one in (request, slot))
                    await self.reach(self.arena, max(ends))
                answered = await engine.call(
                    operation.number,
                    request,
                    length,
                    slot,
                    deadline_us=deadline_us,
                    request_id=request_id,
                    tenant=engine.number_of(tenant) if self.has_keys else 0,
                )
            except BaseException:
                self.give_back(slot)
                raise
            if not answered.needed:
                return answered, slot
            self.give_back(slot)
            if answered.needed > most:
                raise AnswerTooLarge(answered.needed, most, LESS)
            if operation.gives and not operation.has_body:
                self.needed[operation.name] = answered.needed + SPARE_BYTES
            slot = await self.answer_slot(tenant, answered.needed)

    async def answer_slot(self, tenant: Tenant, size: int, *, exactly: bool = False) -> Slot:
        """A slot for an answer, of the share of its namespace. Raises Overloaded, NotReady."""
        if self.has_keys:
            self.answers.check(tenant.namespace, size)
        slot = await self.slot(size, exactly=exactly)
        if self.has_keys:
            self.answers.count(tenant.namespace, slot)
        return slot

    def trim(self) -> None:
        """Give memory that nobody uses back to the system."""
        if self.arena is None:
            self.spare.free()
            if self.caller is not None:
                self.caller.trim()

    def close(self) -> None:
        """End the session."""
        if self.timeouts is not None:
            self.timeouts.close()
        if self.arena is None:
            self.spare.free()
        if self.caller is not None:
            self.caller.close()
