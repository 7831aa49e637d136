"""Answering requests: from the application's answer or error to the connection and the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attnd.wire.dtypes import Part
from starlette.routing import Match

from service.doors.http.endpoints.problems import Told, tell
from service.doors.http.protocol.client_gone import ClientGone
from service.doors.http.protocol.exchange import PROBLEM, Exchange
from service.doors.http.protocol.heads import Headers
from service.doors.kit.request import CLIENT_GONE
from service.errors import AttndError, Internal
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door
    from service.doors.http.protocol.connection import Connection

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
EXCHANGE: Final = "attnd.retries"
"""Where a scope carries the `Exchange`."""


async def run(door: Door, exchange: Exchange) -> None:
    """One request, from its head to its place in the ledger."""
    door.enter(exchange)
    try:
        await hand_over(door, exchange)
    except asyncio.CancelledError:
        if not exchange.is_gone:
            raise
        finish(door, exchange, CLIENT_GONE, "client_gone")
    except ClientGone:
        finish(door, exchange, CLIENT_GONE, "client_gone")
    except Exception as error:
        answer_problem(door, exchange, tell(error, exchange))
    finally:
        door.leave()


async def hand_over(door: Door, exchange: Exchange) -> None:
    """Let the application answer, as ASGI has it; operations answer the exchange itself.

    The router is called without FastAPI's middleware, which is for exceptions, dependencies and
    telemetry that nothing here uses, and costs three times as much as the router.
    """
    head, connection = exchange.head, exchange.connection
    if head is None or connection is None:
        raise Internal("a request without its head or connection: this is a bug")
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1" if head.is_http_11 else "1.0",
        "method": exchange.method,
        "scheme": "http",
        "path": head.target.path,
        "raw_path": head.target.raw_path,
        "query_string": head.target.query,
        "root_path": "",
        "headers": head.headers,
        "client": None,
        "server": None,
        "state": {},
        "app": door.app,
        EXCHANGE: exchange,
    }
    adapter = Adapter(door, exchange)
    if exchange.refusal is None:
        await door.app.router(scope, adapter.receive, adapter.send)
    else:
        await answer_without_key(door, exchange.refusal, scope, adapter)
    if not exchange.is_answered:
        raise Internal(f"{exchange.method} {exchange.path} was not answered: this is a bug")


async def answer_without_key(
    door: Door, refusal: AttndError, scope: Scope, adapter: Adapter
) -> None:
    """Run the endpoint that declares that it needs no key, or raise the refusal.

    The matched route runs itself, without a second look at the path.
    """
    for route in door.app.router.routes:
        match, child = route.matches(scope)
        if match is Match.FULL:
            if not getattr(child["endpoint"], "needs_no_key", False):
                break
            scope.update(child)
            await route.handle(scope, adapter.receive, adapter.send)
            return
    raise refusal


class Adapter:
    """ASGI's receive and send for one exchange: what the router's other endpoints work with."""

    __slots__ = ("door", "exchange", "has_received", "headers", "parts", "status")

    def __init__(self, door: Door, exchange: Exchange) -> None:
        self.door = door
        self.exchange = exchange
        self.has_received = False
        self.status = 0
        self.headers: Headers = []
        self.parts: list[Part] = []

    async def receive(self) -> Event:
        """An empty body: only operations have others, and read them from the exchange. Then there
        is nothing more to come; a client that hangs up cancels the task."""
        if self.has_received:
            await asyncio.get_running_loop().create_future()
        self.has_received = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self.status = event["status"]
            self.headers = [one for one in event["headers"] if one[0] != b"content-length"]
            return
        self.parts.append(event.get("body", b""))
        if not event.get("more_body", False):
            answer(self.door, self.exchange, self.status, self.headers, self.parts)


def answer(
    door: Door,
    exchange: Exchange,
    status: int,
    headers: Headers,
    parts: Sequence[Part],
    code: str = "ok",
) -> None:
    """Send the whole answer. Large parts are sent as they lie in memory, which must not change."""
    connection = exchange.connection
    if exchange.is_answered or connection is None:
        raise Internal(f"{exchange.method} {exchange.path} was answered twice: this is a bug")
    exchange.is_answered = True
    connection.prepare_to_close(exchange)
    length = sum(map(len, parts))
    head = exchange.answer_head(status, length, door.date, headers)
    connection.send(head, parts if exchange.method != "HEAD" else ())
    finish(door, exchange, status, code)


def begin_stream(door: Door, exchange: Exchange, headers: Headers, filler: bytes) -> Connection:
    """Send the head of an answer that goes on until it is finished: the connection's end ends it,
    in every version of HTTP. `filler` may come between its parts, and means nothing."""
    connection = exchange.connection
    if exchange.is_answered or connection is None:
        raise Internal(f"{exchange.method} {exchange.path} was answered twice: this is a bug")
    exchange.is_answered = True
    exchange.keep_alive = False
    exchange.filler = filler
    connection.send(exchange.answer_head(200, None, door.date, headers), ())
    return connection


def answer_problem(door: Door, exchange: Exchange, told: Told) -> None:
    """Send a refusal."""
    status, code, document, headers = told
    if exchange.is_answered:  # the answer is out: the error has been logged
        return
    content_type = (b"content-type", PROBLEM.encode())
    answer(door, exchange, status, [content_type, *headers], [document], code)


def finish(door: Door, exchange: Exchange, status: int, code: str) -> None:
    """The answer is out, or nobody is there to read it."""
    connection, body = exchange.connection, exchange.body
    exchange.end(status, code)
    door.ledger.add(exchange)
    if connection is not None:
        connection.answered(exchange, is_whole=body is None or body.complete)


async def read_body(door: Door, exchange: Exchange, limit: int) -> tuple[Slot | None, int]:
    """The slot that holds the whole body, None for an empty one, and its length.

    Raises BodyTooLarge, before the body is read when its length is declared; MalformedBody,
    RequestTimeout, Overloaded, NotReady, ClientGone.
    """
    body, connection = exchange.body, exchange.connection
    if body is None or connection is None:
        raise Internal("a body was read after the answer: this is a bug")
    body.check(limit)
    while not body.complete:
        if body.wanted:
            body.place(await door.slot(body.wanted))
        connection.welcome_body(exchange, body)
        await body.change()
    return body.slot, body.received
