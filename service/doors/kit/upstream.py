"""The interface that a door calls: one engine (`Link`), or several behind a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

from attnd.wire.dtypes import Array, Part
from attnd.wire.frames import NO_REQUEST_ID
from attnd.wire.images import PROBLEM, RESPONSE

from config.server import ServerSettings
from service.doors.kit.arena import DoorArena
from service.doors.kit.problems import ProblemText
from service.image.json_body import dump_fields, fields_text_of_image, read_image
from service.image.reading import REQUEST
from service.image.writing import image
from service.metrics import Metrics
from service.operations.events import EVENTS
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import Tenant

COPY_BYTES: Final = 2 * 2**20
"""Copied in a pass of the loop."""
NO_ARRAYS: Final[Mapping[str, Array]] = MappingProxyType({})


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


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A successful reply, copied out of the arena."""

    fields: dict[str, Any]
    arrays: dict[str, Array]
    stages: tuple[float, ...]


async def call_engine(
    link: Upstream,
    operation: Operation,
    fields: Mapping[str, Any],
    tenant: Tenant,
    arrays: Mapping[str, Array] = NO_ARRAYS,
    deadline_us: int = 0,
    request_id: bytes = NO_REQUEST_ID,
) -> EngineReply:
    """The reply to these fields and tensors. Raises AttndError, ProblemText."""
    arena = link.arena
    request, length = await laid(arena, image(REQUEST, dump_fields(fields), arrays))
    try:
        most = link.limits.max_answer_bytes
        answered, slot = await link.call(
            operation, request, length, most, deadline_us, request_id, tenant
        )
    finally:
        arena.give_back(request)
    try:
        return reply_of(answered)
    finally:
        arena.give_back(slot)


def reply_of(answered: Answered) -> EngineReply:
    """The reply in an image, copied. Raises ProblemText for an error."""
    if answered.status >= 400:
        raise ProblemText(fields_text_of_image(answered.image, PROBLEM))
    if not len(answered.image):
        return EngineReply({}, {}, answered.stages)
    found, arrays = read_image(answered.image, RESPONSE)
    copied = {name: array.copy() for name, array in arrays.items()}
    return EngineReply(found, copied, answered.stages)


async def laid(arena: DoorArena, parts: Sequence[Part]) -> tuple[Slot, int]:
    """As `DoorArena.lay`, some megabytes in a pass of the loop."""
    size = sum(map(len, parts))
    if size <= COPY_BYTES:
        return arena.lay(parts)
    slot, at = arena.slot(size), 0
    try:
        for part in parts:
            for begin in range(0, len(part), COPY_BYTES):
                piece = part[begin : begin + COPY_BYTES]
                slot.view()[at : at + len(piece)] = piece
                at += len(piece)
                await asyncio.sleep(0)
    except BaseException:
        arena.give_back(slot)
        raise
    return slot, size


async def events_after(link: Upstream, tenant: Tenant, last: int) -> dict[str, Any]:
    """The cache's events after number `last`: the reply of `events`. Raises AttndError,
    ProblemText."""
    return (await call_engine(link, EVENTS, {"after": last}, tenant)).fields
