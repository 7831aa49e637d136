"""The cache's events as a stream. One poll of the engine serves all clients of a tenant."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final
from urllib.parse import parse_qsl

from service.doors.http.door import Door
from service.doors.http.endpoints.operation import number
from service.doors.http.endpoints.responses import (
    KEEP_ALIVE,
    Write,
    is_still_valid,
    respond_stream,
)
from service.doors.http.exchange import Exchange
from service.doors.kit.problems import ProblemText
from service.doors.kit.turns import Waiters
from service.doors.kit.upstream import events_after
from service.errors import AttndError, NotReady
from service.image.json_text import dump_json
from service.operations.events import FROM_NOW
from service.operations.schema.fields import refuse
from service.tenants import Tenant

PATH: Final = "/v1/events"
POLL_S: Final = 0.05
KEEP_ALIVE_S: Final = 15.0
KEPT: Final = 256
"""Events that a door keeps for all clients; older ones come from the engine."""
AT_ONCE: Final = 16
"""Events written before checking whether the client reads them."""


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """Encoded events, and the number of the last one."""

    events: list[bytes]
    next: int
    too_old: bool


class EventFeed:
    """The newest events of one tenant, up to number `newest`, while a client listens."""

    def __init__(self, door: Door, tenant: Tenant, newest: int) -> None:
        self.door = door
        self.tenant = tenant
        self.newest = newest
        self.events: deque[bytes] = deque(maxlen=KEPT)
        self.listeners = 0
        self.is_over = False
        self.news = Waiters(door.turns, tenant.namespace)
        self.task = door.loop.create_task(self.poll())

    async def poll(self) -> None:
        """Until the service is no longer ready."""
        try:
            while True:
                self.door.link.ready()
                await self.look()
                await asyncio.sleep(POLL_S)
        except NotReady:
            pass
        finally:
            self.is_over = True
            self.news.wake()

    def stop(self) -> None:
        self.task.cancel()
        del self.task  # an ended task refers to this feed

    async def look(self) -> None:
        """Fetch new events; an error is ignored until the next poll."""
        try:
            page = await page_after(self.door, self.tenant, self.newest)
        except (AttndError, ProblemText):
            return
        if page.too_old:
            self.events.clear()
        if page.events or page.too_old:
            self.events.extend(page.events)
            self.newest = page.next
            self.news.wake()

    async def after(self, last: int) -> Page:
        """Some events after number `last`. Raises AttndError, ProblemText."""
        begin = len(self.events) - (self.newest - last)
        if begin < 0:
            return await page_after(self.door, self.tenant, last)
        some = list(islice(self.events, begin, begin + AT_ONCE))
        return Page(some, last + len(some), False)


class EventStream:
    """The stream of one door."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.feeds: dict[Tenant, EventFeed] = {}

    async def run(self, exchange: Exchange, params: Mapping[str, Any]) -> None:
        exchange.op = "stream_events"
        last = last_event(exchange)
        self.door.link.ready()
        page = await page_after(self.door, exchange.tenant, last)
        await respond_stream(self.door, exchange, lambda write: self.stream(write, exchange, page))

    async def stream(self, write: Write, exchange: Exchange, page: Page) -> None:
        """Write page after page until the service ends, or the key is revoked."""
        tenant = exchange.tenant
        feed = self.feeds.get(tenant)
        if feed is None or feed.is_over:
            feed = self.feeds[tenant] = EventFeed(self.door, tenant, page.next)
        feed.listeners += 1
        try:
            while not feed.is_over and is_still_valid(self.door.authenticator, exchange):
                if page.events or page.too_old:
                    await write(b"".join(written(page)))
                elif feed.newest <= page.next and not await feed.news.wait(KEEP_ALIVE_S):
                    await write(KEEP_ALIVE)
                page = await feed.after(page.next)
        finally:
            feed.listeners -= 1
            if not feed.listeners:
                feed.stop()
                if self.feeds.get(tenant) is feed:
                    del self.feeds[tenant]


def last_event(exchange: Exchange) -> int:
    """The number of the event after which the stream begins. Raises InvalidRequest."""
    query = parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True)
    given = dict(query)
    if len(given) < len(query):
        refuse("query", exchange.query.decode("latin-1"), "has a parameter twice")
    if unknown := given.keys() - {"after"}:
        refuse(min(unknown), given[min(unknown)], "this route has no such parameter")
    text, name = given.get("after", str(FROM_NOW)), "after"
    if exchange.last_event_id:
        text, name = exchange.last_event_id.decode("latin-1"), "Last-Event-ID"
    last = number(text)
    if isinstance(last, str) or not FROM_NOW <= last < 2**53:
        refuse(name, text, "must be the number of an event, or 0 for all that are kept")
    return last


async def page_after(door: Door, tenant: Tenant, last: int) -> Page:
    """Events from the engine. Raises AttndError, ProblemText."""
    page = await events_after(door.link, tenant, last)
    return Page([event_text(event) for event in page["events"]], page["next"], page["too_old"])


def event_text(event: dict[str, Any]) -> bytes:
    return f"id: {event['id']}\nevent: {event['type']}\ndata: {dump_json(event)}\n\n".encode()


def written(page: Page) -> list[bytes]:
    """A page's bytes; an event `too_old` comes first if earlier events were dropped."""
    if not page.too_old:
        return page.events
    first = page.next - len(page.events)
    dropped = f'id: {first}\nevent: too_old\ndata: {{"id":{first},"type":"too_old"}}\n\n'
    return [dropped.encode(), *page.events]
