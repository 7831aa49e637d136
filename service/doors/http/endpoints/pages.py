"""Pages of the door: an index, health, metrics, the OpenAPI document and its viewer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

import fastapi_offline
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from service.doors.http.door import Door
from service.doors.http.endpoints.responses import respond, route
from service.doors.http.exchange import Exchange
from service.doors.kit.headers import JSON
from service.doors.kit.ledger import OTHERS_S
from service.errors import InvalidRequest, NoSuchRoute

Params = Mapping[str, Any]
Page = Callable[[Exchange, Params], Awaitable[Response]]
LINKS: Final = (
    ("live", "Shows the pool, the prefix tree and the load as they are now."),
    ("docs", "Lists every route with its fields, tensors and errors."),
    ("openapi.json", "Is the same list as an OpenAPI document."),
    ("v1/info", "Gives the pool's shape, the backend and the limits."),
    ("v1/pool", "Counts the pages by state."),
    ("metrics", "Has the counters and gauges of all processes for Prometheus."),
    ("health/ready", "Answers 200 when requests will be answered, else 503 with the reason."),
    ("health/live", "Answers 200 while this door serves HTTP."),
)
"""Paths relative to the page, so that it works behind a proxy's prefix."""

PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>attnd</title>
</head>
<body>
<h1>attnd</h1>
<p>Attention and KV cache as a service.</p>
<dl>
{links}
</dl>
{keys}
</body>
</html>
"""
KEYS: Final = """\
<p>This service has keys. A route that needs one answers 401 without it: send the key in the
header <code>Authorization: Bearer KEY</code>.</p>"""


def index_page(has_live: bool, has_keys: bool) -> str:
    links = (
        f'<dt><a href="{path}">/{escape(path)}</a></dt><dd>{escape(text)}</dd>'
        for path, text in LINKS
        if has_live or path != "live"
    )
    return PAGE.format(links="\n".join(links), keys=KEYS if has_keys else "")


ASSETS: Final = Path(fastapi_offline.__file__).with_name("static")
OWN: Final = Path(__file__).with_name("docs")
TYPES: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
    "docs.js": "text/javascript",
    "docs.css": "text/css",
}
INDEX_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
DOCS_HEADERS: Final = INDEX_HEADERS | {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "frame-ancestors 'none'; form-action 'none'"
}
"""Swagger UI has styles of its own in elements."""
A_DAY: Final = {"cache-control": "public, max-age=86400"}


class Pages:
    """The endpoints of one door."""

    def __init__(self, door: Door, document: str) -> None:
        """`document`: the OpenAPI document, made before the door accepts requests."""
        self.door = door
        self.document = document

    def routes(self) -> list[BaseRoute]:
        keys = self.door.authenticator
        open_docs = keys is not None and keys.auth.open_docs
        pages = (
            ("/", self.index, "index", True),
            ("/health/live", self.live, "live", True),
            ("/health/ready", self.ready, "ready", True),
            ("/metrics", self.metrics, "metrics", self.has_open_metrics),
            ("/openapi.json", self.openapi, "openapi", open_docs),
            ("/docs", self.docs, "docs", open_docs),
            ("/docs/{name}", self.asset, "docs", open_docs),
        )
        return [
            page_route(self.door, path, page, name, needs_no_key=is_open)
            for path, page, name, is_open in pages
        ]

    @property
    def has_open_metrics(self) -> bool:
        keys = self.door.authenticator
        return keys is not None and keys.auth.open_metrics

    async def index(self, *_: Any) -> HTMLResponse:
        page = index_page(self.door.limits.live, has_keys=self.door.authenticator is not None)
        return HTMLResponse(page, headers=INDEX_HEADERS)

    async def live(self, *_: Any) -> Response:
        return Response(b'{"status":"live"}', media_type=JSON)

    async def ready(self, *_: Any) -> Response:
        self.door.link.check_heard()
        return Response(b'{"status":"ready"}', media_type=JSON)

    async def metrics(self, exchange: Exchange, _: Params) -> Response:
        if not self.has_open_metrics:
            exchange.tenant.require("admin", "/metrics")
        await asyncio.sleep(OTHERS_S)
        self.door.ledger.settle()
        body, content_type = self.door.metrics.render()
        return Response(body, headers={"content-type": content_type})

    async def openapi(self, *_: Any) -> Response:
        return Response(self.document, media_type=JSON)

    async def docs(self, *_: Any) -> HTMLResponse:
        """Swagger UI, with its files below the same path."""
        return HTMLResponse(content("docs.html"), headers=DOCS_HEADERS)

    async def asset(self, exchange: Exchange, params: Params) -> Response:
        name = params["name"]
        if name not in TYPES:
            raise NoSuchRoute(f"{exchange.path}: see /docs")
        return Response(content(name), headers=A_DAY, media_type=TYPES[name])


def page_route(
    door: Door,
    path: str,
    page: Page,
    name: str,
    method: str = "GET",
    *,
    needs_no_key: bool = False,
) -> Route:
    """The route of a page, with its name in log and metrics. No page takes a query."""

    async def run(exchange: Exchange, params: Params) -> None:
        exchange.op = name
        if exchange.query:
            query = exchange.query.decode("latin-1")
            raise InvalidRequest("query", query, "this route takes no parameters")
        response = await page(exchange, params)
        headers = tuple(one for one in response.raw_headers if one[0] != b"content-length")
        await respond(door, exchange, response.status_code, headers, bytes(response.body))

    return route(path, {method: run}, needs_no_key=needs_no_key)


@cache
def content(name: str) -> bytes:
    """A file of Swagger UI, 1.5 MB, or of this door; kept once it has been requested."""
    own = OWN / name
    return (own if own.exists() else ASSETS / name).read_bytes()
