"""Runs a request's endpoint, and takes its response or error to the client and the ledger.

Errors are application/problem+json documents, with the headers that belong to them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from attnd.wire.dtypes import Part
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from service.doors.http.exchange import EXCHANGE, Exchange, Receive, Scope, Send
from service.doors.kit.headers import JSON, PROBLEM, SAFETENSORS, server_timing
from service.doors.kit.ledger import CLIENT_CLOSED
from service.doors.kit.problems import ProblemText, document_of, problem_headers
from service.errors import (
    AttndError,
    Internal,
    MalformedRequest,
    MethodNotAllowed,
    NoSuchRoute,
    NotReady,
)
from service.image.json_text import dump_json
from service.keys import Authenticator

if TYPE_CHECKING:
    from service.doors.http.door import Door

Header = tuple[bytes, bytes]
CONTENT_TYPES: Final = {name: (b"content-type", name.encode()) for name in (SAFETENSORS, JSON)}
"""The header for each media type."""
CLOSE: Final = (b"connection", b"close")
CUT_OFF: Final = "the drain ended while the engine ran the operation; it may have been applied"
KEEP_ALIVE: Final = b": still here\n\n"
"""A comment: may come between the events of a stream."""
EVENT_HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
)
"""Proxies pass each event on at once: they neither buffer nor compress."""
NO_BODY: Final = frozenset({204, 304})
NO_PARAMS: Final[dict[str, str]] = {}
Respond = Callable[[Exchange, Mapping[str, Any]], Awaitable[None]]
"""Responds to a request, with the path's parameters."""
Write = Callable[[bytes], Awaitable[None]]
"""Sends a part of a stream, once the client has read most of it."""


async def run(door: Door, exchange: Exchange, scope: Scope) -> None:
    """One request, from its head to its entry in the ledger."""
    try:
        endpoint = door.endpoints.get((exchange.method, exchange.path))
        if endpoint is not None and exchange.refusal is None:
            await endpoint(exchange, NO_PARAMS)
        else:
            await run_application(door, exchange, scope)
    except asyncio.CancelledError:
        if exchange.is_disconnected or not door.draining:
            finish(door, exchange, CLIENT_CLOSED, "client_gone")
        else:
            await respond_problem(door, exchange, NotReady(CUT_OFF))
    except Exception as error:
        await respond_problem(door, exchange, error)


async def run_application(door: Door, exchange: Exchange, scope: Scope) -> None:
    """Have the application's router find the endpoint.

    Skips FastAPI's middleware for exceptions, dependencies and telemetry, which nothing here uses
    and which costs three times as much as the router.
    """
    if not exchange.path.isprintable():
        text = f"the path {exchange.path[:100]!r} has a control character: remove it"
        raise MalformedRequest(text)
    scope["app"], scope[EXCHANGE] = door.app, exchange
    try:
        if exchange.refusal is None:
            await door.app.router(scope, exchange.receive, exchange.send)
        else:
            await run_without_key(door, exchange, exchange.refusal, scope)
    finally:
        del scope[EXCHANGE]  # the exchange refers to the scope
    if not exchange.is_answered:
        raise Internal(f"{exchange.method} {exchange.path} has no response: this is a bug")


async def run_without_key(
    door: Door, exchange: Exchange, refusal: AttndError, scope: Scope
) -> None:
    """Run an endpoint that declares that it needs no key, else respond with the refusal."""
    for route in door.app.router.routes:
        match, child = route.matches(scope)
        if match is Match.FULL:
            if not getattr(child["endpoint"], "needs_no_key", False):
                break
            scope.update(child)
            await route.handle(scope, exchange.receive, exchange.send)
            return
    await respond_problem(door, exchange, refusal)


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


def problem_bytes(door: Door, error: AttndError, client: tuple[str, int] | None) -> bytes:
    """The whole response to bytes that are no request; the connection closes after it."""
    nothing: Scope = {"method": "-", "path": "-", "query_string": b"", "headers": ()}
    exchange = Exchange({**nothing, "client": client})
    document, headers = problem_of(error, exchange)
    status, body = document["status"], dump_json(document).encode()
    closing = (*(() if door.draining else (CLOSE,)), (b"content-length", b"%d" % len(body)))
    lines = response_start(door, exchange, status, (*door.date, *headers, *closing))["headers"]
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
