"""The endpoint of an operation: the request's image to the engine, its reply back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from attnd.wire.dtypes import Part
from attnd.wire.images import PROBLEM, header

from service.doors.http.endpoints.responses import read_body, respond
from service.doors.http.long_json import JSON_GROWTH
from service.doors.http.protocol.exchange import CONTENT_TYPES, Exchange
from service.doors.kit.headers import JSON, SAFETENSORS, call_id_of
from service.doors.kit.problems import ProblemText
from service.errors import AnswerTooLarge, AttndError, Internal, MalformedBody, unknown_name
from service.image.json_body import (
    fields_text_of_image,
    image_of_json,
    json_of_image,
    placing_fields,
)
from service.image.json_text import dump_json
from service.image.reading import REQUEST
from service.operations.schema.fields import refuse
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door

JOIN_BYTES: Final = 64 * 2**10
"""Replies up to this length are copied, and leave the arena at once."""
INLINE_BYTES: Final = 16 * 2**10
"""JSON and images up to this length are converted here, longer ones in the worker process."""
LESS_JSON: Final = "request less per call, or raise server.max_json_bytes"
AS_SAFETENSORS: Final = f"send `Accept: {SAFETENSORS}`, {LESS_JSON}"


class OperationEndpoint:
    """Calls one operation for HTTP requests."""

    def __init__(self, door: Door, operation: Operation) -> None:
        self.door = door
        self.operation = operation
        self.limits = door.limits
        self.has_body = operation.has_body
        self.has_tensors = operation.has_tensors
        self.media = (SAFETENSORS, JSON) if operation.has_tensors else (JSON,)

    async def run(self, exchange: Exchange, params: Mapping[str, Any]) -> None:
        """One request; raises the matching AttndError."""
        operation, headers, door = self.operation, exchange.headers, self.door
        exchange.op = operation.name
        given = params if not exchange.query else self.given(exchange, params)
        media = headers.media_type if self.has_body else JSON
        if self.has_body and (media not in self.media or headers.content_encoding):
            exchange.check_media_type(self.media)
        door.link.ready()
        if headers.deadline is not None:
            exchange.read_deadline()
        if media == SAFETENSORS:
            request, length = await read_body(door, exchange, self.limits.max_body_bytes)
            if request is None:
                raise MalformedBody("0 bytes: a safetensors body has at least 8")
            if given:
                request, length = await self.with_fields(exchange, request, length, given)
        else:
            request, length = await self.read_json(exchange, given)
        to_json = not self.has_tensors or (headers.accepted or media) == JSON
        too_long = self.too_long_as_json if to_json else None
        answered, slot = await call_engine(door, exchange, operation, request, length, too_long)
        if operation.answer is None:
            door.link.arena.give_back(slot)
            respond(door, exchange, answered.status, b"", ())
        elif to_json:
            await self.respond_json(exchange, answered, slot)
        else:
            image, content_type = answered.image, CONTENT_TYPES[SAFETENSORS]
            respond(door, exchange, answered.status, content_type, (image,))
            if len(image) <= JOIN_BYTES:  # it was copied; else its slot frees itself, once sent
                door.link.arena.give_back(slot)

    def given(self, exchange: Exchange, params: Mapping[str, Any]) -> dict[str, Any]:
        pairs = parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True)
        return {**query_values(self.operation, pairs), **params}

    async def with_fields(
        self, exchange: Exchange, request: Slot, length: int, given: Mapping[str, Any]
    ) -> tuple[Slot, int]:
        """A safetensors body with the path's fields in its header, in another slot."""
        placing = placing_fields(request.view(length), dict(given))
        parts = await self.door.long_work.do(placing, exchange.tenant.namespace)
        slot, length = self.door.link.arena.lay(parts)
        return self.taken_over(exchange, slot), length

    def taken_over(self, exchange: Exchange, slot: Slot) -> Slot:
        """The slot, which the exchange holds from now on in place of its body's."""
        if exchange.body is None:
            raise Internal("a request was read after its response: this is a bug")
        exchange.body.take_over(slot, self.door)
        return slot

    async def read_json(self, exchange: Exchange, given: Mapping[str, Any]) -> tuple[Slot, int]:
        """The image of a request in JSON, or of one without a body, in a slot of the exchange."""
        door = self.door
        if self.has_body:
            limit = min(self.limits.max_json_bytes, self.limits.max_body_bytes)
            text, length = await read_body(door, exchange, limit)
            if text is not None and length > INLINE_BYTES:
                namespace = exchange.tenant.namespace
                slot, length = await door.long_json.image_of(text, length, given, namespace)
                return self.taken_over(exchange, slot), length
            parts = image_of_json(b"" if text is None else bytes(text.view(length)), dict(given))
        else:
            parts = [header(REQUEST, dump_json(given), ())]
        slot, length = door.link.arena.lay(parts)
        return self.taken_over(exchange, slot), length

    def too_long_as_json(self, size: int) -> AttndError:
        """The error for a reply that is too long as JSON; `size` is its length, or its image's."""
        remedy = AS_SAFETENSORS if self.operation.has_tensors else LESS_JSON
        return AnswerTooLarge(size, self.limits.max_json_bytes, remedy)

    async def respond_json(self, exchange: Exchange, answered: Answered, slot: Slot) -> None:
        started = time.perf_counter()
        limit, length = self.limits.max_json_bytes, len(answered.image)
        part: Part = b""
        try:
            if length <= INLINE_BYTES:
                part = json_of_image(answered.image)
                size = len(part)
            else:
                namespace = exchange.tenant.namespace
                written, size = await self.door.long_json.json_of(slot, length, namespace)
                if written is not None:
                    part = written.view(size)
        finally:
            self.door.link.arena.give_back(slot)
        if size > limit:
            raise self.too_long_as_json(size)
        *stages, encode = answered.stages
        exchange.stages = (*stages, encode + time.perf_counter() - started)
        respond(self.door, exchange, answered.status, CONTENT_TYPES[JSON], (part,))


