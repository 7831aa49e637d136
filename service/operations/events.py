"""The operation that returns a batch of events about cached pages."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from service.operations.schema.fields import Count, Fields
from service.operations.schema.page_names import ExtraKey, PageKey, TokenId
from service.operations.schema.spec import Operation

FROM_NOW: Final = -1
MAX_EVENTS: Final = 1000


EventNumber = Annotated[int, Field(ge=0, lt=2**53)]


class EventsFields(Fields):
    after: Annotated[int, Field(ge=FROM_NOW, lt=2**53)] = FROM_NOW
    """Number of the last event read. 0: all kept events; -1: no events, only `next`."""
    limit: Annotated[int, Field(ge=1, le=MAX_EVENTS)] = MAX_EVENTS
    """Maximum number of events in the reply."""


class EventAnswer(Fields):
    id: EventNumber
    """Number, one more than the previous event's."""
    type: Literal["stored", "removed", "cleared", "pressure"]
    namespace: str
    time: float
    """When it was recorded, in Unix seconds."""
    page_keys: list[PageKey] | None = None
    """Stored, removed: keys of the pages, in the order of their prompt."""
    parent_key: PageKey | None = None
    """Stored: key of the page before them; before a prompt's first page, the key of its salt."""
    token_ids: list[TokenId] | None = None
    """Stored: token ids of the pages, if they were committed with ids."""
    extra_keys: list[list[ExtraKey] | None] | None = None
    """Stored: for each page, the further keys that begin in it, at a token of the page, or null;
    absent: none of the pages has any."""
    page_size: Count | None = None
    """Stored: tokens per page."""
    medium: Literal["GPU", "CPU", "DISK"] | None = None
    """Stored, removed: where the pages are or were: `GPU` is the pool, `CPU` host memory."""
    is_high: bool | None = None
    """Pressure: whether the part of the pool that cannot be evicted exceeds
    `cache.high_watermark`."""
    free: Count | None = None
    """Pressure: pages that the namespace can allocate without evictions."""
    available: Count | None = None
    """Pressure: pages that the namespace can allocate, evictions included."""


class EventsAnswer(Fields):
    events: list[EventAnswer]
    next: EventNumber
    """Value of `after` for the next call."""
    too_old: bool
    """Whether events after `after` were dropped from the history: these are the oldest kept ones,
    and state derived from earlier ones can be wrong."""


EVENTS: Final = Operation(
    name="events",
    summary="Events about the namespace's cached pages, after a number",
    description="`GET /v1/events` streams the same.",
    tag="prefix cache",
    fields=EventsFields,
    answer=EventsAnswer,
    scope="read",
    routing="everywhere",
)
