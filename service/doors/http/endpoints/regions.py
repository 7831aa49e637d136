"""The routes of Triton's shared memory extensions, which are not supported: 501."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from service.doors.http.endpoints.models import page
from service.doors.oip.request import NO_REGIONS
from service.errors import NotSupported

KINDS: Final = ("/v2/systemsharedmemory", "/v2/cudasharedmemory")


def region_routes() -> list[BaseRoute]:
    return [
        page(f"{kind}{named}/{action}", refuse, "regions", method)
        for kind in KINDS
        for named in ("", "/region/{name}")
        for action, method in (("status", "GET"), ("register", "POST"), ("unregister", "POST"))
        if named or action != "register"
    ]


async def refuse(request: Request) -> Response:
    raise NotSupported(NO_REGIONS)
