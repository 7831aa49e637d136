"""The live page: its files, and the stream that fills it with four snapshots a second, which all
viewers share."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array
from starlette.responses import Response
from starlette.routing import BaseRoute

from service.doors.http.door import Door
from service.doors.http.endpoints.events import KEEP_ALIVE_S
from service.doors.http.endpoints.pages import page_route
from service.doors.http.endpoints.responses import (
    KEEP_ALIVE,
    Write,
    is_still_valid,
    respond_stream,
    route,
)
from service.doors.http.exchange import Exchange
from service.doors.http.live.samples import COLUMNS, Samples
from service.doors.kit.problems import ProblemText
from service.doors.kit.turns import Waiters
from service.doors.kit.upstream import call_engine
from service.errors import AttndError, InvalidRequest, NoSuchRoute, NotReady
from service.image.json_text import dump_json
from service.operations.status import INFO, SNAPSHOT
from service.tenants import OPEN, Tenant, tenant_of

PERIOD_S: Final = 0.25
LOAD: Final = ("inflight", "waiting", "sessions")
TREE: Final = "tree_"
WATCHER: Final = tenant_of("default", ("read", "admin"))
"""The tenant for snapshots of an engine with keys; the door has checked its viewers' keys."""


@dataclass(frozen=True, slots=True)
class PagePart:
    """A part of the page, as an event; every version has another number."""

    number: int
    data: str
    event: bytes


class LiveFeed:
    """The feed of one door, while it has viewers."""

    def __init__(self, door: Door, samples: Samples) -> None:
        self.door = door
        self.samples = samples
        self.parts: dict[str, PagePart] = {}
        self.viewers = 0
        self.seen = door.loop.time()
        """When the engine replied last."""
        self.is_over = False
        self.news = Waiters(door.turns, self.tenant.namespace)
        self.task = door.loop.create_task(self.run())

    @property
    def tenant(self) -> Tenant:
        return OPEN if self.door.authenticator is None else WATCHER

    async def run(self) -> None:
        """Poll until the service is no longer ready. The load comes from metrics, which a
        busy engine has, too."""
        loop, look = self.door.loop, None
        try:
            while True:
                self.door.link.ready()
                due = loop.time() + PERIOD_S
                if look is None or look.done():
                    look = loop.create_task(self.look())
                await asyncio.wait((look,), timeout=PERIOD_S)
                self.put_load()
                self.news.wake()
                await asyncio.sleep(max(0.0, due - loop.time()))
        except NotReady:
            pass
        finally:
            if look is not None:
                look.cancel()
            self.is_over = True
            self.news.wake()

    async def look(self) -> None:
        """Fetch a snapshot; an error is ignored until the next one."""
        link = self.door.link
        try:
            if "service" not in self.parts:
                info = await call_engine(link, INFO, {}, self.tenant)
                self.put("service", info.fields | {"columns": COLUMNS})
            taken = await call_engine(link, SNAPSHOT, {}, self.tenant)
        except (AttndError, ProblemText):
            return
        self.seen = self.door.loop.time()
        pool, arrays = taken.fields, taken.arrays
        self.put("pages", pages_of(pool.pop("page_step"), arrays.pop("page_states")))
        self.put("tree", tree_of(pool.pop("namespaces"), arrays))
        self.put("pool", pool)

    def put_load(self) -> None:
        """The engine's load, and how old the snapshot is."""
        blocks = self.door.metrics.totals(LOAD)
        load: dict[str, float] = {key[0]: int(block[0]) for key, block in blocks.items()}
        age = round(self.door.loop.time() - self.seen, 1)
        self.put("load", load | {"age_s": age})
        self.put("summary", self.samples.summary())

    def put(self, name: str, value: Any) -> None:
        """Replace a part, if it has changed."""
        before, data = self.parts.get(name), dump_json(value)
        if before is None or before.data != data:
            number = 1 if before is None else before.number + 1
            self.parts[name] = PagePart(number, data, event(name, data))

    def after(self, had: dict[str, int]) -> list[bytes]:
        """The events that a viewer lacks; `had` has the numbers of those it was sent."""
        found = []
        for name, part in self.parts.items():
            if had.get(name) != part.number:
                had[name] = part.number
                found.append(part.event)
        if "service" not in had:  # it names the rows' columns
            return found
        first, rows = self.samples.after(had.get("rows", 0))
        if rows:
            had["rows"] = first + len(rows) - 1
            found.append(event("rows", f'{{"first":{first},"rows":[{",".join(rows)}]}}'))
        return found


def event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def pages_of(step: int, states: Array) -> dict[str, Any]:
    """The states of pages, four to a byte, the first in its lowest bits."""
    padded = np.pad(states, (0, -states.size % 4)).reshape(-1, 4)
    packed = (padded << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1, dtype=np.uint8)
    text = base64.b64encode(packed.tobytes()).decode("ascii")
    return {"step": step, "count": states.size, "states": text}


def tree_of(namespaces: list[str], arrays: dict[str, Array]) -> dict[str, Any]:
    """The tree's columns, by their names."""
    columns = {name.removeprefix(TREE): array.tolist() for name, array in arrays.items()}
    columns["idle_s"] = [round(seconds, 1) for seconds in columns["idle_s"]]
    return {"namespaces": namespaces, **columns}


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
    stream = LiveStream(door)
    return [
        page_route(door, "/live", file_response, "live_page", needs_no_key=True),
        route(LIVE_STREAM, {"GET": stream.run}, needs_no_key=stream.needs_no_key),
        page_route(door, "/live/{name}", file_response, "live_page", needs_no_key=True),
    ]


class LiveStream:
    """The stream. All viewers share a feed, which ends with the last viewer."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.samples = Samples(door.metrics, door.loop)
        self.feed: LiveFeed | None = None
        keys = door.authenticator
        self.needs_no_key = keys is not None and keys.auth.open_live

    async def run(self, exchange: Exchange, params: Mapping[str, Any]) -> None:
        exchange.op = "stream_live"
        if exchange.query:
            query = exchange.query.decode("latin-1")
            raise InvalidRequest("query", query, "this route takes no parameters")
        if not self.needs_no_key:
            exchange.tenant.require("admin", LIVE_STREAM)
        self.door.link.ready()
        await respond_stream(self.door, exchange, lambda write: self.show(write, exchange))

    async def show(self, write: Write, exchange: Exchange) -> None:
        """Send news until the service ends, or the key is revoked. A slow reader gets the newest
        state only."""
        feed = self.feed
        if feed is None or feed.is_over:
            feed = self.feed = LiveFeed(self.door, self.samples)
        feed.viewers += 1
        had: dict[str, int] = {}
        try:
            while not feed.is_over and (
                self.needs_no_key or is_still_valid(self.door.authenticator, exchange)
            ):
                await write(b"".join(feed.after(had)) or KEEP_ALIVE)
                await feed.news.wait(KEEP_ALIVE_S)
        finally:
            feed.viewers -= 1
            if not feed.viewers:
                feed.task.cancel()
                if self.feed is feed:
                    self.feed = None


async def file_response(_: Exchange, params: Mapping[str, Any]) -> Response:
    name = params.get("name", "live.html")
    content = files().get(name)
    if content is None:
        raise NoSuchRoute(f"/live/{name}: see /live")
    return Response(content, headers=SAFE, media_type=TYPES[Path(name).suffix])


@cache
def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in FILES.iterdir() if path.suffix in TYPES}
