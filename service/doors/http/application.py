"""The FastAPI application: one router, made from the table of operations."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.routing import Route

from service import __version__
from service.doors.http.endpoints.events import EventStream
from service.doors.http.endpoints.models import ModelPages
from service.doors.http.endpoints.openapi import DESCRIPTION, document
from service.doors.http.endpoints.operation import PathEndpoint
from service.doors.http.endpoints.pages import Pages
from service.doors.http.endpoints.regions import region_routes
from service.doors.http.live.page import LivePage
from service.operations.schema.spec import Operation
from service.operations.table import OPERATIONS

if TYPE_CHECKING:
    from service.doors.http.door import Door


def make_application(door: Door) -> FastAPI:
    """The application of one door. Errors leave it as exceptions: the connection tells them."""
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
    for path, operations in by_path().items():
        endpoint = PathEndpoint(door, operations, namesake(path))
        routes.append(Route(path, endpoint, name=operations[0].name))
    routes.append(EventStream(door).route())
    if door.limits.live:
        routes.extend(LivePage(door).routes())
    routes.extend(ModelPages(door).routes())
    routes.extend(region_routes())
    routes.extend(Pages(door, app.openapi).routes())
    return app


def by_path() -> dict[str, list[Operation]]:
    """The operations of each path, in the order in which the router tries them: first those that a
    model's every step calls."""
    paths: dict[str, list[Operation]] = {}
    for operation in sorted(OPERATIONS, key=rank):
        paths.setdefault(operation.path, []).append(operation)
    return paths


def namesake(path: str) -> list[tuple[Operation, dict[str, str]]]:
    """Operations on a thing whose own path is this one, as that of a sequence called `delete`."""
    found = []
    for operation in OPERATIONS:
        folder, _, last = operation.path.rpartition("/")
        if last.startswith("{") and path.rpartition("/")[0] == folder and path != operation.path:
            found.append((operation, {last[1:-1]: path.rpartition("/")[2]}))
    return found


def rank(operation: Operation) -> int:
    """Decodes and prefills first, then what else takes keys, then what takes or gives tensors."""
    if "{" not in operation.path and namesake(operation.path):
        return 2
    if operation.takes:
        names = {one.name for one in operation.takes}
        return 0 if {"q", "k"} <= names else 1 if "k" in names else 2
    return 3 if operation.gives else 4
