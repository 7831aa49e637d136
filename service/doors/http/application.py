"""The FastAPI application: one router, made from the table of operations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.routing import Route

from service import __version__
from service.doors.http.endpoints.events import EventStream
from service.doors.http.endpoints.inference import InferenceEndpoint
from service.doors.http.endpoints.models import ModelPages
from service.doors.http.endpoints.openapi import DESCRIPTION, document
from service.doors.http.endpoints.operation import PathEndpoint
from service.doors.http.endpoints.pages import Pages
from service.doors.http.live.page import live_routes
from service.operations.schema.spec import Operation
from service.operations.table import OPERATIONS

if TYPE_CHECKING:
    from service.doors.http.door import Door
    from service.doors.http.protocol.exchange import Exchange

Endpoint = Callable[["Exchange", Mapping[str, Any]], Awaitable[None]]
"""Responds to a request, with the path's parameters."""


def make_application(door: Door) -> tuple[FastAPI, dict[tuple[str, str], Endpoint]]:
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
    app.openapi = cache(document)  # type: ignore[method-assign]
    routes = app.router.routes
    infer = InferenceEndpoint(door)
    fixed: dict[tuple[str, str], Endpoint] = {
        ("POST", f"/v2/models/{name}/infer"): one.run for name, one in infer.by_model.items()
    }
    for path, operations in by_path().items():
        endpoint = PathEndpoint(door, operations, namesake(path))
        routes.append(Route(path, endpoint, name=operations[0].name))
        if "{" not in path:
            fixed |= {(one.method, path): endpoint.by_method[one.method].run for one in operations}
    routes.append(EventStream(door).route())
    if door.limits.live:
        routes.extend(live_routes(door))
    routes.extend(ModelPages(door, infer).routes())
    routes.extend(Pages(door, app.openapi).routes())
    return app, fixed


def by_path() -> dict[str, list[Operation]]:
    """The operations of each path; fixed paths come before paths with parameters."""
    paths: dict[str, list[Operation]] = {}
    for operation in sorted(OPERATIONS, key=lambda one: "{" in one.path):
        paths.setdefault(operation.path, []).append(operation)
    return paths


def namesake(path: str) -> list[tuple[Operation, dict[str, str]]]:
    """Operations on the thing that has this path, too: for example a sequence named `delete`."""
    found = []
    for operation in OPERATIONS:
        folder, _, last = operation.path.rpartition("/")
        if last.startswith("{") and path.rpartition("/")[0] == folder and path != operation.path:
            found.append((operation, {last[1:-1]: path.rpartition("/")[2]}))
    return found
