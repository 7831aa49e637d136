"""A request's body on its way into a slot of the arena."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from service.doors.http.exchange import Exchange
from service.errors import AttndError, BodyTooLarge, Overloaded
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door

LARGE_BYTES: Final = 64 * 2**10
"""Longer bodies are counted, and received straight into the arena if their length is declared."""
COPY_BYTES: Final = 2 * 2**20
"""Copied in a pass of the loop."""
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

    def __init__(self, door: Door, caller: str, size: int) -> None:
        """Raises Overloaded."""
        self.door = door
        self.caller = caller
        self.declared = size
        self.received = 0
        self.arrived = asyncio.Event()
        door.shares.change(caller, 0, size)
        self.booked = size
        self.slot: Slot | None = None
        try:
            self.slot = door.link.arena.slot(size)
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
            if declared is None or declared <= LARGE_BYTES:
                return await receive_pieces(door, exchange, message, limit)
            exchange.body = body = Body(door, exchange.caller, declared)
            await receive_declared(exchange, body, message)
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


async def receive_declared(exchange: Exchange, body: Body, message: Mapping[str, Any]) -> None:
    """Under a server that does not fill the slot itself."""
    while True:
        piece = piece_of(exchange, message)
        body.room()[: len(piece)] = piece
        body.got(len(piece))
        if not message.get("more_body", False):
            return
        message = await exchange.receive()


async def receive_pieces(
    door: Door, exchange: Exchange, message: Mapping[str, Any], limit: int
) -> int:
    """Receive a short body, or one of unknown length, and copy it into a slot, some bytes in a pass
    of the loop; returns its length."""
    pieces: deque[bytes] = deque()
    size = booked = 0
    try:
        while True:
            pieces.append(piece_of(exchange, message))
            size += len(pieces[-1])
            if size > limit:
                raise too_large(size, limit)
            if size > LARGE_BYTES:
                door.shares.change(exchange.caller, booked, size)
                booked = size
            if not message.get("more_body", False):
                break
            message = await exchange.receive()
        exchange.slot = slot = door.link.arena.slot(size)
        at = copied = 0
        while pieces:
            piece = pieces.popleft()
            slot.view()[at : at + len(piece)] = piece
            at += len(piece)
            if at - copied > COPY_BYTES:
                copied = at
                await asyncio.sleep(0)
    finally:
        door.shares.change(exchange.caller, booked, 0)
    exchange.is_whole = True
    return size


def piece_of(exchange: Exchange, message: Mapping[str, Any]) -> bytes:
    """The bytes of one of ASGI's messages. Raises CancelledError where the client has left."""
    if message["type"] == "http.disconnect":
        exchange.is_disconnected = True
        raise asyncio.CancelledError
    piece: bytes = message.get("body", b"")
    return piece
