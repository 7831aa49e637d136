"""A request's body on its way from the socket into a slot of the arena."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from service.doors.http.protocol.body_shares import FIRST_BYTES, GROWTH, Underway
from service.doors.http.protocol.chunks import Chunks
from service.doors.http.protocol.client_gone import ClientGone
from service.errors import AttndError, BodyTooLarge
from service.road.caller_end.slots import ArenaFull, Slot

NOTHING: Final = memoryview(b"")


class Source(Protocol):
    """Where slots come from, and go to."""

    underway: Underway

    def take(self, size: int) -> Slot:
        """Raises ArenaFull."""

    def give_back(self, slot: Slot) -> None: ...


class Body:
    """One body. A declared length is received straight into its slot, chunks are copied there.
    The slot grows with what comes; `caller` is whose share of all room it takes.

    When no slot can be had at once it stalls, holding what `wanted` says, until it is `place`d.
    `lead` bytes of the slot before it are left free.
    """

    __slots__ = (
        "booked",
        "caller",
        "chunks",
        "complete",
        "declared",
        "failure",
        "lead",
        "limit",
        "received",
        "slot",
        "source",
        "view",
        "waiting",
        "wanted",
    )

    def __init__(self, declared: int | None, chunks: Chunks | None, limit: int) -> None:
        self.declared = declared
        self.chunks = chunks
        self.limit = limit
        self.received = self.lead = 0
        self.caller = ""
        self.booked = 0
        """Bytes of that share."""
        self.complete = chunks is None and not declared
        self.slot: Slot | None = None
        self.view = NOTHING
        self.source: Source | None = None
        self.wanted = 0
        """Bytes of the slot that it waits for; 0 when it has room."""
        self.failure: AttndError | ClientGone | None = None
        self.waiting: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it takes in what comes: it was asked for, and has room."""
        if self.source is None or self.wanted or self.failure is not None:
            return False
        return self.slot is not None

    @property
    def left(self) -> int:
        """Declared bytes that have not come yet."""
        return 0 if self.declared is None else self.declared - self.received

    def begin(self, source: Source, caller: str = "", lead: int = 0) -> None:
        """Ask for room; a body declared beyond the limit gets none, and will be refused."""
        self.source, self.caller, self.lead = source, caller, lead
        if self.complete or self.failure is not None:
            return
        if self.declared is None:
            self.ask(FIRST_BYTES)
        elif self.declared <= FIRST_BYTES and self.declared <= self.limit:
            self.ask(self.declared)
        elif self.declared <= self.limit:
            self.ask(source.underway.first_room(caller, self.declared))

    def ask(self, size: int) -> None:
        """Take a slot, or stall; fail where the caller's share is used up."""
        if self.source is None:
            raise RuntimeError("a body that nobody asked for has no room: this is a bug")
        try:
            self.book(size)
        except AttndError as error:
            self.fail(error)
            return
        try:
            self.place(self.source.take(self.lead + size))
        except ArenaFull:
            self.wanted = self.lead + size
            self.wake()

    def book(self, size: int) -> None:
        """Take `size` bytes of the caller's share in place of those that it has. Raises
        Overloaded."""
        if self.source is not None and (size > FIRST_BYTES or self.booked > FIRST_BYTES):
            self.source.underway.change(self.caller, self.booked, size)
        self.booked = size

    def place(self, slot: Slot) -> None:
        """Go on in this slot, with what has come already copied over."""
        view = slot.view()[self.lead :]
        view[: self.received] = self.view[: self.received]
        self.give_up_slot()
        self.slot, self.view, self.wanted = slot, view, 0

    def room(self) -> memoryview:
        """Where the next bytes of a body of declared length go."""
        return self.view[self.received : self.declared]

    def got(self, count: int) -> None:
        """`count` bytes were received into `room`."""
        self.received += count
        if self.received == self.declared:
            self.finish()
        elif self.declared is not None and self.received >= len(self.view):
            self.ask(min(GROWTH * self.received, self.declared))

    def feed(self, data: memoryview) -> int:
        """Copy in what has come; how much of `data` was the body's. Less than all of it when the
        body is complete, or stalls."""
        if self.chunks is None:
            piece = data[: len(self.room())]
            self.view[self.received : self.received + len(piece)] = piece
            self.got(len(piece))
            return len(piece)
        return self.feed_chunks(self.chunks, data)

    def feed_chunks(self, chunks: Chunks, data: memoryview) -> int:
        """As `feed`, one chunk's data after another while there is room."""
        used = 0
        for begin, end in chunks.read(data):
            size = self.received + end - begin
            if size > self.limit:
                raise too_large(size, self.limit)
            if size > len(self.view):
                self.ask(min(max(2 * len(self.view), size), self.limit))
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
        self.complete = True
        self.book(0)
        self.wake()

    def fail(self, error: AttndError | ClientGone) -> None:
        """It will not come whole: whoever waits for it raises this."""
        self.failure = self.failure or error
        self.wake()

    def wake(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    async def change(self) -> None:
        """Return when it is complete or stalls. Raises its failure."""
        if not (self.complete or self.wanted or self.failure):
            self.waiting = asyncio.get_running_loop().create_future()
            await self.waiting
        if self.failure is not None:
            raise self.failure

    def check(self, limit: int) -> None:
        """Hold it to a limit. Raises BodyTooLarge, and its failure."""
        if self.failure is not None:
            raise self.failure
        self.limit = min(self.limit, limit)
        size = max(self.declared or 0, self.received)
        if size > limit:
            raise too_large(size, limit)

    def take_over(self, slot: Slot, source: Source) -> None:
        """Hold the request's image from now on, in place of the body as it came."""
        self.give_up_slot()
        self.slot, self.source = slot, source

    def release(self) -> None:
        """The request is over: give its memory back, now. (A failure has a traceback, and that has
        this body.)"""
        self.book(0)
        self.give_up_slot()
        self.failure = None

    def give_up_slot(self) -> None:
        self.view = NOTHING
        if self.slot is not None and self.source is not None:
            self.source.give_back(self.slot)
        self.slot = None


def too_large(size: int, limit: int) -> AttndError:
    told = f"the body is {size} bytes or more, at most {limit} are read: send less at once"
    return BodyTooLarge(told, size=size, limit=limit)
