"""Receives the body of a request into a slot of the arena."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from service.doors.http.bodies import LARGE_BYTES, Body
from service.doors.http.door import Door
from service.doors.http.exchange import Exchange
from service.errors import AttndError, BodyTooLarge

COPY_BYTES: Final = 2 * 2**20
"""Copied in a pass of the loop."""


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
            exchange.body = body = Body(door.shares, door.link.arena, exchange.caller, declared)
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


def too_large(size: int, limit: int) -> AttndError:
    text = f"the body is at least {size} bytes, the limit is {limit}: send less per request"
    return BodyTooLarge(text, size=size, limit=limit)
