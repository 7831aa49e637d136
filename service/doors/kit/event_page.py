"""A page of the cache's events, fetched from the engine for a door."""

from __future__ import annotations

from typing import Any

from service.doors.kit.engine_calls import asked
from service.doors.kit.upstream import Upstream
from service.operations.events import EVENTS
from service.tenants import Tenant


async def events_after(link: Upstream, tenant: Tenant, last: int) -> dict[str, Any]:
    """The answer of `events`. Raises AttndError, ProblemText."""
    fields, _ = await asked(link, EVENTS, {"after": last}, tenant)
    return fields
