"""The operation that returns a batch of events about cached pages."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import Fields
from service.operations.schema.spec import Operation

FROM_NOW: Final = -1
MAX_EVENTS: Final = 1000


EventNumber = Annotated[int, Field(ge=0, lt=2**53)]


class EventsFields(Fields):
    after: Annotated[int, Field(ge=FROM_NOW, lt=2**53)] = FROM_NOW
    """Number of the last event read. 0: all kept events; -1: no events, only `next`."""
    limit: Annotated[int, Field(ge=1, le=MAX_EVENTS)] = MAX_EVENTS
    """Maximum number of events in the reply."""


EVENTS: Final = Operation(
    name="events",
    summary="Events about the namespace's cached pages, after a number",
    description="`GET /v1/events` streams the same.",
    tag="prefix cache",
    fields=EventsFields,
    scope="read",
    routing="everywhere",
)
