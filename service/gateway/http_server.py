"""The protocol over HTTP: an ASGI application."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any, Final

from attnd.wire.images import flat

from service.doors.kit.asgi import Receive, read_whole, send_whole, unless_gone
from service.doors.kit.headers import DEADLINE, JSON, OCTETS, PROBLEM, deadline_us_of
from service.doors.kit.hosts import HostRule
from service.doors.kit.ledger import GatewayRequest
from service.doors.kit.problems import problem_headers
from service.doors.kit.upstream import EngineReply
from service.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NoSuchRoute,
    NotReady,
    UnsupportedMediaType,
)
from service.gateway.gateway import OPEN_METHODS, Gateway, RefusedRequest
from service.gateway.models import VERSION, Model, model_of
from service.gateway.requests import Inference, parameters_of, read_json
from service.gateway.upstream import Caller
from service.image.json_tensors import write_data
from service.image.json_text import dump_json

MAX_JSON_BYTES: Final = 2**20
LENGTH: Final = "Inference-Header-Content-Length"
ROUTE: Final = re.compile(
    "/v2(|/health/live|/health/ready|/repository/index)"
    "|/v2/models/([^/]+)(?:/versions/([^/]+))?(|/infer|/ready|/config)"
)
METHODS: Final = {
    "": "ServerMetadata",
    "/health/live": "ServerLive",
    "/health/ready": "ServerReady",
    "/repository/index": "RepositoryIndex",
}
MODEL_METHODS: Final = {
    "": "ModelMetadata",
    "/infer": "ModelInfer",
    "/ready": "ModelReady",
    "/config": "ModelConfig",
}
"""Methods by the end of the service's paths, and of a model's."""
WHOLE: Final = {"ModelConfig": "config", "RepositoryIndex": "models"}
"""Members that are the whole page over HTTP."""
Answer = tuple[bytes, dict[str, str]]
"""A response's body and headers."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request without its body; of a header that is repeated the last one counts."""

    scope: Any
    headers: dict[str, str]
    receive: Receive


class OipApplication:
    """The ASGI application of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.host_rule = HostRule(gateway.settings)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = scope["headers"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in given}
        peer = ":".join(map(str, scope.get("client") or ("unix",)))
        record = GatewayRequest.begin(scope["method"], scope["path"], peer, headers.get)
        has_left = False

        async def received() -> Any:
            nonlocal has_left
            message = await receive()
            has_left |= message["type"] == "http.disconnect"
            return message

        try:
            request = HttpRequest(scope, headers, received)
            await self.gateway.run(record, lambda: self.answer(record, request, send))
        except RefusedRequest as refused:
            body = dump_json(refused.problem | {"error": refused.text}).encode()
            more = problem_headers(refused.problem) | {"content-type": PROBLEM}
            await send_whole(send, refused.problem["status"], body, more | dict(record.trailing))
        except asyncio.CancelledError:
            if not has_left:
                raise

    async def answer(self, record: GatewayRequest, request: HttpRequest, send: Any) -> None:
        """Respond to a request, in the place that its key has until its client has read."""
        path, headers = record.path, request.headers
        if (match := ROUTE.fullmatch(path)) is None:
            raise NoSuchRoute(f"{path}: the protocol has no such path")
        end, model, version, model_end = match.groups("")
        name = MODEL_METHODS[model_end] if model else METHODS[end]
        allow = ("POST",) if name in ("ModelInfer", "RepositoryIndex") else ("GET", "HEAD")
        if record.method not in allow:
            raise MethodNotAllowed(f"{record.method} {path}: use {' or '.join(allow)}", allow)
        if query := request.scope["query_string"].decode("latin-1"):
            raise InvalidRequest("query", query, "this route takes no parameters")
        if name in OPEN_METHODS:
            body, more = await self.page(name, "", "")
            return await send_whole(send, 200, body, more | dict(record.trailing))
        given = dict(request.scope["headers"])
        if refusal := self.host_rule.refusal(given.get(b"host"), given.get(b"origin")):
            raise refusal
        async with self.gateway.admitted(headers.get("authorization", "")) as caller:
            if name == "ModelInfer":
                body, more = await self.infer(record, request, caller, model_of(model, version))
            else:
                body, more = await self.page(name, model, version)
            await send_whole(send, 200, body, more | dict(record.trailing))

    async def page(self, name: str, model: str, version: str) -> Answer:
        page = await self.gateway.page(name, model, version)
        if page.get("ready") is False:
            raise NotReady(page["reason"])
        return dump_json(page.get(WHOLE.get(name, ""), page)).encode(), {"content-type": JSON}

    async def infer(
        self, record: GatewayRequest, request: HttpRequest, caller: Caller, model: Model
    ) -> Answer:
        headers, settings = request.headers, self.gateway.settings
        if encoding := headers.get("content-encoding"):
            text = f"Content-Encoding is {encoding[:100]}: send the body unencoded"
            raise UnsupportedMediaType(text)
        deadline = headers.get(DEADLINE.lower())
        deadline_s = None if deadline is None else deadline_us_of(deadline.encode()) * 1e-6
        limit, seconds = settings.oip.max_message_bytes, settings.server.receive_timeout_s
        body = memoryview(await read_whole(request.scope, request.receive, limit, seconds))
        given, size = headers.get(LENGTH.lower()), len(body)
        if given is not None:
            if not (given.isdecimal() and len(given) < 16 and int(given) <= size):
                rule = f"must be a count of at most the body's {size} bytes"
                raise InvalidRequest(LENGTH, given, rule)
            size = int(given)
        if size > MAX_JSON_BYTES:
            rule = f"at most {MAX_JSON_BYTES}: send tensors as binary data"
            raise InvalidRequest("JSON", f"{size} bytes", rule)
        read = read_json(model, bytes(body[:size]), body[size:])
        work = self.gateway.infer(record, caller, read, deadline_s)
        return answer_of(read, await unless_gone(request.receive, work))


def answer_of(request: Inference, reply: EngineReply) -> Answer:
    head: dict[str, Any] = {"model_name": request.model.name, "model_version": VERSION}
    head |= {"id": request.id} if request.id else {}
    head |= {"parameters": given} if (given := parameters_of(reply.fields)) else {}
    outputs, data = [], []
    for output, array, is_binary in request.outputs_of(reply.arrays):
        if is_binary:
            data.append(flat(array))
            outputs.append(dump_json(output | {"parameters": {"binary_data_size": array.nbytes}}))
        else:
            outputs.append(f'{dump_json(output)[:-1]},"data":{write_data(array).decode()}}}')
    text = f'{dump_json(head)[:-1]},"outputs":[{",".join(outputs)}]}}'.encode()
    more = {"content-type": OCTETS, LENGTH: str(len(text))} if data else {"content-type": JSON}
    return b"".join((text, *data)), more
