"""The ASGI application: tensor routes by a dictionary lookup, everything else by FastAPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from config.settings import Settings
from service import __version__, errors, schemas
from service.engine.engine import Engine
from service.http.bodies import PROBLEM
from service.http.control_routes import EXCHANGE, Control, make_routers
from service.http.exchange import (
    CLIENT_GONE,
    ClientGone,
    Event,
    Exchange,
    Receive,
    Scope,
    Send,
)
from service.http.ledger import Ledger
from service.http.openapi import DESCRIPTION, document
from service.http.sending import problem_parts, respond_problem
from service.http.tensor_routes import ROUTES, TensorRoutes
from service.metrics import Metrics

CODE: Final = "attnd.code"
"""Where the scope carries the error code that a control route answered."""


def create_app(settings: Settings, engine: Engine, metrics: Metrics) -> App:
    """The service as ASGI; its lifespan starts and drains the engine."""
    return App(settings, engine, metrics)


class App:
    """Dispatch, and what is common to all routes."""

    def __init__(self, settings: Settings, engine: Engine, metrics: Metrics) -> None:
        self.settings = settings
        self.engine = engine
        self.ledger = Ledger(metrics)
        self.tensors = TensorRoutes(engine, self.ledger, settings.server)
        self.control = make_control(Control(engine, metrics, self.ledger, settings.server))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            route = ROUTES.get(scope["path"])
            if route is not None:
                await self.tensors.answer(route, scope, receive, send)
            else:
                await self.run_control(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self.run_lifespan(receive, send)

    async def run_control(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request to FastAPI, with the headers, the log line and the metrics of all."""
        exchange = Exchange(scope, "unknown")
        scope[EXCHANGE] = exchange
        status = 0

        async def send_on(event: Event) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                event = {**event, "headers": [*event["headers"], *exchange.headers()]}
            await send(event)

        try:
            await self.control(scope, receive, send_on)
        except Exception as error:
            if not status:  # otherwise Starlette has told it, and raised it again
                status, scope[CODE] = await respond_problem(send, exchange, error)
        route = scope.get("route")
        exchange.op = getattr(route, "name", None) or "unknown"
        code = scope.get(CODE, "ok")
        self.ledger.add(exchange, status, code)

    async def run_lifespan(self, receive: Receive, send: Send) -> None:
        """Start the engine; at the end let it finish what was admitted."""
        while True:
            event = await receive()
            if event["type"] == "lifespan.startup":
                self.engine.start()
                await send({"type": "lifespan.startup.complete"})
            elif event["type"] == "lifespan.shutdown":
                await self.engine.drain(self.settings.server.drain_timeout_s)
                self.ledger.settle()
                await send({"type": "lifespan.shutdown.complete"})
                return


def make_control(control: Control) -> FastAPI:
    """FastAPI with the control routes, the docs, and every error as a problem document."""
    app = FastAPI(
        title="attnd", version=__version__, description=DESCRIPTION, redirect_slashes=False
    )
    for router in make_routers(control):
        app.include_router(router)
    for cls in (*errors.KINDS, HTTPException, RequestValidationError, ClientGone, Exception):
        app.add_exception_handler(cls, tell_problem)
    cached: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not cached:
            cached.update(document(app))
        return cached

    app.openapi = openapi  # type: ignore[method-assign]
    return app


async def tell_problem(request: Request, error: Exception) -> Response:
    """Any refusal as application/problem+json."""
    match error:
        case ClientGone():
            request.scope[CODE] = "client_gone"
            return Response(status_code=CLIENT_GONE)  # to nobody
        case HTTPException(status_code=405):
            allow = (error.headers or {}).get("Allow", "").split(", ")
            told = f"{request.method} {request.url.path}: use {' or '.join(allow)}"
            error = errors.MethodNotAllowed(told, allow=allow)
        case HTTPException():
            error = errors.NoSuchRoute(f"{request.url.path}: see /docs")
        case RequestValidationError():
            error = invalid(error.errors())
    status, code, body, extra = problem_parts(error, request.scope[EXCHANGE])
    request.scope[CODE] = code
    headers = {name.decode(): value.decode() for name, value in extra}
    return Response(body, status, headers, media_type=PROBLEM)


def invalid(problems: Sequence[Any]) -> Exception:
    """FastAPI's complaint about a path or query parameter, without the place's name in front."""
    first = dict(problems[0])
    first["loc"] = first["loc"][1:]
    return schemas.invalid([first])
