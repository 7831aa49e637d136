"""A request's body on its way from the socket into a slot of the arena."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from service.doors.http.protocol.chunks import Chunks
from service.errors import AttndError, BodyTooLarge, Overloaded
from service.road.caller_end.slots import ArenaFull, Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door

FIRST_BYTES: Final = 64 * 2**10
"""Room that every body gets at once."""
GROWTH: Final = 8
"""A body that has filled its room gets this many times as much."""
LONGEST_COPY: Final = 4 * 2**20
"""From here on it gets all of its declared length: the received bytes are copied in one pass of
the loop."""
DECLARED: Final = 4
"""All bodies together get 1/4 of the arena for declared lengths; one caller's get 1/8. A
body that is alone may have any room."""
OF_ONE: Final = 2
"""The bodies of one caller, as they grow, get at most 1/2 of the arena."""


class BodyShares:
    """Limits each caller's share of the arena for bodies that are being received, at one door.

    Declaring a length costs a client nothing. So most room follows the bytes that arrive, and only
    a part of the arena is given for declarations alone. Callers are namespaces, or addresses where
    there are no keys.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.by_caller: dict[str, int] = {}

    def first_room(self, caller: str, declared: int) -> int:
        """Room for a body before any of it has arrived."""
        fits = self.total + declared <= self.limit // DECLARED
        mine = self.by_caller.get(caller, 0) + declared
        if not self.total or (fits and mine <= self.limit // (2 * DECLARED)):
            return declared
        return min(declared, FIRST_BYTES)

    def change(self, caller: str, before: int, after: int) -> None:
        """A body's room changes from `before` to `after` bytes. Raises Overloaded, and changes
        nothing then.

        A caller's only large body may have any room; bodies of up to `FIRST_BYTES` are not counted.
        """
        before = before if before > FIRST_BYTES else 0
        after = after if after > FIRST_BYTES else 0
        others = self.by_caller.get(caller, 0) - before
        if after > before and others and others + after > self.limit // OF_ONE:
            raise self.too_much(others)
        self.total += after - before
        if others + after:
            self.by_caller[caller] = others + after
        else:
            self.by_caller.pop(caller, None)

    def too_much(self, others: int) -> AttndError:
        text = (
            f"this caller's other requests hold {others} bytes while they are received, the limit "
            f"is {self.limit // OF_ONE}: send fewer large bodies at once, or raise "
            "server.max_inflight_bytes"
        )
        return Overloaded(text, retry_after_s=1.0)


EMPTY: Final = memoryview(b"")


class Body:
    """One body. The event loop receives a declared length straight into a slot; chunks are copied.

    The slot grows as bytes arrive, within the share of `caller`. Without room in the arena the body
    stalls: `wanted` is the size of the slot that it needs, until `place` gives it one.
    """

    def __init__(self, declared: int | None, chunks: Chunks | None, limit: int) -> None:
        self.declared = declared
        self.chunks = chunks
        self.limit = limit
        self.received = self.booked = self.wanted = 0
        """`booked`: bytes of the caller's share that this body uses."""
        self.caller = ""
        self.complete = chunks is None and not declared
        self.is_open = False
        """Whether it accepts bytes: it has a slot, and neither stalls, failed, nor is complete."""
        self.slot: Slot | None = None
        self.view = EMPTY
        self.door: Door | None = None
        self.failure: AttndError | None = None
        self.waiting: asyncio.Future[None] | None = None

    @property
    def left(self) -> int:
        """Declared bytes that have not arrived."""
        return 0 if self.declared is None else self.declared - self.received

    def begin(self, door: Door, caller: str = "") -> None:
        """Reserve a slot; not for a body declared beyond the limit, which is rejected later."""
        self.door, self.caller = door, caller
        declared = self.declared
        if self.complete or self.failure is not None:
            return
        if declared is None:
            self.reserve(FIRST_BYTES)
        elif declared <= FIRST_BYTES and declared <= self.limit:
            self.reserve(declared)
        elif declared <= self.limit:
            self.reserve(door.shares.first_room(caller, declared))

    def reserve(self, size: int) -> None:
        """Take a slot, or stall; fail where the caller's share is used up."""
        door = self.door
        if door is None:
            raise RuntimeError("a body that has not begun reserves a slot: this is a bug")
        if size > FIRST_BYTES or self.booked > FIRST_BYTES:
            try:
                door.shares.change(self.caller, self.booked, size)
            except AttndError as error:
                self.fail(error)
                return
            self.booked = size
        try:
            self.place(door.take(size))
        except ArenaFull:
            self.wanted = size
            self.is_open = False
            self.wake()

    def place(self, slot: Slot) -> None:
        """Continue in this slot; copies the bytes that have arrived."""
        view = slot.view()
        if self.received:
            view[: self.received] = self.view[: self.received]
        if self.slot is not None:
            self.give_up_slot()
        self.slot, self.view, self.wanted = slot, view, 0
        self.is_open = self.failure is None

    def room(self) -> memoryview:
        """Where the next bytes of a body of declared length go."""
        return self.view[self.received : self.declared]

    def got(self, count: int) -> None:
        """`count` bytes were received into `room`."""
        self.received += count
        if self.received == self.declared:
            self.finish()
        elif self.declared is not None and self.received >= len(self.view):
            is_short = self.received < LONGEST_COPY
            self.reserve(min(GROWTH * self.received, self.declared) if is_short else self.declared)

    def feed(self, data: memoryview) -> int:
        """Copy the body's part of `data`; returns its length. The rest is left when the body is
        complete, or stalls, or after many short chunks. A broken body consumes everything."""
        if self.chunks is not None:
            try:
                return self.feed_chunks(self.chunks, data)
            except AttndError as error:
                self.fail(error)
                return len(data)
        begin, declared = self.received, self.declared or 0
        count = min(len(data), len(self.view) - begin, declared - begin)
        self.view[begin : begin + count] = data[:count]
        self.got(count)
        return count

    def feed_chunks(self, chunks: Chunks, data: memoryview) -> int:
        """As `feed`, chunk by chunk while there is room."""
        used = 0
        for begin, end in chunks.read(data):
            size = self.received + end - begin
            if size > self.limit:
                raise too_large(size, self.limit)
            if size > len(self.view):
                self.reserve(min(max(2 * len(self.view), size), self.limit))
                if self.failure is not None:
                    return len(data)
                if self.wanted:
                    chunks.left += end - begin
                    return begin
            self.view[self.received : size] = data[begin:end]
            self.received, used = size, end
        if (size := self.received + chunks.left) > self.limit + 2:
            raise too_large(size, self.limit)
        if chunks.done:
            self.finish()
        return used

    def finish(self) -> None:
        self.complete, self.is_open = True, False
        if self.booked:
            self.unbook()
        if self.waiting is not None:
            self.wake()

    def unbook(self) -> None:
        """Give the caller's share back."""
        if self.door is not None:
            self.door.shares.change(self.caller, self.booked, 0)
            self.booked = 0

    def fail(self, error: AttndError) -> None:
        """The body will not arrive whole: `change` raises this."""
        self.failure = self.failure or error
        self.is_open = False
        self.wake()

    def wake(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    async def change(self) -> None:
        """Return when the body is complete or stalls. Raises its failure."""
        if not (self.complete or self.wanted or self.failure):
            self.waiting = asyncio.get_running_loop().create_future()
            await self.waiting
        if self.failure is not None:
            raise self.failure

    def check(self, limit: int) -> None:
        """Lower the limit. Raises BodyTooLarge, or the body's failure."""
        if self.failure is not None:
            raise self.failure
        self.limit = min(self.limit, limit)
        size = max(self.declared or 0, self.received)
        if size > limit:
            raise too_large(size, limit)

    def take_over(self, slot: Slot, door: Door) -> None:
        """Hold the request's image, in place of the body as received."""
        self.give_up_slot()
        self.slot, self.door = slot, door

    def release(self) -> None:
        """Free the memory at the request's end. (A failure's traceback refers to this body.)"""
        if self.booked:
            self.unbook()
        self.view, self.failure = EMPTY, None
        if self.slot is not None and self.door is not None:
            self.door.give_back(self.slot)
            self.slot = None

    def give_up_slot(self) -> None:
        self.view, self.is_open = EMPTY, False
        if self.slot is not None and self.door is not None:
            self.door.give_back(self.slot)
        self.slot = None


def too_large(size: int, limit: int) -> AttndError:
    text = f"the body is at least {size} bytes, the limit is {limit}: send less per request"
    return BodyTooLarge(text, size=size, limit=limit)
