"""A page of the cache's events, fetched from the engine for a door."""

from __future__ import annotations

import json
from typing import Any

from service.doors.problems import ProblemText
from service.doors.upstream import Upstream
from service.image.json_body import fields_text_of_image
from service.image.json_text import dump_json
from service.image.reading import REQUEST
from service.image.writing import PROBLEM, header
from service.operations.events import EVENTS
from service.road.frames import NO_REQUEST_ID
from service.tenants import Tenant


async def events_after(link: Upstream, tenant: Tenant, last: int) -> dict[str, Any]:
    """The answer of `events`. Raises AttndError, ProblemText."""
    request, length = await link.lay([header(REQUEST, dump_json({"after": last}), ())])
    try:
        most = link.limits.max_answer_bytes
        answered, slot = await link.call(EVENTS, request, length, most, 0, NO_REQUEST_ID, tenant)
    finally:
        link.give_back(request)
    try:
        if answered.status >= 400:
            raise ProblemText(fields_text_of_image(answered.image, PROBLEM))
        told: dict[str, Any] = json.loads(fields_text_of_image(answered.image))
    finally:
        link.give_back(slot)
    return told
