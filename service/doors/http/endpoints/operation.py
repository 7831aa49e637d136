"""The endpoint of an operation: the request's image to the engine, its reply back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

from attnd.wire.bounds import MAX_JSON_BYTES
from attnd.wire.dtypes import Part
from attnd.wire.images import PROBLEM, header

from service.doors.http.door import Door
from service.doors.http.endpoints.responses import CONTENT_TYPES, Header, respond
from service.doors.http.exchange import Exchange
from service.doors.http.receiving import read_body
from service.doors.kit.headers import JSON, SAFETENSORS, call_id_of
from service.doors.kit.link import LESS
from service.doors.kit.problems import ProblemText
from service.errors import AnswerTooLarge, Internal, MalformedBody, unknown_name
from service.image.json_body import (
    MAX_JSON_IMAGE_BYTES,
    fields_text_of_image,
    image_of_json,
    json_of_image,
    with_fields,
)
from service.image.json_text import dump_json
from service.image.reading import REQUEST
from service.operations.schema.fields import refuse
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

COPY_BYTES: Final = 64 * 2**10
"""Replies up to this length are copied, and leave the arena at once."""
MAX_FIELDS_BYTES: Final = 8 * 2**20
"""Longest image without tensors that becomes JSON."""
AS_SAFETENSORS: Final = f"send `Accept: {SAFETENSORS}`, or request less per call"


class OperationEndpoint:
    """Calls one operation for HTTP requests."""

    def __init__(self, door: Door, operation: Operation) -> None:
        self.door = door
        self.operation = operation
        self.limits = door.limits
        self.has_body = operation.has_body
        self.has_tensors = operation.has_tensors
        self.media = (SAFETENSORS, JSON) if operation.has_tensors else (JSON,)
        most = MAX_JSON_IMAGE_BYTES if operation.gives else MAX_FIELDS_BYTES
        self.most_as_json = min(most, door.limits.max_answer_bytes)
        """Longest image that becomes JSON."""
        self.less = AS_SAFETENSORS if operation.has_tensors else LESS

    async def run(self, exchange: Exchange, params: Mapping[str, Any]) -> None:
        """One request; raises the matching AttndError."""
        operation, door = self.operation, self.door
        exchange.op = operation.name
        given = params if not exchange.query else self.given(exchange, params)
        media = exchange.media_type if self.has_body else JSON
        if self.has_body and (media not in self.media or exchange.content_encoding):
            exchange.check_media_type(self.media)
        door.link.ready()
        if exchange.deadline is not None:
            exchange.read_deadline()
        if media == SAFETENSORS:
            length = await read_body(door, exchange, self.limits.max_body_bytes)
            if length == 0:
                raise MalformedBody("0 bytes: a safetensors body has at least 8")
            if given:
                length = self.replace_image(
                    exchange, with_fields(image_of(exchange, length), given)
                )
        else:
            length = await self.read_json(exchange, given)
        if exchange.connection is None:
            exchange.watch()
        to_json = not self.has_tensors or (exchange.accepted or media) == JSON
        answered, slot = await self.call(exchange, length, to_json)
        image = answered.image
        if operation.answer is None:
            body: Part = b""
            headers: tuple[Header, ...] = ()
        elif to_json:
            started = time.perf_counter()
            body, headers = json_of_image(image), (CONTENT_TYPES[JSON],)
            if door.authenticator is not None:
                body = door.link.arena.answers.counted(exchange.tenant.namespace, body)
            *stages, encode = answered.stages
            exchange.stages = (*stages, encode + time.perf_counter() - started)
        else:
            headers = (CONTENT_TYPES[SAFETENSORS],)
            body = bytes(image) if len(image) <= COPY_BYTES else image
        if body is not image:  # else the slot frees itself, once it is sent
            door.link.arena.give_back(slot)
        await respond(door, exchange, answered.status, headers, body)

    def given(self, exchange: Exchange, params: Mapping[str, Any]) -> dict[str, Any]:
        pairs = parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True)
        return {**query_values(self.operation, pairs), **params}

    def replace_image(self, exchange: Exchange, parts: Sequence[Part]) -> int:
        """Put a request's image into the exchange's slot, in place of its body; its length."""
        slot, length = self.door.link.arena.lay(parts)
        if exchange.slot is not None:
            self.door.link.arena.give_back(exchange.slot)
        exchange.slot = slot
        return length

    async def read_json(self, exchange: Exchange, given: Mapping[str, Any]) -> int:
        """Put the image of a request in JSON, or of one without a body, into the exchange's slot;
        returns its length."""
        if not self.has_body:
            return self.replace_image(exchange, [header(REQUEST, dump_json(given), ())])
        length = await read_body(
            self.door, exchange, min(MAX_JSON_BYTES, self.limits.max_body_bytes)
        )
        text = bytes(image_of(exchange, length))
        return self.replace_image(exchange, image_of_json(text, dict(given)))

    async def call(self, exchange: Exchange, length: int, to_json: bool) -> tuple[Answered, Slot]:
        """The engine's reply to the exchange's image, and its slot. Raises ProblemText for an error
        of the engine, and AnswerTooLarge before anything is changed."""
        link, operation = self.door.link, self.operation
        most = self.most_as_json if to_json else self.limits.max_answer_bytes
        if exchange.slot is None:
            raise Internal("a call without an image: this is a bug")
        try:
            answered, slot = await link.call(
                operation,
                exchange.slot,
                length,
                most,
                exchange.deadline_us,
                call_id_of(exchange.request_id),
                exchange.tenant,
            )
        except AnswerTooLarge as error:
            if not to_json:
                raise
            raise AnswerTooLarge(error.extra["size"], most, self.less) from None
        exchange.stages = answered.stages
        if answered.status >= 400:
            link.arena.give_back(slot)
            raise ProblemText(fields_text_of_image(answered.image, PROBLEM))
        return answered, slot


def image_of(exchange: Exchange, length: int) -> memoryview:
    """The exchange's body as received."""
    return memoryview(b"") if exchange.slot is None else exchange.slot.view(length)


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
