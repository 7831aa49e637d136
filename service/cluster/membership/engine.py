"""One engine of a cluster, for as long as the session with it lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from attnd.wire.dtypes import Array
from attnd.wire.frames import NO_REQUEST_ID
from attnd.wire.images import PROBLEM

from service.cluster.placement.cost import EngineLoad, Pace, busy_until_s
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import Link
from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import EngineReply, reply_of
from service.errors import NotReady
from service.image.json_body import fields_text_of_image
from service.image.json_text import dump_json
from service.image.reading import REQUEST, Layout, place, split
from service.image.writing import image
from service.operations.schema.fields import InfoAnswer
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import Tenant

ASK_S: Final = 10.0
"""Deadline of the router's own calls."""
SILENT_S: Final = 3.0
"""An engine without a reply for so long gets no calls until it replies. Silence is no death: the
engine may resume at any time with all its sequences."""
TAG_DIGITS: Final = 8
"""Of an engine's `instance_id`, at the end of the ids of sequences that are made there."""
LATEST_WEIGHT: Final = 0.1
"""Share of the latest call in the running means of queue and call times."""
NO_IMAGE: Final = memoryview(b"")
RawReply = tuple[Answered, Slot]
"""A reply as the engine wrote it, and its slot."""


@dataclass(slots=True, eq=False)
class DoorCall:
    """One call of a door: the request's image, and the other fields of its frame.

    Not frozen: that would cost 2 µs a call.
    """

    operation: Operation
    image: memoryview
    most: int
    """Maximum size of the reply, in bytes."""
    deadline_us: int
    request_id: bytes
    tenant: Tenant
    request: Slot | None = None
    """The slot of the image; None for the router's own calls."""
    is_poll: bool = False
    """Also sent to an engine that is silent."""

    def arrays(self, layout: Layout) -> dict[str, Array]:
        """The request's tensors, as views of the image."""
        return place(self.image, split(self.image)[1], layout)


class EngineSession:
    """Calls to one engine. `tag` ends the ids of the sequences that are made there."""

    def __init__(self, name: str, link: Link, arena: DoorArena) -> None:
        self.name = name
        self.link = link
        self.arena = arena
        self.tag = ""
        self.load = EngineLoad()
        """As of the latest poll; `load_now` adds what happened since."""
        self.pace = Pace()
        """As the engine reports it; `load` has it within bounds."""
        self.queue_s = self.call_s = 0.0
        """Running means: how long calls wait for their turn, and take from then on."""
        self.busy_until_s = 0.0
        """On `time.monotonic`: when the prompts placed here should be computed."""
        self.held = 0
        """Pages that sequences and pins hold, by the latest reply."""
        self.promised = 0
        """Pages of sequences placed here since the latest poll that are not yet in `held`."""
        self.is_leaving = False
        """The roster says that it is going to be removed: no new sequences."""
        self.is_draining = False
        """The engine itself reports that it is draining."""
        self.has_own_counts = False
        """Its counts are not in this host's shared memory."""
        self.is_silent = False
        """Has not replied for `SILENT_S`."""
        self.heard_s = 0.0
        """Time of the latest reply to a poll, on `time.monotonic()`."""
        self.num_calls = self.num_waiting = 0

    def learn(self, info: InfoAnswer) -> None:
        self.info = info
        self.tag = info.instance_id[:TAG_DIGITS]

    @property
    def is_ready(self) -> bool:
        return not self.is_silent and self.link.state[0] == "ready"

    @property
    def takes_new(self) -> bool:
        """Whether new sequences may be placed here."""
        return self.is_ready and not (self.is_leaving or self.is_draining)

    # load

    @property
    def load_now(self) -> EngineLoad:
        """The latest poll, updated by the replies since."""
        load = self.load
        work_s = max(self.busy_until_s - time.monotonic(), self.num_waiting * self.call_s)
        return EngineLoad(
            load.free + load.held - self.held,
            load.cached,
            self.held,
            self.queue_s,
            work_s,
            self.promised,
            load.pace,
        )

    def add_work(self, first: int, last: int) -> None:
        """Pages `first:last` of a prompt will be computed here."""
        work_s = self.load.pace.span_s(float(first), last)
        self.busy_until_s = busy_until_s(self.busy_until_s, time.monotonic(), work_s)

    def halve_work(self) -> None:
        """No call is in flight: part of the expected work must be done."""
        self.busy_until_s -= max(self.busy_until_s - time.monotonic(), 0.0) / 2

    def set_held(self, held: int | None, operation: Operation) -> None:
        """Pages held now. Growth counts against `promised`, except a new sequence's cached ones."""
        if held is None:
            return
        if operation.routed != "placed":
            self.promised -= min(self.promised, max(held - self.held, 0))
        self.held = held

    # calls: all raise ProblemText for an error reply, NotReady where the session is lost,
    # AnswerTooLarge and Overloaded

    async def call(self, call: DoorCall) -> RawReply:
        """The reply to the call's own image."""
        if call.request is None:
            raise RuntimeError("a call without an image cannot be forwarded: this is a bug")
        return await self.exchange(call, call.request, len(call.image))

    async def send(
        self, call: DoorCall, fields: Mapping[str, Any], arrays: Mapping[str, Array]
    ) -> RawReply:
        """The reply to other fields and tensors."""
        request, length = self.arena.lay(image(REQUEST, dump_json(fields), arrays))
        try:
            return await self.exchange(call, request, length)
        finally:
            self.arena.give_back(request)

    async def ask(
        self, call: DoorCall, fields: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
    ) -> EngineReply:
        """As `send`; the reply is copied out of the arena."""
        answered, slot = await self.send(call, fields, arrays or {})
        try:
            return reply_of(answered)
        finally:
            self.arena.give_back(slot)

    async def exchange(self, call: DoorCall, request: Slot, length: int) -> RawReply:
        if self.is_silent and not call.is_poll:
            raise NotReady(f"{self.name} does not respond and may resume at any time: retry later")
        is_work = call.operation.has_tensors  # status requests are not
        self.num_waiting += is_work
        try:
            answered, slot = await self.link.call(
                call.operation,
                request,
                length,
                call.most,
                call.deadline_us,
                call.request_id,
                call.tenant,
            )
        finally:
            self.num_waiting -= is_work
        self.num_calls += 1
        queue_s, *stages = answered.stages
        self.queue_s += LATEST_WEIGHT * (queue_s - self.queue_s)
        self.set_held(answered.held, call.operation)
        if is_work:
            self.call_s += LATEST_WEIGHT * (sum(stages) - self.call_s)
            if not self.num_waiting:
                self.halve_work()
        if answered.status >= 400:
            text = fields_text_of_image(answered.image, PROBLEM)
            self.arena.give_back(slot)
            raise ProblemText(text)
        return answered, slot

    async def question(
        self,
        operation: Operation,
        tenant: Tenant,
        fields: Mapping[str, Any],
        *,
        is_poll: bool = False,
    ) -> EngineReply:
        """The reply to a call of the router's own; `is_poll`: also to an engine that is silent."""
        most, us = self.link.limits.max_answer_bytes, int(ASK_S * 1e6)
        call = DoorCall(operation, NO_IMAGE, most, us, NO_REQUEST_ID, tenant, is_poll=is_poll)
        return await self.ask(call, fields)


async def in_time(asking: Awaitable[EngineReply], engine: EngineSession) -> EngineReply:
    """A reply within `SILENT_S`. Raises NotReady where none comes."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await asking
    except TimeoutError:
        detail = f"{engine.name} has not replied for {SILENT_S:g} s: retry later"
        raise NotReady(detail) from None
