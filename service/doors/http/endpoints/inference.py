"""The endpoint of inference requests (Open Inference Protocol v2): a model's call to the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from attnd.wire.dtypes import Part

from service.doors.http.endpoints.operation import INLINE_BYTES, JOIN_BYTES, LESS_JSON, call_engine
from service.doors.http.endpoints.responses import NO_PARAMS, read_body, respond
from service.doors.http.long_json import GROWTH
from service.doors.http.protocol.exchange import CONTENT_TYPES, Exchange
from service.doors.http.protocol.heads import MAX_DIGITS
from service.doors.kit.headers import JSON, OCTETS
from service.doors.oip.answer import answer_parts, wanted_of
from service.doors.oip.json_request import Requests
from service.doors.oip.models import MODELS, Model, model_of
from service.doors.oip.request import Call, Wanted
from service.errors import AnswerTooLarge, BodyTooLarge, InvalidRequest, MalformedBody
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door
    from service.doors.http.protocol.bodies import Body

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
BINARY_HEADERS: Final = f"content-type: {OCTETS}\r\n{LENGTH_HEADER.lower()}: ".encode()
AS_BINARY: Final = f"request binary outputs (binary_data_output), {LESS_JSON}"


class InferenceEndpoint:
    """Inference with the model that the path names."""

    def __init__(self, door: Door) -> None:
        requests = Requests()
        self.by_model = {
            name: ModelEndpoint(door, model, requests) for name, model in MODELS.items()
        }

    async def run(self, exchange: Exchange, params: Mapping[str, Any]) -> None:
        model = model_of(params["model"], params.get("version", ""))
        await self.by_model[model.name].run(exchange, NO_PARAMS)


class ModelEndpoint:
    def __init__(self, door: Door, model: Model, requests: Requests) -> None:
        self.door = door
        self.limits = door.limits
        self.model = model
        self.requests = requests

    async def run(self, exchange: Exchange, params: Mapping[str, Any]) -> None:
        """One request; raises the matching AttndError."""
        door, model, headers = self.door, self.model, exchange.headers
        operation = model.operation
        exchange.op = operation.name
        if headers.content_encoding:
            exchange.check_encoding()
        door.link.ready()
        if headers.deadline is not None:
            exchange.read_deadline()
        received, length = await read_body(
            door, exchange, self.limits.max_body_bytes, has_lead=True
        )
        body = exchange.body
        if received is None or body is None:
            raise MalformedBody("0 bytes: an inference request is a JSON object")
        json_bytes = length
        if headers.inference_header or length > self.limits.max_json_bytes:
            json_bytes = self.json_bytes(headers.inference_header, length)
        if json_bytes > INLINE_BYTES:
            slot, length, wanted = await self.read_long(
                exchange, body, received, length, json_bytes
            )
        else:
            view = received.view(body.lead + length)
            end = body.lead + json_bytes
            call = self.requests.read(model, bytes(view[body.lead : end]), view[end:])
            slot, wanted = received, call.wanted
            length = write_head(call, view, end)
            if not length:
                slot, length = door.link.arena.lay(call.pieces(view[end:]))
                body.take_over(slot, door)
        if wanted.deadline_us:
            own_us = exchange.deadline_us or wanted.deadline_us
            exchange.deadline_us = min(own_us, wanted.deadline_us)
        has_text = wanted.has_text
        too_long = None if operation.gives and not has_text else self.too_long
        answered, slot = await call_engine(door, exchange, operation, slot, length, too_long)
        started = time.perf_counter()
        parts: Sequence[Part]
        if has_text and len(answered.image) > INLINE_BYTES:
            parts, json_bytes = await self.write_long(exchange, slot, len(answered.image), wanted)
        else:
            parts, json_bytes = answer_parts(operation.name, answered.image, wanted)
        *stages, encode = answered.stages
        exchange.stages = (*stages, encode + time.perf_counter() - started)
        content = b"%b%d\r\n" % (BINARY_HEADERS, json_bytes) if json_bytes else CONTENT_TYPES[JSON]
        respond(door, exchange, 200, content, parts)
        if sum(map(len, parts)) <= JOIN_BYTES:
            door.link.arena.give_back(slot)

    def json_bytes(self, digits: bytes, length: int) -> int:
        """The length of the body's JSON: that of the header's `digits`, or the whole body's. Raises
        InvalidRequest, BodyTooLarge."""
        if digits:
            if not digits.isdigit() or len(digits) > MAX_DIGITS or int(digits) > length:
                rule = f"must be a count of at most the body's {length} bytes"
                raise InvalidRequest(LENGTH_HEADER, digits.decode("latin-1"), rule)
            length = int(digits)
        limit = self.limits.max_json_bytes
        if length > limit:
            text = f"the JSON is {length} bytes, the limit is {limit}: send tensors as binary data"
            raise BodyTooLarge(text, size=length, limit=limit)
        return length

    async def read_long(
        self, exchange: Exchange, body: Body, received: Slot, length: int, json_bytes: int
    ) -> tuple[Slot, int, Wanted]:
        """As `Requests.read`, in the worker process; the image gets another slot."""
        begin, end = body.lead, body.lead + json_bytes
        given = {"model": self.model.name, "begin": begin, "end": end}
        most = begin + length + GROWTH * json_bytes
        slot, length, wanted = await self.door.long_json.image_of(
            "image_of_inference",
            received,
            begin + length,
            most,
            given,
            exchange.tenant.namespace,
        )
        body.take_over(slot, self.door)
        return slot, length, wanted_of(wanted)

    def too_long(self, size: int) -> AnswerTooLarge:
        return AnswerTooLarge(size, self.limits.max_json_bytes, AS_BINARY)

    async def write_long(
        self, exchange: Exchange, image: Slot, length: int, wanted: Wanted
    ) -> tuple[list[Part], int]:
        """As `answer_parts`, in the worker process."""
        given = {"model": self.model.name, "wanted": asdict(wanted)}
        written, size, found = await self.door.long_json.json_of(
            "inference_of_image", image, length, given, exchange.tenant.namespace
        )
        if written is None:
            raise self.too_long(size)
        return [written.view(size)], found["json_bytes"]


def write_head(call: Call, body: memoryview, end: int) -> int:
    """Write the image's header over the JSON, so that the tensors stay where they were received.
    `end` is the end of the JSON in the slot. Returns the image's length, 0 if there is no room."""
    if call.span is None:
        return 0
    begin, stop = end + call.span[0], end + call.span[1]
    length = len(call.head)
    if length > begin:
        return 0
    body[:8] = (begin - 8).to_bytes(8, "little")
    body[8:length] = call.head[8:]
    body[length:begin] = b" " * (begin - length)
    return stop
