"""Calls that a door makes of the engine for itself: fields there, fields and tensors back."""

from __future__ import annotations

from typing import Any

from attnd.wire.dtypes import Array
from attnd.wire.frames import NO_REQUEST_ID

from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import Upstream
from service.image.json_body import fields_text_of_image
from service.image.json_text import dump_json
from service.image.reading import REQUEST, place, read_layout, split
from service.image.writing import PROBLEM, RESPONSE, header
from service.operations.events import EVENTS
from service.operations.schema.spec import Operation
from service.tenants import Tenant


async def call_engine(
    link: Upstream, operation: Operation, fields: dict[str, Any], tenant: Tenant
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The reply's fields, and copies of its tensors. Raises AttndError, ProblemText."""
    request, length = await link.lay([header(REQUEST, dump_json(fields), ())])
    try:
        most = link.limits.max_answer_bytes
        answered, slot = await link.call(operation, request, length, most, 0, NO_REQUEST_ID, tenant)
    finally:
        link.give_back(request)
    try:
        if answered.status >= 400:
            raise ProblemText(fields_text_of_image(answered.image, PROBLEM))
        head, start = split(answered.image)
        layout = read_layout(head, len(answered.image) - start, RESPONSE)
        tensors = place(answered.image, start, layout)
        return layout.fields, {name: tensor.copy() for name, tensor in tensors.items()}
    finally:
        link.give_back(slot)


async def events_after(link: Upstream, tenant: Tenant, last: int) -> dict[str, Any]:
    """The cache's events after number `last`: the reply of `events`. Raises AttndError,
    ProblemText."""
    fields, _ = await call_engine(link, EVENTS, {"after": last}, tenant)
    return fields
