"""The live page's files, and the stream that fills it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from service.doors.http.endpoints.events import KEEP_ALIVE_S
from service.doors.http.endpoints.pages import named
from service.doors.http.endpoints.responses import (
    EXCHANGE,
    KEEP_ALIVE,
    Receive,
    Scope,
    Send,
    check_stream,
    respond_stream,
)
from service.doors.http.live.feed import Feed
from service.doors.http.live.samples import Samples
from service.doors.http.protocol.admission import is_still_valid
from service.doors.http.protocol.exchange import Exchange
from service.errors import InvalidRequest, NoSuchRoute

if TYPE_CHECKING:
    from service.doors.http.door import Door
    from service.doors.http.protocol.connection import Connection

FILES: Final = Path(__file__).with_name("files")
LIVE_STREAM: Final = "/live/stream"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SAFE: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def live_routes(door: Door) -> list[BaseRoute]:
    """The files are static and need no key; the stream needs the key of an operator."""
    file = named("live_page", file_response, needs_no_key=True)
    return [
        Route("/live", file, methods=["GET"]),
        Route(LIVE_STREAM, LiveStream(door), name="stream_live"),
        Route("/live/{name}", file, methods=["GET"]),
    ]


class LiveStream:
    """ASGI endpoint of the stream. All viewers share a feed, which ends with the last viewer."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.samples = Samples(door.metrics, door.loop)
        self.feed: Feed | None = None
        keys = door.authenticator
        self.needs_no_key = keys is not None and keys.auth.open_live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        check_stream(exchange, "stream_live")
        if exchange.query:
            query = exchange.query.decode("latin-1")
            raise InvalidRequest("query", query, "this route takes no parameters")
        if not self.needs_no_key:
            exchange.tenant.require("admin", LIVE_STREAM)
        self.door.link.ready()
        await respond_stream(
            self.door, exchange, lambda connection: self.show(connection, exchange)
        )

    async def show(self, connection: Connection, exchange: Exchange) -> None:
        """Send news until the service ends, or the key is revoked. A slow reader gets the newest
        state only."""
        feed = self.feed
        if feed is None or feed.is_over:
            feed = self.feed = Feed(self.door, self.samples)
        feed.viewers += 1
        had: dict[str, int] = {}
        try:
            while not feed.is_over and (
                self.needs_no_key or is_still_valid(self.door.authenticator, exchange)
            ):
                connection.send(b"", feed.after(had) or [KEEP_ALIVE])
                await connection.wait_until_read()
                await feed.news.wait(KEEP_ALIVE_S)
        finally:
            feed.viewers -= 1
            if not feed.viewers:
                feed.task.cancel()
                if self.feed is feed:
                    self.feed = None


async def file_response(request: Request) -> Response:
    name = request.path_params.get("name", "live.html")
    content = files().get(name)
    if content is None:
        raise NoSuchRoute(f"/live/{name}: see /live")
    return Response(content, headers=SAFE, media_type=TYPES[Path(name).suffix])


@cache
def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in FILES.iterdir() if path.suffix in TYPES}
