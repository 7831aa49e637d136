"""A request's body on its way into a slot of the arena."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from service.doors.http.exchange import Exchange
from service.errors import AttndError, BodyTooLarge, Overloaded
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door

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
    """One body in its slot, within the share of `caller`."""

    def __init__(self, door: Door, caller: str, size: int, limit: int) -> None:
        """`size`: room for the first bytes, `limit`: the largest body. Raises Overloaded."""
        self.door = door
        self.caller = caller
        self.limit = limit
        self.received = self.booked = 0
        self.slot: Slot | None = None
        self.declared: int = size
        """Bytes that are expected, as far as known."""
        self.arrived = asyncio.Event()
        self.reserve(size)

    def reserve(self, size: int) -> None:
        """Take a slot of `size` bytes, and copy what has arrived. Raises Overloaded."""
        self.door.shares.change(self.caller, self.booked, size)
        try:
            slot = self.door.link.arena.slot(size)
        except AttndError:
            self.door.shares.change(self.caller, size, self.booked)
            raise
        before, self.slot, self.booked = self.slot, slot, size
        if before is not None:
            slot.view()[: self.received] = before.view(self.received)
            self.door.link.arena.give_back(before)

    def room(self) -> memoryview:
        """Where the next bytes of a body of declared length go."""
        left = self.declared - self.received
        return SCRATCH[:left] if self.slot is None else self.slot.view()[self.received :][:left]

    def got(self, count: int) -> None:
        """`count` bytes were received into `room`."""
        self.received += count
        if self.received == self.declared:
            self.arrived.set()

    def put(self, piece: bytes) -> None:
        """Copy a piece; the slot grows where needed. Raises BodyTooLarge, Overloaded."""
        size = self.received + len(piece)
        if size > self.declared:
            if size > self.limit:
                raise too_large(size, self.limit)
            self.declared = min(max(2 * self.declared, size), self.limit)
            self.reserve(self.declared)
        if self.slot is not None:
            self.slot.view()[self.received : size] = piece
        self.received = size

    @property
    def is_complete(self) -> bool:
        return self.received == self.declared

    def take(self) -> Slot | None:
        """The slot, no longer this body's; the caller's share is free again."""
        self.door.shares.change(self.caller, self.booked, 0)
        slot, self.slot, self.booked = self.slot, None, 0
        return slot

    def release(self) -> None:
        """Give the memory back; the rest of the body is discarded."""
        if (slot := self.take()) is not None:
            self.door.link.arena.give_back(slot)


def too_large(size: int, limit: int) -> AttndError:
    text = f"the body is at least {size} bytes, the limit is {limit}: send less per request"
    return BodyTooLarge(text, size=size, limit=limit)


async def read_body(door: Door, exchange: Exchange, limit: int) -> int:
    """Receive the whole body into the exchange's slot; returns its length.

    Raises BodyTooLarge, for a declared length before the body is read; RequestTimeout, Overloaded,
    NotReady.
    """
    declared, body = exchange.content_length, exchange.body
    if declared is not None and declared > limit:
        raise too_large(declared, limit)
    door.receiving[exchange] = None
    try:
        if body is None:
            message = await exchange.receive()
            if not message.get("more_body", False):
                return keep(door, exchange, message, limit)
            size = min(LARGE_BYTES, limit) if declared is None else declared
            exchange.body = body = Body(door, exchange.caller, size, limit)
            await receive_pieces(exchange, body, message)
        elif not body.is_complete:
            await body.arrived.wait()
    except asyncio.CancelledError:
        if exchange.failure is None:
            raise
        raise exchange.failure from None
    finally:
        del door.receiving[exchange]
    exchange.is_whole = True
    exchange.slot, exchange.body = body.take(), None
    return body.received


def keep(door: Door, exchange: Exchange, message: Mapping[str, Any], limit: int) -> int:
    """Copy a body that came whole into a slot; returns its length."""
    body = piece_of(exchange, message)
    exchange.is_whole = True
    if (size := len(body)) > limit:
        raise too_large(size, limit)
    exchange.slot = slot = door.link.arena.slot(size)
    slot.view()[:size] = body
    return size


async def receive_pieces(exchange: Exchange, body: Body, message: Mapping[str, Any]) -> None:
    body.put(piece_of(exchange, message))
    while message.get("more_body", False):
        message = await exchange.receive()
        body.put(piece_of(exchange, message))


def piece_of(exchange: Exchange, message: Mapping[str, Any]) -> bytes:
    """The bytes of one of ASGI's messages. Raises CancelledError where the client has left."""
    if message["type"] == "http.disconnect":
        exchange.is_disconnected = True
        raise asyncio.CancelledError
    piece: bytes = message.get("body", b"")
    return piece
