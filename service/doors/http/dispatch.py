"""Takes each request to its endpoint: FastAPI's routes, made from the table of operations, and a
dict of the fixed paths before them."""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import FastAPI
from starlette.routing import Match

from service import __version__
from service.doors.http.door import Door
from service.doors.http.endpoints.events import PATH as EVENTS_PATH
from service.doors.http.endpoints.events import EventStream
from service.doors.http.endpoints.openapi import DESCRIPTION, document
from service.doors.http.endpoints.operation import OperationEndpoint
from service.doors.http.endpoints.pages import Pages
from service.doors.http.endpoints.responses import Respond, finish, respond_problem, route
from service.doors.http.exchange import EXCHANGE, Exchange, Receive, Scope, Send
from service.doors.http.live.page import live_routes
from service.doors.kit.ledger import CLIENT_CLOSED
from service.errors import AttndError, Internal, MalformedRequest, NotReady
from service.operations.schema.spec import Operation
from service.operations.table import OPERATIONS

CUT_OFF: Final = "the drain ended while the engine ran the operation; it may have been applied"
NO_PARAMS: Final[dict[str, str]] = {}


class Dispatcher:
    """The requests of one door."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.app, self.endpoints = make_application(door)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI calls an application."""
        door = self.door
        exchange: Exchange = scope.pop(EXCHANGE, None) or door.begin(scope)
        exchange.receive, exchange.send = receive, send
        exchange.task = asyncio.current_task()
        if exchange.connection is not None:
            exchange.connection.exchange = exchange
        door.active[exchange] = None
        door.busy[exchange.caller] += 1
        try:
            if not door.turns.take():
                await door.turns.wait(exchange.caller)
            await self.run(exchange, scope)
        except asyncio.CancelledError:  # before its turn
            if not exchange.status:
                finish(door, exchange, CLIENT_CLOSED, "client_gone")
        finally:
            del door.active[exchange]
            door.busy[exchange.caller] -= 1
            if not door.busy[exchange.caller]:
                del door.busy[exchange.caller]

    async def run(self, exchange: Exchange, scope: Scope) -> None:
        """One request, from its head to its entry in the ledger."""
        try:
            endpoint = self.endpoints.get((exchange.method, exchange.path))
            if endpoint is not None and exchange.refusal is None:
                await endpoint(exchange, NO_PARAMS)
            else:
                await self.run_application(exchange, scope)
        except asyncio.CancelledError:
            if exchange.is_disconnected or not self.door.draining:
                finish(self.door, exchange, CLIENT_CLOSED, "client_gone")
            else:
                await respond_problem(self.door, exchange, NotReady(CUT_OFF))
        except Exception as error:
            await respond_problem(self.door, exchange, error)

    async def run_application(self, exchange: Exchange, scope: Scope) -> None:
        """Have the application's router find the endpoint.

        Skips FastAPI's middleware for exceptions, dependencies and telemetry, which nothing here
        uses and which costs three times as much as the router.
        """
        if not exchange.path.isprintable():
            text = f"the path {exchange.path[:100]!r} has a control character: remove it"
            raise MalformedRequest(text)
        scope["app"], scope[EXCHANGE] = self.app, exchange
        try:
            if exchange.refusal is None:
                await self.app.router(scope, exchange.receive, exchange.send)
            else:
                await self.run_without_key(exchange, exchange.refusal, scope)
        finally:
            del scope[EXCHANGE]  # the exchange refers to the scope
        if not exchange.is_answered:
            raise Internal(f"{exchange.method} {exchange.path} has no response: this is a bug")

    async def run_without_key(self, exchange: Exchange, refusal: AttndError, scope: Scope) -> None:
        """Run an endpoint that declares that it needs no key, else respond with the refusal."""
        for one in self.app.router.routes:
            match, child = one.matches(scope)
            if match is Match.FULL:
                if not getattr(child["endpoint"], "needs_no_key", False):
                    break
                scope.update(child)
                await one.handle(scope, exchange.receive, exchange.send)
                return
        await respond_problem(self.door, exchange, refusal)


def make_application(door: Door) -> tuple[FastAPI, dict[tuple[str, str], Respond]]:
    """The application of one door, and the endpoints of its fixed paths, by method and path.

    Steps call the latter, without a walk through the router. Errors leave the application as
    exceptions.
    """
    app = FastAPI(
        title="attnd",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    routes = app.router.routes
    fixed: dict[tuple[str, str], Respond] = {}
    for path, operations in by_path().items():
        by_method = {one.method: OperationEndpoint(door, one).run for one in operations}
        routes.append(route(path, by_method))
        if "{" not in path:
            fixed |= {(method, path): run for method, run in by_method.items()}
    routes.append(route(EVENTS_PATH, {"GET": EventStream(door).run}))
    if door.limits.live:
        routes.extend(live_routes(door))
    pool = door.pool
    text = document(pool.num_kv_heads, pool.head_dim, pool.page_size)
    routes.extend(Pages(door, text).routes())
    return app, fixed


def by_path() -> dict[str, list[Operation]]:
    """The operations of each path; fixed paths come before paths with parameters, which have the
    methods that those do not: of a sequence named `delete`, for example."""
    paths: dict[str, list[Operation]] = {}
    for operation in sorted(OPERATIONS, key=lambda one: "{" in one.path):
        paths.setdefault(operation.path, []).append(operation)
    return paths
