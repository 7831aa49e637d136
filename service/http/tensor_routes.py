"""The tensor routes: raw ASGI, because on this path every tenth of a millisecond counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any, Final

from config.settings import ServerSettings
from service import schemas
from service.engine.engine import Engine
from service.engine.operations import Operation, Reply, ServiceInfo
from service.errors import InvalidRequest, MalformedBody, MethodNotAllowed, NotReady
from service.http import answers, building
from service.http.bodies import (
    JSON,
    MAX_JSON_BYTES,
    SAFETENSORS,
    answer_type,
    media_type,
    read_body,
)
from service.http.exchange import CLIENT_GONE, ClientGone, Exchange, Receive, Scope, Send
from service.http.ledger import Ledger
from service.http.sending import respond, respond_problem, submit
from service.json_tensors import read_tensors, write_tensors
from service.wire import (
    Body,
    Layout,
    Part,
    Tensors,
    dump_json,
    load_json,
    place,
    read_layout,
    split,
    write_safetensors,
)

REMEMBERED_BYTES: Final = 16 * 2**10
"""Longest header that is remembered: bounds what 256 of them can hold."""


@dataclass(frozen=True, slots=True)
class TensorRoute:
    """One route: its fields, how they become an operation, and how the answer is told."""

    op: str
    fields: type[schemas.Fields]
    build: Callable[[Any, Tensors, ServiceInfo], Operation]
    tell: Callable[[Any], answers.Told]
    answer: type[schemas.Fields]


ROUTES: Final[dict[str, TensorRoute]] = {
    "/v1/append": TensorRoute(
        "append",
        schemas.AppendFields,
        building.build_append,
        answers.tell_appended,
        schemas.AppendAnswer,
    ),
    "/v1/decode": TensorRoute(
        "decode",
        schemas.DecodeFields,
        building.build_decode,
        answers.tell_attended,
        schemas.AttentionAnswer,
    ),
    "/v1/prefill": TensorRoute(
        "prefill",
        schemas.PrefillFields,
        building.build_prefill,
        answers.tell_attended,
        schemas.AttentionAnswer,
    ),
    "/v1/ragged-prefill": TensorRoute(
        "ragged_prefill",
        schemas.RaggedPrefillFields,
        building.build_ragged_prefill,
        answers.tell_attended,
        schemas.AttentionAnswer,
    ),
    "/v1/cascade": TensorRoute(
        "cascade",
        schemas.CascadeFields,
        building.build_cascade,
        answers.tell_attended,
        schemas.AttentionAnswer,
    ),
    "/v1/merge": TensorRoute(
        "merge",
        schemas.MergeFields,
        building.build_merge,
        answers.tell_merged,
        schemas.MergeAnswer,
    ),
    "/v1/gather": TensorRoute(
        "gather",
        schemas.GatherFields,
        building.build_gather,
        answers.tell_gathered,
        schemas.GatherAnswer,
    ),
}


class TensorRoutes:
    """Answers the requests to `ROUTES`."""

    def __init__(self, engine: Engine, ledger: Ledger, server: ServerSettings) -> None:
        self.engine = engine
        self.ledger = ledger
        self.deadline_s = server.deadline_s
        self.limits = {
            SAFETENSORS: server.max_body_bytes,
            JSON: min(server.max_body_bytes, MAX_JSON_BYTES),
        }

    async def answer(self, route: TensorRoute, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, from its head to its log line."""
        exchange = Exchange(scope, route.op)
        status, code = 200, "ok"
        try:
            content_type, parts = await self.run(route, exchange, receive)
        except ClientGone:
            status, code = CLIENT_GONE, "client_gone"
        except Exception as error:
            status, code = await respond_problem(send, exchange, error)
        else:
            await respond(send, exchange, status, content_type.encode(), parts)
        self.ledger.add(exchange, status, code)

    async def run(
        self, route: TensorRoute, exchange: Exchange, receive: Receive
    ) -> tuple[str, list[Part]]:
        """The answer as media type and body; raises whatever the request deserves."""
        if exchange.method != "POST":
            raise MethodNotAllowed(f"{exchange.method} {exchange.path}: use POST", allow=["POST"])
        if exchange.query:
            told = exchange.query.decode("latin-1")
            raise InvalidRequest("query", told, "this route takes no query parameters")
        given = media_type(exchange, SAFETENSORS, JSON)
        if self.engine.state != "ready":
            raise NotReady(self.engine.reason)
        body = await read_body(receive, exchange, self.limits[given])
        read = read_binary if given == SAFETENSORS else read_json
        fields, tensors = read(route.fields, body)
        operation = route.build(fields, tensors, self.engine.info)
        reply = await submit(self.engine, operation, exchange, receive, self.deadline_s)
        return encode(route, reply, answer_type(exchange, given))


def read_binary(model: type[schemas.Fields], body: Body) -> tuple[schemas.Fields, Tensors]:
    """Fields and tensors of a safetensors body."""
    header, start = split(body)
    read = read_head if len(header) <= REMEMBERED_BYTES else read_head.__wrapped__
    fields, layout = read(model, header, len(body) - start)
    return fields, place(body, start, layout)


@lru_cache(maxsize=256)
def read_head(
    model: type[schemas.Fields], header: bytes, room: int
) -> tuple[schemas.Fields, Layout]:
    """Fields and layout of a header. Steps repeat theirs byte for byte, so they are remembered."""
    layout = read_layout(header, room)
    return schemas.validate(model, layout.fields), layout


def read_json(model: type[schemas.Fields], body: Body) -> tuple[schemas.Fields, Tensors]:
    """Fields and `tensors` of a JSON body."""
    fields = load_json(bytes(body), "the body")
    if not isinstance(fields, dict):
        raise MalformedBody("the body is not a JSON object")
    tensors = read_tensors(fields.pop("tensors", {}))
    return schemas.validate(model, fields), tensors


def encode(route: TensorRoute, reply: Reply, content_type: str) -> tuple[str, list[Part]]:
    """The answer in the media type asked for; the time it takes is added to the timings."""
    started = perf_counter()
    fields, tensors = route.tell(reply.answer)
    parts: list[Part]
    if content_type == SAFETENSORS:
        parts = write_safetensors(dump_json(fields), tensors)
    else:
        told = fields | {"tensors": write_tensors(tensors)} if tensors else fields
        parts = [dump_json(told).encode()]
    reply.timings.encode += perf_counter() - started
    return content_type, parts
