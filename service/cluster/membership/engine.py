"""One engine of a cluster, for as long as the session with it lasts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array
from attnd.wire.frames import NO_REQUEST_ID

from service.cluster.placement.cost import Load, Pace, busy_until_s
from service.cluster.routing.tags import tag_of_instance
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import Link
from service.doors.kit.problems import ProblemText
from service.errors import NotReady
from service.image.json_body import fields_text_of_image
from service.image.json_text import dump_json
from service.image.reading import REQUEST, Layout, place, read_layout, split
from service.image.writing import PROBLEM, RESPONSE, image
from service.operations.schema.info import InfoAnswer
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import Tenant

MOVING_S: Final = 2.0
"""For so long a call waits for sequences that are on their way to another engine."""
LATEST_WEIGHT: Final = 0.1
"""Share of the latest call in the running means of what calls wait and take."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a door's: the request's image, and what the road carries beside it.

    Not frozen: that would cost 2 µs a call.
    """

    operation: Operation
    image: memoryview
    most: int
    """Bytes that the answer may have."""
    deadline_us: int
    request_id: bytes
    tenant: Tenant
    request: Slot | None = None
    """Where the image lies; None for the router's own calls, which have none."""
    is_poll: bool = False
    """Asked to find out whether an engine answers."""
    waits_until: float = 0.0
    """On `time.monotonic()`: until then sequences that change their engine are waited for; 0 before
    the first wait."""

    def may_wait(self) -> bool:
        """Whether there is time left to wait for sequences that change their engine: one limit for
        all waits of a call."""
        now = time.monotonic()
        if not self.waits_until:
            self.waits_until = now + MOVING_S
        return now < self.waits_until

    @property
    def has_waited_s(self) -> float:
        """Since the first wait."""
        return time.monotonic() - (self.waits_until - MOVING_S) if self.waits_until else 0.0

    def arrays(self, layout: Layout) -> dict[str, Array]:
        """The request's tensors, where they lie in the image."""
        return place(self.image, split(self.image)[1], layout)


@dataclass(frozen=True, slots=True)
class Told:
    """An engine's answer in memory of our own."""

    fields: dict[str, Any]
    arrays: dict[str, Array]
    stages: tuple[float, ...]


class Engine:
    """Calls to one engine. `tag` ends the ids of the sequences that are made there."""

    def __init__(self, name: str, link: Link, arena: DoorArena) -> None:
        self.name = name
        self.link = link
        self.arena = arena
        self.tag = ""
        self.load = Load()
        self.pace = Pace()
        """As it tells it; `load` has the one that counts."""
        self.queue_s = self.call_s = 0.0
        """Of the latest calls, how long they waited for their turn, and took from then on."""
        self.busy_until_s = 0.0
        """On `time.monotonic`: when the prompts that were placed here should be computed."""
        self.held = 0
        """Pages that its sequences and pins hold, as its latest answer told."""
        self.promised = 0
        """Pages placed there since `load` was told that are not among those held yet."""
        self.is_leaving = False
        """It takes no new sequences, because it is to be removed."""
        self.is_draining = False
        """It says so itself."""
        self.is_elsewhere = False
        """It is no process of this service, so its counts are not in memory that is shared."""
        self.is_silent = False
        """It has not answered for a while."""
        self.num_calls = self.num_waiting = 0

    def learn(self, info: InfoAnswer) -> None:
        """What it says of itself."""
        self.info = info
        self.tag = tag_of_instance(info.instance_id)

    @property
    def is_ready(self) -> bool:
        return not self.is_silent and self.link.state[0] == "ready"

    @property
    def takes_new(self) -> bool:
        """Whether new sequences may be placed there."""
        return self.is_ready and not (self.is_leaving or self.is_draining)

    @property
    def load_now(self) -> Load:
        """What it has told, with what is known since."""
        load = self.load
        work_s = max(self.busy_until_s - time.monotonic(), self.num_waiting * self.call_s)
        return Load(
            load.free + load.held - self.held,
            load.cached,
            self.held,
            self.queue_s,
            work_s,
            self.promised,
            load.pace,
        )

    def give(self, first: int, last: int) -> None:
        """These pages of a prompt are to be computed, and stored here."""
        now = time.monotonic()
        work_s = self.load.pace.span_s(float(first), last)
        self.busy_until_s = busy_until_s(self.busy_until_s, now, work_s)

    def rest(self) -> None:
        """None of its calls is under way: some of the work that it was thought to have is done."""
        now = time.monotonic()
        self.busy_until_s -= max(self.busy_until_s - now, 0.0) / 2

    def hold(self, held: int | None, operation: Operation) -> None:
        """So many pages are held now. More of them were promised before, but for cached ones that a
        new sequence begins with."""
        if held is None:
            return
        if operation.routed != "placed":
            self.promised -= min(self.promised, max(held - self.held, 0))
        self.held = held

    async def call(self, call: Call) -> tuple[Answered, Slot]:
        """The answer to the call as it is, and where it lies.

        Raises AnswerTooLarge, Overloaded, NotReady; what the engine refuses is an answer too.
        """
        if call.request is None:
            raise RuntimeError("a call without an image is passed on: this is a bug")
        return await self.exchange(call, call.request, len(call.image))

    async def ask(
        self, call: Call, fields: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
    ) -> Told:
        """The answer to other fields and tensors. Raises ProblemText for what the engine refuses,
        and what `call` raises."""
        answered, slot = await self.send(call, fields, arrays or {})
        try:
            whole = answered.image
            if answered.status >= 400:
                raise refusal_in(answered)
            if not len(whole):
                return Told({}, {}, answered.stages)
            header, start = split(whole)
            layout = read_layout(header, len(whole) - start, RESPONSE)
            copied = {name: np.array(array) for name, array in place(whole, start, layout).items()}
            return Told(layout.fields, copied, answered.stages)
        finally:
            self.arena.give_back(slot)

    async def send(
        self, call: Call, fields: Mapping[str, Any], arrays: Mapping[str, Array]
    ) -> tuple[Answered, Slot]:
        """As `call`, to other fields and tensors."""
        request, length = self.arena.lay(image(REQUEST, dump_json(fields), arrays))
        try:
            return await self.exchange(call, request, length)
        finally:
            self.arena.give_back(request)

    async def exchange(self, call: Call, request: Slot, length: int) -> tuple[Answered, Slot]:
        """The answer to what lies in `request`, and where it lies."""
        if self.is_silent and not call.is_poll:
            raise NotReady(f"{self.name} does not answer, and may go on any time: retry later")
        is_work = call.operation.has_tensors  # to ask how it is, is none
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
        self.hold(answered.held, call.operation)
        if is_work:
            self.call_s += LATEST_WEIGHT * (sum(stages) - self.call_s)
            if not self.num_waiting:
                self.rest()
        return answered, slot

    def own(self, operation: Operation, tenant: Tenant, deadline_s: float) -> Call:
        """A call of the router's own, for `ask`."""
        most = self.link.limits.max_answer_bytes
        return Call(operation, NOTHING, most, int(deadline_s * 1e6), NO_REQUEST_ID, tenant)


NOTHING: Final = memoryview(b"")


def refusal_in(answered: Answered) -> ProblemText:
    """What an engine has refused."""
    return ProblemText(fields_text_of_image(answered.image, PROBLEM))


def problem_in(answered: Answered) -> dict[str, Any]:
    """The document of a refusal."""
    return refusal_in(answered).problem
