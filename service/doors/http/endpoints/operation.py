"""The endpoint of one path's operations: the request's image to the engine, its answer back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from attnd.wire.dtypes import Part

from service.doors.http.endpoints.problems import wrong_method
from service.doors.http.endpoints.responses import (
    EXCHANGE,
    Receive,
    Scope,
    Send,
    answer,
    read_body,
)
from service.doors.http.protocol.exchange import JSON, SAFETENSORS, Exchange
from service.doors.kit.problems import ProblemText
from service.errors import AnswerTooLarge, AttndError, Internal, MalformedBody
from service.image.json_body import fields_text_of_image, image_of_json, json_of_image
from service.image.json_text import dump_json
from service.image.path_fields import placing_fields
from service.image.reading import REQUEST
from service.image.writing import PROBLEM, header
from service.operations.schema.query import query_values
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door

JOIN_BYTES: Final = 64 * 2**10
"""Answers up to this length are copied, and leave the arena at once."""
INLINE_BYTES: Final = 16 * 2**10
"""JSON and images up to this length are turned into each other here, longer ones by the helper."""
JSON_GROWTH: Final = 13
"""At most so many characters become of one byte: a BF16 takes 2 bytes, or 25 characters."""
LESS_JSON: Final = "ask for less at once, or raise server.max_json_bytes"
AS_SAFETENSORS: Final = f"send `Accept: {SAFETENSORS}`, {LESS_JSON}"
CONTENT_TYPES: Final = {name: (b"content-type", name.encode()) for name in (SAFETENSORS, JSON)}


class PathEndpoint:
    """ASGI: all operations of one path, by method; then those on its namesake, by other methods."""

    __slots__ = ("allow", "by_method", "given")

    def __init__(
        self,
        door: Door,
        operations: Sequence[Operation],
        namesake: Sequence[tuple[Operation, dict[str, str]]] = (),
    ) -> None:
        self.by_method: dict[str, Caller] = {one.method: Caller(door, one) for one in operations}
        self.given: dict[str, str] = {}
        for one, given in namesake:
            self.by_method.setdefault(one.method, Caller(door, one))
            self.given = given
        if "GET" in self.by_method:
            self.by_method["HEAD"] = self.by_method["GET"]
        self.allow = sorted(self.by_method)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        caller = self.by_method.get(exchange.method)
        if caller is None:
            raise wrong_method(exchange, self.allow)
        params = scope["path_params"]
        if self.given and caller.operation.path_names:
            params = self.given
        await caller.run(exchange, params)


class Caller:
    """Calls one operation for HTTP requests."""

    __slots__ = ("door", "has_body", "has_tensors", "limits", "media", "operation")

    def __init__(self, door: Door, operation: Operation) -> None:
        self.door = door
        self.operation = operation
        self.limits = door.limits
        self.has_body = operation.has_body
        self.has_tensors = operation.has_tensors
        self.media = (SAFETENSORS, JSON) if operation.has_tensors else (JSON,)

    async def run(self, exchange: Exchange, params: Mapping[str, Any]) -> None:
        """One request; raises whatever it deserves."""
        operation = self.operation
        exchange.op = operation.name
        given = self.given(exchange, params)
        media = exchange.media_type(self.media) if self.has_body else JSON
        self.door.ready()
        if exchange.said.deadline is not None:
            exchange.read_deadline()
        if media == SAFETENSORS:
            request, length = await read_body(self.door, exchange, self.limits.max_body_bytes)
        else:
            request, length = await self.read_json(exchange, given)
        if request is None:
            raise MalformedBody("0 bytes: a safetensors body has at least 8")
        if media == SAFETENSORS and given:
            request, length = await self.with_fields(exchange, request, length, given)
        to_json = not self.has_tensors or exchange.answer_type(media) == JSON
        too_long = self.too_long_as_json if to_json else None
        answered, slot = await ask(self.door, exchange, operation, (request, length), too_long)
        if operation.answer is None:
            self.door.give_back(slot)
            answer(self.door, exchange, answered.status, [], [])
        elif to_json:
            await self.answer_json(exchange, answered, slot)
        else:
            self.answer_image(exchange, answered, slot)

    def given(self, exchange: Exchange, params: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that path and query give."""
        query = exchange.query
        if not query:
            return dict(params)
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        return {**query_values(self.operation, pairs), **params}

    async def with_fields(
        self, exchange: Exchange, request: Slot, length: int, given: dict[str, Any]
    ) -> tuple[Slot, int]:
        """A safetensors body with the path's fields in its header, in a slot of its own."""
        body = exchange.body
        if body is None:
            raise Internal("a request was read after its answer: this is a bug")
        parts = await self.door.long_work.do(placing_fields(request.view(length), given))
        slot, length = await self.door.link.lay(parts)
        body.take_over(slot, self.door)
        return slot, length

    async def read_json(self, exchange: Exchange, given: dict[str, Any]) -> tuple[Slot, int]:
        """The image of a request in JSON, or of one without a body; its slot is the exchange's."""
        door, body = self.door, exchange.body
        if body is None:
            raise Internal("a request was read after its answer: this is a bug")
        if self.has_body:
            limit = min(self.limits.max_json_bytes, self.limits.max_body_bytes)
            text, length = await read_body(door, exchange, limit)
            if text is not None and length > INLINE_BYTES:
                slot, length = await door.helper.image_of_json(text, length, given)
                body.take_over(slot, door)
                return slot, length
            parts = image_of_json(b"" if text is None else bytes(text.view(length)), given)
        else:
            parts = [header(REQUEST, dump_json(given), ())]
        slot, length = await door.link.lay(parts)
        body.take_over(slot, door)
        return slot, length

    def too_long_as_json(self, size: int) -> AttndError:
        """The answer is longer than JSON may be, or would be; `size` is its own or its image's."""
        remedy = AS_SAFETENSORS if self.operation.has_tensors else LESS_JSON
        return AnswerTooLarge(size, self.limits.max_json_bytes, remedy)

    def answer_image(self, exchange: Exchange, answered: Answered, slot: Slot) -> None:
        """Send the image: as a copy when it is short, else out of the arena, whose slot is free
        when the last of its bytes has gone."""
        headers = [CONTENT_TYPES[SAFETENSORS]]
        answer(self.door, exchange, answered.status, headers, [answered.image])
        if len(answered.image) <= JOIN_BYTES:
            self.door.give_back(slot)

    async def answer_json(self, exchange: Exchange, answered: Answered, slot: Slot) -> None:
        """Send the image as JSON; a long one is written by the helper."""
        started = perf_counter()
        limit, length = self.limits.max_json_bytes, len(answered.image)
        part: Part = b""
        try:
            if length <= INLINE_BYTES:
                part = json_of_image(answered.image)
                size = len(part)
            else:
                written, size = await self.door.helper.json_of_image(slot, length, limit)
                if written is not None:
                    self.door.link.answers.count(exchange.tenant.namespace, written)
                    part = written.view(size)
        finally:
            self.door.give_back(slot)
        if size > limit:
            raise self.too_long_as_json(size)
        *stages, encode = answered.stages
        exchange.stages = (*stages, encode + perf_counter() - started)
        answer(self.door, exchange, answered.status, [CONTENT_TYPES[JSON]], [part])


