"""Large request bodies in slots of the arena; their limits: shares of callers, bytes in a pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from service.doors.kit.arena import DoorArena
from service.errors import AttndError, Overloaded
from service.road.caller_end.slots import Slot

LARGE_BYTES: Final = 64 * 2**10
"""Longer bodies are counted, and received straight into the arena if their length is declared."""
OF_ONE: Final = 2
"""The bodies of one caller get at most 1/2 of the arena while they are received."""
SCRATCH: Final = memoryview(bytearray(64 * 2**10))
"""Receives the rest of bodies that were refused."""


class BodyShares:
    """Limits each caller's share of the arena for bodies that are being received, at one door.
    Callers are namespaces, or addresses where there are no keys."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.by_caller: dict[str, int] = {}

    def change(self, caller: str, before: int, after: int) -> None:
        """A body's room changes from `before` to `after` bytes. Raises Overloaded, and changes
        nothing then. A caller's only body may have any room."""
        others = self.by_caller.get(caller, 0) - before
        if after > before and others and others + after > self.limit // OF_ONE:
            text = (
                f"this caller's other requests hold {others} bytes while they are received, the "
                f"limit is {self.limit // OF_ONE}: send fewer large bodies at once, or raise "
                "server.max_inflight_bytes"
            )
            raise Overloaded(text, retry_after_s=1.0)
        if others + after:
            self.by_caller[caller] = others + after
        else:
            self.by_caller.pop(caller, None)


class Body:
    """One large body of declared length in its slot, within the share of `caller`."""

    def __init__(self, shares: BodyShares, arena: DoorArena, caller: str, size: int) -> None:
        """Raises Overloaded."""
        self.shares, self.arena = shares, arena
        self.caller = caller
        self.declared = size
        self.received = 0
        self.arrived = asyncio.Event()
        shares.change(caller, 0, size)
        self.booked = size
        self.slot: Slot | None = None
        try:
            self.slot = arena.slot(size)
        except AttndError:
            self.release()
            raise

    def room(self) -> memoryview:
        """Where the next bytes go."""
        left = self.declared - self.received
        return SCRATCH[:left] if self.slot is None else self.slot.view()[self.received :][:left]

    def got(self, count: int) -> None:
        """`count` bytes were received into `room`."""
        self.received += count
        if self.received == self.declared:
            self.arrived.set()

    @property
    def is_complete(self) -> bool:
        return self.received == self.declared

    def take(self) -> Slot | None:
        """The slot, no longer this body's; the caller's share is free again."""
        self.shares.change(self.caller, self.booked, 0)
        slot, self.slot, self.booked = self.slot, None, 0
        return slot

    def release(self) -> None:
        """Give the memory back; the rest of the body is discarded."""
        if (slot := self.take()) is not None:
            self.arena.give_back(slot)


PASS_BYTES: Final = 2 * 2**20
"""Received in a pass, over all connections: some milliseconds, as new pages of shared memory are
slow to write."""
LEAST_BYTES: Final = 16 * 2**10
"""Received at once from each further connection in the same pass. Less is not counted."""


class ReadBudget:
    """Sixteen connections with 8 MiB each in the system's buffers would stall a loop for 0.2 s."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = PASS_BYTES
        self._paused: list[Callable[[], object]] = []
        """Resume connections that have received their part of a pass."""

    def room(self, view: memoryview) -> memoryview:
        """The part of a body's room that may be filled now."""
        return view[: max(self._left, LEAST_BYTES)]

    def is_spent(self, nbytes: int, resume: Callable[[], object]) -> bool:
        """Counts received bytes. If True the connection must pause until `resume` is called, in the
        next pass."""
        if self._left == PASS_BYTES:
            self._loop.call_soon(self._renew)
        self._left -= nbytes
        if self._left > 0:
            return False
        self._paused.append(resume)
        return True

    def _renew(self) -> None:
        self._left = PASS_BYTES
        paused, self._paused = self._paused, []
        for resume in paused:
            resume()
