"""Takes a request's response or error to the client and the ledger.

Errors are application/problem+json documents, with the headers that belong to them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

from attnd.wire.dtypes import Part
from starlette.exceptions import HTTPException
from starlette.routing import Route

from service.doors.http.door import Door
from service.doors.http.exchange import EXCHANGE, Exchange, Receive, Scope, Send
from service.doors.kit.headers import JSON, PROBLEM, SAFETENSORS, server_timing
from service.doors.kit.problems import ProblemText, document_of, problem_headers
from service.errors import (
    AttndError,
    Internal,
    MethodNotAllowed,
    NoSuchRoute,
)
from service.image.json_text import dump_json
from service.keys import Authenticator

Header = tuple[bytes, bytes]
CONTENT_TYPES: Final = {name: (b"content-type", name.encode()) for name in (SAFETENSORS, JSON)}
"""The header for each media type."""
CLOSE: Final = (b"connection", b"close")
KEEP_ALIVE: Final = b": still here\n\n"
"""A comment: may come between the events of a stream."""
EVENT_HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
)
"""Proxies pass each event on at once: they neither buffer nor compress."""
NO_BODY: Final = frozenset({204, 304})
Respond = Callable[[Exchange, Mapping[str, Any]], Awaitable[None]]
"""Responds to a request, with the path's parameters."""
Write = Callable[[bytes], Awaitable[None]]
"""Sends a part of a stream, once the client has read most of it."""


class Endpoint:
    """ASGI's endpoint of functions that respond, by method."""

    def __init__(self, by_method: Mapping[str, Respond], *, needs_no_key: bool = False) -> None:
        self.by_method = by_method
        self.needs_no_key = needs_no_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.by_method[scope["method"]](scope[EXCHANGE], scope["path_params"])


def route(path: str, by_method: Mapping[str, Respond], *, needs_no_key: bool = False) -> Route:
    """A route of these methods; HEAD is answered where GET is."""
    if "GET" in by_method:
        by_method = {**by_method, "HEAD": by_method["GET"]}
    return Route(path, Endpoint(by_method, needs_no_key=needs_no_key), methods=[*by_method])


async def respond(
    door: Door,
    exchange: Exchange,
    status: int,
    headers: tuple[Header, ...],
    body: Part,
    code: str = "ok",
) -> None:
    """Send the whole response. A body in the arena is sent without a copy, and must not change."""
    if exchange.is_answered:
        raise Internal(f"{exchange.method} {exchange.path} has two responses: this is a bug")
    exchange.is_answered = True
    if status not in NO_BODY:
        headers = (*headers, (b"content-length", b"%d" % len(body)))
    await exchange.send(response_start(door, exchange, status, headers))
    await exchange.send({"type": "http.response.body", "body": body})
    finish(door, exchange, status, code)


def response_start(
    door: Door, exchange: Exchange, status: int, headers: tuple[Header, ...]
) -> dict[str, Any]:
    """ASGI's message with the headers of every response after `headers`."""
    every = [
        *headers,
        (b"x-request-id", exchange.request_id),
        (b"server-timing", server_timing(exchange.stages)),
    ]
    if exchange.traceparent:
        every.append((b"traceparent", exchange.traceparent))
    if door.link.draining:
        every.append(CLOSE)
    return {"type": "http.response.start", "status": status, "headers": every}


async def respond_stream(
    door: Door, exchange: Exchange, stream: Callable[[Write], Awaitable[None]]
) -> None:
    """Send a stream of events. `stream` writes them; a client that reconnects gets its error."""
    exchange.is_answered = True
    exchange.watch()
    await exchange.send(response_start(door, exchange, 200, EVENT_HEADERS))

    async def write(events: bytes) -> None:
        await exchange.send({"type": "http.response.body", "body": events, "more_body": True})

    if exchange.method == "GET":
        with suppress(AttndError, ProblemText):
            await stream(write)
    await exchange.send({"type": "http.response.body", "body": b""})
    finish(door, exchange, 200, "ok")


def is_still_valid(authenticator: Authenticator | None, exchange: Exchange) -> bool:
    """Whether the key of a long response is still valid for the same tenant. Raises
    Unauthorized."""
    if authenticator is None:
        return True
    return authenticator.tenant_of(exchange.authorization) is exchange.tenant


async def respond_problem(door: Door, exchange: Exchange, error: BaseException) -> None:
    """Send an error, unless the response has been sent; then it is only logged."""
    document, headers = problem_of(error, exchange)
    if not exchange.is_answered:
        body = dump_json(document).encode()
        await respond(door, exchange, document["status"], headers, body, document["code"])
    elif not exchange.status:
        finish(door, exchange, document["status"], document["code"])


def problem_of(
    error: BaseException, exchange: Exchange
) -> tuple[dict[str, Any], tuple[Header, ...]]:
    """Document and headers of an error."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = sorted((error.headers or {}).get("Allow", "").split(", "))
        text = f"{exchange.method} {exchange.path}: use {' or '.join(allow)}"
        error = MethodNotAllowed(text, allow=allow)
    elif isinstance(error, HTTPException):
        error = NoSuchRoute(f"{exchange.path}: see /docs")
    document = document_of(error, exchange.request_id)
    more = problem_headers(document).items()
    content_type = (b"content-type", PROBLEM.encode())
    return document, (content_type, *((name.encode(), text.encode()) for name, text in more))


def problem_bytes(
    door: Door, error: AttndError, client: tuple[str, int] | None, defaults: Sequence[Header]
) -> bytes:
    """The whole response to bytes that are no request; the connection closes after it. `defaults`:
    the server's own headers."""
    nothing: Scope = {"method": "-", "path": "-", "query_string": b"", "headers": ()}
    exchange = Exchange({**nothing, "client": client})
    document, headers = problem_of(error, exchange)
    status, body = document["status"], dump_json(document).encode()
    closing = (*(() if door.draining else (CLOSE,)), (b"content-length", b"%d" % len(body)))
    lines = response_start(door, exchange, status, (*defaults, *headers, *closing))["headers"]
    finish(door, exchange, status, document["code"])
    head = b"".join(b"%b: %b\r\n" % line for line in lines)
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (
        status,
        HTTPStatus(status).phrase.encode(),
        head,
        body,
    )


def finish(door: Door, exchange: Exchange, status: int, code: str) -> None:
    """Stop the clock, free memory, and record the request: the response is sent, or the client has
    left."""
    exchange.seconds = time.perf_counter() - exchange.started
    exchange.status, exchange.code = status, code
    exchange.is_answered = True
    if exchange.connection is not None:
        exchange.connection.exchange = None
        exchange.connection = None
    if exchange.watching is not None:
        exchange.watching.cancel()
    if exchange.slot is not None:
        door.link.arena.give_back(exchange.slot)
        exchange.slot = None
    if exchange.body is not None:
        exchange.body.release()
        exchange.body = None
    door.ledger.add(exchange)