async def call_engine(
    door: Door,
    exchange: Exchange,
    operation: Operation,
    request: Slot,
    length: int,
    too_long: Callable[[int], AttndError] | None,
) -> tuple[Answered, Slot]:
    """The engine's reply to a request's image, and its slot.

    For a response in JSON, `too_long` makes the error for a reply of that size; else it is
    None. Raises ProblemText for an error of the engine.
    """
    most = door.limits.max_answer_bytes
    if too_long is not None:
        most = min(most, max_image_bytes(operation, door.limits.max_json_bytes))
    try:
        answered, slot = await door.link.call(
            operation,
            request,
            length,
            most,
            exchange.deadline_us,
            call_id_of(exchange.request_id),
            exchange.tenant,
        )
    except AnswerTooLarge as error:
        if too_long is not None and most < door.limits.max_answer_bytes:
            raise too_long(error.extra["size"]) from None
        raise
    exchange.stages = answered.stages
    if answered.status >= 400:
        door.link.arena.give_back(slot)
        raise ProblemText(fields_text_of_image(answered.image, PROBLEM))
    return answered, slot


def max_image_bytes(operation: Operation, limit: int) -> int:
    """The longest image that may become JSON of `limit` bytes, which may be longer than the image.

    For an operation that changes the pool, an error after the call would be too late: the JSON of
    every image of that length fits. For an operation that only reads, the JSON itself is checked.
    """
    may_change = bool(operation.takes and operation.gives)
    return limit // JSON_GROWTH if may_change else 2 * limit


def query_values(operation: Operation, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The fields of a query's decoded names and values; raises `InvalidRequest`.

    Converts numbers, `true` and `false`; the fields' own rules check the values.
    """
    values: dict[str, Any] = {}
    for name, text in pairs:
        if not operation.query_names:
            refuse("query", f"{name}={text}", "this route takes no parameters")
        if name not in operation.query_names:
            raise unknown_name(name, text, "this route", "parameter", operation.query_names)
        if name in values:
            refuse(name, text, "is given twice")
        values[name] = value(operation.fields.model_fields[name].annotation, text)
    return values


def value(kind: Any, text: str) -> int | bool | str:
    """The text converted for a field of type `kind`; the text itself if it cannot be."""
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    return number(text) if kind is int else text


def number(text: str) -> int | str:
    """The integer of at most 18 digits that the text denotes, or the text."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else text