async def ask(
    door: Door,
    exchange: Exchange,
    operation: Operation,
    request: tuple[Slot, int],
    too_long: Callable[[int], AttndError] | None,
) -> tuple[Answered, Slot]:
    """The engine's answer to a request's image, and the slot that it lies in.

    `too_long` makes the error for an answer of so many bytes that is too long as JSON; None where
    it is not to be JSON. Raises ProblemText for what the engine refuses.
    """
    most = door.limits.max_answer_bytes
    if too_long is not None:
        most = min(most, most_as_json(operation, door.limits.max_json_bytes))
    try:
        answered, slot = await door.link.call(
            operation,
            *request,
            most,
            exchange.deadline_us,
            exchange.call_id,
            exchange.tenant,
        )
    except AnswerTooLarge as error:
        if too_long is not None and most < door.limits.max_answer_bytes:
            raise too_long(error.extra["size"]) from None
        raise
    exchange.stages = answered.stages
    if answered.status >= 400:
        door.give_back(slot)
        raise ProblemText(fields_text_of_image(answered.image, PROBLEM))
    return answered, slot


def most_as_json(operation: Operation, limit: int) -> int:
    """The longest answer, as an image, that may be asked of the engine for JSON of `limit` bytes.

    The JSON may be longer than the image. Where the pool may have been changed it is too late to
    find that out afterwards, so as much is allowed as fits in any case; of what is only read, as
    much as may fit, and the text decides.
    """
    may_change = bool(operation.takes and operation.gives)
    return limit // JSON_GROWTH if may_change else 2 * limit
