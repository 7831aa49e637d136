"""The interface that a door calls: one engine (`Link`), or several behind a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from attnd.wire.dtypes import Array
from attnd.wire.frames import NO_REQUEST_ID
from attnd.wire.images import PROBLEM, RESPONSE, header

from config.server import ServerSettings
from service.doors.kit.arena import DoorArena
from service.doors.kit.problems import ProblemText
from service.image.json_body import fields_text_of_image, read_image
from service.image.json_text import dump_json
from service.image.reading import REQUEST
from service.metrics import Metrics
from service.operations.events import EVENTS
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import Tenant


class Upstream(Protocol):
    """An arena for requests and answers, and calls of operations, as in `Link`."""

    limits: ServerSettings
    draining: str
    arena: DoorArena

    async def connect(self, path: str, name: str, secret: str) -> None: ...
    @property
    def state(self) -> tuple[str, str]: ...
    def ready(self) -> object: ...
    @property
    def is_pinned(self) -> bool: ...
    def check_heard(self) -> None: ...
    async def call(
        self,
        operation: Operation,
        request: Slot,
        length: int,
        most: int,
        deadline_us: int,
        request_id: bytes,
        tenant: Tenant,
    ) -> tuple[Answered, Slot]: ...
    def close(self) -> None: ...


def trim(loop: asyncio.AbstractEventLoop, upstream: Upstream, begin: int = 0) -> None:
    """Return unused memory to the system, one piece in a pass of the loop: all of it at once would
    stall the loop for a quarter of a millisecond a MiB. Not while a device holds it."""
    if not upstream.is_pinned and (after := upstream.arena.trim(begin)) is not None:
        loop.call_soon(trim, loop, upstream, after)


MakeUpstream = Callable[[ServerSettings, bool, Metrics | None], Upstream]
"""Arguments: a door's limits, whether it has keys (and calls for their tenants), and its metrics.
Called on the door's event loop."""


async def call_engine(
    link: Upstream, operation: Operation, fields: dict[str, Any], tenant: Tenant
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The reply's fields, and copies of its tensors. Raises AttndError, ProblemText."""
    request, length = link.arena.lay([header(REQUEST, dump_json(fields), ())])
    try:
        most = link.limits.max_answer_bytes
        answered, slot = await link.call(operation, request, length, most, 0, NO_REQUEST_ID, tenant)
    finally:
        link.arena.give_back(request)
    try:
        if answered.status >= 400:
            raise ProblemText(fields_text_of_image(answered.image, PROBLEM))
        found, tensors = read_image(answered.image, RESPONSE)
        return found, {name: tensor.copy() for name, tensor in tensors.items()}
    finally:
        link.arena.give_back(slot)


async def events_after(link: Upstream, tenant: Tenant, last: int) -> dict[str, Any]:
    """The cache's events after number `last`: the reply of `events`. Raises AttndError,
    ProblemText."""
    fields, _ = await call_engine(link, EVENTS, {"after": last}, tenant)
    return fields
