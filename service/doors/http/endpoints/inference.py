"""The endpoint of inference requests (Open Inference Protocol v2): a model's call to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Final

from attnd.wire.dtypes import Part

from service.doors.http.endpoints.operation import INLINE_BYTES, JOIN_BYTES, LESS_JSON, ask
from service.doors.http.endpoints.problems import wrong_method
from service.doors.http.endpoints.responses import EXCHANGE, Receive, Scope, Send, answer, read_body
from service.doors.http.protocol.exchange import JSON, MAX_DIGITS, Exchange
from service.doors.http.protocol.heads import Headers
from service.doors.oip.json_answer import answer_parts
from service.doors.oip.json_request import Requests
from service.doors.oip.long_json import wanted_of
from service.doors.oip.models import Model, model_of
from service.doors.oip.request import Call, Wanted
from service.errors import (
    AnswerTooLarge,
    BodyTooLarge,
    InvalidRequest,
    MalformedBody,
)
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door
    from service.doors.http.protocol.bodies import Body

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
OCTETS: Final = "application/octet-stream"
AS_BINARY: Final = f"ask for binary outputs (binary_data_output), {LESS_JSON}"


class InferenceEndpoint:
    """ASGI: inference with the model that the path names."""

    __slots__ = ("door", "limits", "requests")

    def __init__(self, door: Door) -> None:
        self.door = door
        self.limits = door.limits
        self.requests = Requests()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        if exchange.method != "POST":
            raise wrong_method(exchange, ["POST"])
        params = scope["path_params"]
        await self.run(exchange, model_of(params["model"], params.get("version", "")))

    async def run(self, exchange: Exchange, model: Model) -> None:
        """One request; raises whatever it deserves."""
        exchange.op = model.name
        exchange.check_encoding()
        self.door.ready()
        if exchange.said.deadline is not None:
            exchange.read_deadline()
        body, length = await read_body(self.door, exchange, self.limits.max_body_bytes)
        if body is None or exchange.body is None:
            raise MalformedBody("0 bytes: an inference request is a JSON object")
        slot, length, wanted = await self.take_in(model, exchange, exchange.body, (body, length))
        if wanted.deadline_us:
            exchange.deadline_us = min(
                exchange.deadline_us or wanted.deadline_us, wanted.deadline_us
            )
        is_binary = model.operation.gives and not wanted.has_text
        too_long = None if is_binary else self.too_long
        answered, slot = await ask(self.door, exchange, model.operation, (slot, length), too_long)
        await self.answer(model, exchange, answered, slot, wanted)

    async def take_in(
        self,
        model: Model,
        exchange: Exchange,
        body: Body,
        received: tuple[Slot, int],
    ) -> tuple[Slot, int, Wanted]:
        """The request's image, its length, and what the answer is to be; the slot is the
        body's."""
        slot, length = received
        json_bytes = self.json_bytes(exchange, length)
        begin, end = body.lead, body.lead + json_bytes
        if json_bytes > INLINE_BYTES:
            given = {"model": model.name, "begin": begin, "end": end}
            whole = body.lead + length
            slot, length, told = await self.door.helper.image_of_inference(
                slot, whole, json_bytes, given
            )
            body.take_over(slot, self.door)
            return slot, length, wanted_of(told)
        view = slot.view(body.lead + length)
        call = self.requests.read(model, bytes(view[begin:end]), view[end:])
        if in_place := lay_head(call, view, end):
            return slot, in_place, call.wanted
        slot, length = await self.door.link.lay(call.pieces)
        body.take_over(slot, self.door)
        return slot, length, call.wanted

    def json_bytes(self, exchange: Exchange, length: int) -> int:
        """How much of the body is JSON: all of it, or as much as the header says."""
        digits = exchange.said.inference_header
        found = length
        if digits:
            if not digits.isdigit() or len(digits) > MAX_DIGITS or int(digits) > length:
                rule = f"must be a count of at most the body's {length} bytes"
                raise InvalidRequest(LENGTH_HEADER, digits.decode("latin-1"), rule)
            found = int(digits)
        if found > self.limits.max_json_bytes:
            told = f"the JSON is {found} bytes, at most {self.limits.max_json_bytes} are read"
            raise BodyTooLarge(
                f"{told}: send tensors as binary data", size=found, limit=self.limits.max_json_bytes
            )
        return found

    def too_long(self, size: int) -> AnswerTooLarge:
        return AnswerTooLarge(size, self.limits.max_json_bytes, AS_BINARY)

    async def answer(
        self, model: Model, exchange: Exchange, answered: Answered, slot: Slot, wanted: Wanted
    ) -> None:
        """Send the answer, binary data out of the arena; one with long JSON is written by the
        helper."""
        started = perf_counter()
        parts: Sequence[Part]
        if len(answered.image) > INLINE_BYTES and wanted.has_text:
            parts, json_bytes = await self.spell(model, answered, slot, wanted)
        else:
            parts, json_bytes = answer_parts(model.name, answered.image, wanted)
        *stages, encode = answered.stages
        exchange.stages = (*stages, encode + perf_counter() - started)
        answer(self.door, exchange, 200, headers(json_bytes), parts)
        if sum(map(len, parts)) <= JOIN_BYTES:
            self.door.give_back(slot)

    async def spell(
        self, model: Model, answered: Answered, slot: Slot, wanted: Wanted
    ) -> tuple[list[Part], int]:
        """The answer with tensors spelled out, and how much of it is JSON."""
        given = {"model": model.name, "wanted": asdict(wanted)}
        limit = self.limits.max_json_bytes
        written, size, told = await self.door.helper.inference_of_image(
            slot, len(answered.image), limit, given
        )
        if written is None:
            raise self.too_long(size)
        return [written.view(size)], told["json_bytes"]


def lay_head(call: Call, body: memoryview, end: int) -> int:
    """Write the image's header in the place of the JSON, so that the tensors stay where they came;
    the image's length, or 0 when that is not possible. `end` is the JSON's end in the slot."""
    at = begin = end
    for index, one in enumerate(call.tensors):
        if one.offset is None:
            return 0
        if not index:
            at = begin = end + one.offset
        elif end + one.offset != at:
            return 0
        at += len(one.data)
    length = len(call.head)
    if length > begin:
        return 0
    body[:8] = (begin - 8).to_bytes(8, "little")
    body[8:length] = call.head[8:]
    body[length:begin] = b" " * (begin - length)
    return at


def headers(json_bytes: int) -> Headers:
    """What tells a client how to read the answer."""
    if not json_bytes:
        return [(b"content-type", JSON.encode())]
    return [
        (b"content-type", OCTETS.encode()),
        (LENGTH_HEADER.lower().encode(), b"%d" % json_bytes),
    ]
