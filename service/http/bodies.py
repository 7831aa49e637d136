"""Media types, and reading a request body no further than it may go."""

from __future__ import annotations

from typing import Final

import numpy as np

from service.errors import BodyTooLarge, MalformedBody, UnsupportedMediaType
from service.http.exchange import ClientGone, Exchange, Receive
from service.wire import Body

SAFETENSORS: Final = "application/vnd.safetensors"
JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
MAX_JSON_BYTES: Final = 8 * 2**20
"""JSON is for reading and for curl: parsing it takes many times its size, and the event loop."""


def media_type(exchange: Exchange, *known: str) -> str:
    """The request's media type, one of `known`; raises `UnsupportedMediaType`."""
    given = exchange.content_type.split(b";", 1)[0].strip().lower().decode("latin-1")
    if given not in known:
        told = f"Content-Type is {given[:100] or 'not given'}: send {' or '.join(known)}"
        raise UnsupportedMediaType(told, supported=list(known))
    if exchange.content_encoding not in (b"", b"identity"):
        encoding = exchange.content_encoding.decode("latin-1")[:100]
        raise UnsupportedMediaType(f"Content-Encoding is {encoding}: send the body as it is")
    return given


def answer_type(exchange: Exchange, given: str) -> str:
    """The media type of the answer: what Accept names first, else that of the request."""
    accept = exchange.accept
    if not accept or accept == b"*/*":
        return given
    for part in accept.lower().split(b","):
        name = part.split(b";", 1)[0].strip()
        if name == b"application/json":
            return JSON
        if name == b"application/vnd.safetensors":
            return SAFETENSORS
    return given


async def read_body(receive: Receive, exchange: Exchange, limit: int) -> Body:
    """The whole body, at most `limit` bytes; a body declared longer is refused unread.

    Raises `BodyTooLarge`, `ClientGone`.
    """
    declared = exchange.content_length
    if declared is not None and declared > limit:
        raise too_large(declared, limit)
    event = await receive()
    if event["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = event.get("body", b"")
    if not event.get("more_body", False):
        if len(body) > limit:
            raise too_large(len(body), limit)
        return body
    if declared is None:
        return await read_undeclared(receive, body, limit)
    return await read_declared(receive, body, declared)


async def read_declared(receive: Receive, first: bytes, declared: int) -> Body:
    """Chunks copied once, into room for all of them (which costs nothing until it is written)."""
    body = np.empty(declared, np.uint8).data
    chunk, more, at = first, True, 0
    while True:
        end = at + len(chunk)
        if end > declared:
            raise MalformedBody("the body is longer than its Content-Length")
        body[at:end] = chunk
        at = end
        if not more:
            return body[:at]
        chunk, more = await next_chunk(receive)


async def read_undeclared(receive: Receive, first: bytes, limit: int) -> Body:
    """Chunks of a body of unknown length, given up as soon as they pass the limit."""
    chunks, size, more = [first], len(first), True
    while more:
        if size > limit:
            raise too_large(size, limit)
        chunk, more = await next_chunk(receive)
        chunks.append(chunk)
        size += len(chunk)
    if size > limit:
        raise too_large(size, limit)
    return b"".join(chunks)


async def next_chunk(receive: Receive) -> tuple[bytes, bool]:
    event = await receive()
    if event["type"] == "http.disconnect":
        raise ClientGone
    return event.get("body", b""), event.get("more_body", False)


def too_large(size: int, limit: int) -> BodyTooLarge:
    told = f"the body is {size} bytes or more, at most {limit} are read: send less at once"
    return BodyTooLarge(told, size=size, limit=limit)
