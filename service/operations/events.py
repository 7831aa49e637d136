"""The operation that tells what became of cached pages: a page of events after a number."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from service.operations.schema.fields import Count, Fields
from service.operations.schema.page_names import PageKey
from service.operations.schema.spec import Operation

FROM_NOW: Final = -1
MAX_EVENTS: Final = 1000


EventNumber = Annotated[int, Field(ge=0, lt=2**53)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class EventsFields(Fields):
    after: Annotated[int, Field(ge=FROM_NOW, lt=2**53)] = FROM_NOW
    """The number of the last event that was read; 0: all that are kept; -1: none, only from where
    to go on."""
    limit: Annotated[int, Field(ge=1, le=MAX_EVENTS)] = MAX_EVENTS
    """At most so many."""


class EventAnswer(Fields):
    id: EventNumber
    """One more than that of the event before."""
    type: Literal["stored", "removed", "cleared", "pressure"]
    namespace: str
    page_keys: list[PageKey] | None = None
    """Of stored or removed pages, in the order of their prompt."""
    parent_key: PageKey | None = None
    """Stored: the key of the page before these; for a prompt's first, that of its salt."""
    token_ids: list[TokenId] | None = None
    """Stored: those of the pages, where they were committed with ids."""
    page_size: Count | None = None
    """Stored: tokens of a page."""
    is_high: bool | None = None
    """Pressure: whether more of the pool than `cache.high_watermark` cannot be evicted."""
    free: Count | None = None
    """Pressure: pages that the namespace can have without an eviction."""
    available: Count | None = None
    """Pressure: pages that the namespace could get now, evictions included."""


class EventsAnswer(Fields):
    events: list[EventAnswer]
    next: EventNumber
    """What to ask `after` for those that follow."""
    too_old: bool
    """Events after that number are not kept any more: these are the oldest there are, and what is
    known from earlier ones may be wrong."""


EVENTS: Final = Operation(
    name="events",
    number=27,
    method="GET",
    path="/v1/events/page",
    summary="What became of the namespace's cached pages, after a number",
    description="`GET /v1/events` streams the same.",
    tag="prefix cache",
    fields=EventsFields,
    answer=EventsAnswer,
    scope="read",
    routing="everywhere",
)
