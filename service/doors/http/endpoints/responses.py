"""Runs a request's endpoint, and takes its response or error to the connection and the ledger.

Errors are application/problem+json documents, with the headers that belong to them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from attnd.wire.dtypes import Part
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from service.doors.http.protocol.exchange import CONTENT_TYPES, Exchange
from service.doors.kit.headers import PROBLEM
from service.doors.kit.ledger import CLIENT_CLOSED
from service.doors.kit.problems import ProblemText, document_of, problem_headers
from service.errors import AttndError, Internal, MethodNotAllowed, NoSuchRoute
from service.image.json_text import dump_json
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door
    from service.doors.http.protocol.connection import Connection


def problem_response(error: BaseException, exchange: Exchange) -> tuple[int, str, bytes, bytes]:
    """Status, code, document, and header lines for an error."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = sorted((error.headers or {}).get("Allow", "").split(", "))
        text = f"{exchange.method} {exchange.path}: use {' or '.join(allow)}"
        error = MethodNotAllowed(text, allow=allow)
    elif isinstance(error, HTTPException):
        error = NoSuchRoute(f"{exchange.path}: see /docs")
    document = document_of(error, exchange.request_id)
    more = "".join(f"{name}: {text}\r\n" for name, text in problem_headers(document).items())
    return (
        document["status"],
        document["code"],
        dump_json(document).encode(),
        CONTENT_TYPES[PROBLEM] + more.encode(),
    )


Scope = MutableMapping[str, Any]
EXCHANGE: Final = "attnd.exchange"
"""The key of a scope's `Exchange`."""
KEEP_ALIVE: Final = b": still here\n\n"
"""A comment: may come between the events of a stream."""
EVENT_HEADERS: Final = (
    b"content-type: text/event-stream\r\n"
    b"cache-control: no-store, no-transform\r\n"
    b"x-accel-buffering: no\r\n"
)
"""Proxies pass each event on at once: they neither buffer nor compress."""
NO_PARAMS: Final[dict[str, str]] = {}


async def run(door: Door, exchange: Exchange) -> None:
    """One request, from its head to its entry in the ledger."""
    exchange.is_running = True
    if door.link.draining:
        exchange.keep_alive = False
    try:
        if exchange.is_disconnected:
            raise asyncio.CancelledError
        endpoint = door.endpoints.get((exchange.method, exchange.path))
        if endpoint is not None and exchange.refusal is None:
            await endpoint(exchange, NO_PARAMS)
        else:
            await run_application(door, exchange)
    except asyncio.CancelledError:
        if not exchange.is_disconnected:
            raise
        finish(door, exchange, CLIENT_CLOSED, "client_gone")
    except Exception as error:
        respond_problem(door, exchange, error)
    finally:
        door.active -= 1
        if door.link.draining and not door.active:
            door.drained.set()


async def run_application(door: Door, exchange: Exchange) -> None:
    """Have the application's router find the endpoint, which responds to the exchange.

    Skips FastAPI's middleware for exceptions, dependencies and telemetry, which nothing here uses
    and which costs three times as much as the router.
    """
    request = {"type": "http", "method": exchange.method, "path": exchange.path}
    scope: Scope = {**request, "app": door.app, EXCHANGE: exchange}
    if exchange.refusal is None:
        await door.app.router(scope, unused, unused)
    else:
        await run_without_key(door, exchange, exchange.refusal, scope)
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
            await route.handle(scope, unused, unused)
            return
    respond_problem(door, exchange, refusal)


Respond = Callable[[Exchange, Mapping[str, Any]], Awaitable[None]]
"""Responds to a request, with the path's parameters."""


class Endpoint:
    """ASGI's endpoint of functions that respond, by method."""

    def __init__(self, by_method: Mapping[str, Respond], *, needs_no_key: bool = False) -> None:
        self.by_method = by_method
        self.needs_no_key = needs_no_key

    async def __call__(self, scope: Scope, *_: Any) -> None:
        await self.by_method[scope["method"]](scope[EXCHANGE], scope["path_params"])


def route(path: str, by_method: Mapping[str, Respond], *, needs_no_key: bool = False) -> Route:
    """A route of these methods; HEAD is answered where GET is."""
    if "GET" in by_method:
        by_method = {**by_method, "HEAD": by_method["GET"]}
    return Route(path, Endpoint(by_method, needs_no_key=needs_no_key), methods=[*by_method])


async def unused(*_: Any) -> Any:
    """ASGI's receive and send."""
    raise RuntimeError("endpoints respond to the exchange: this is a bug")


def respond(
    door: Door,
    exchange: Exchange,
    status: int,
    headers: bytes,
    parts: Sequence[Part],
    code: str = "ok",
) -> None:
    """Send the whole response; `headers` are whole lines. Large parts are sent without a copy, and
    must not change."""
    connection, body = exchange.connection, exchange.body
    if exchange.is_answered or connection is None or body is None:
        raise Internal(f"{exchange.method} {exchange.path} has two responses: this is a bug")
    exchange.is_answered = True
    if not body.complete or connection.half_closed is not None:
        connection.prepare_to_close(exchange)
    head = exchange.response_head(status, sum(map(len, parts)), door.date, headers)
    connection.send(head, parts if exchange.method != "HEAD" else ())
    finish(door, exchange, status, code)


async def respond_stream(
    door: Door, exchange: Exchange, write: Callable[[Connection], Awaitable[None]]
) -> None:
    """Send a stream of events, which ends with its connection, in every version of HTTP. `write`
    sends them; a client that reconnects gets its error."""
    connection = exchange.connection
    if exchange.is_answered or connection is None:
        raise Internal(f"{exchange.method} {exchange.path} has two responses: this is a bug")
    exchange.is_answered = True
    exchange.keep_alive = False
    exchange.filler = KEEP_ALIVE
    connection.send(exchange.response_head(200, None, door.date, EVENT_HEADERS), ())
    if exchange.method == "GET":
        with suppress(AttndError, ProblemText):
            await write(connection)
    finish(door, exchange, 200, "ok")


def respond_problem(door: Door, exchange: Exchange, error: BaseException) -> None:
    """Send an error, unless the response has been sent; then it is only logged."""
    status, code, document, headers = problem_response(error, exchange)
    if not exchange.is_answered:
        respond(door, exchange, status, headers, [document], code)


def finish(door: Door, exchange: Exchange, status: int, code: str) -> None:
    """Stop the clock, free memory, and record the request: the response is sent, or the client has
    left."""
    connection, body = exchange.connection, exchange.body
    exchange.seconds = time.perf_counter() - exchange.started
    exchange.status, exchange.code = status, code
    exchange.body = exchange.head = exchange.connection = None
    if body is not None:
        body.release()
    door.ledger.add(exchange)
    if connection is not None:
        connection.answered(exchange, is_whole=body is None or body.complete)


async def read_body(door: Door, exchange: Exchange, limit: int) -> tuple[Slot | None, int]:
    """The slot with the whole body, None for an empty one, and the body's length.

    Raises BodyTooLarge, for a declared length before the body is read; MalformedBody,
    RequestTimeout, Overloaded, NotReady.
    """
    body, connection = exchange.body, exchange.connection
    if body is None or connection is None:
        raise Internal("a body was read after the response: this is a bug")
    body.check(limit)
    while not body.complete:
        if body.wanted:
            body.place(door.link.arena.slot(body.wanted))
        connection.welcome_body(exchange, body)
        await body.change()
    return body.slot, body.received
