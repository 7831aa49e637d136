"""The gRPC door: the protocol's methods over the road to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from attnd.wire.images import PROBLEM
from google.protobuf.json_format import ParseDict

from config.server import ServerSettings
from service.doors.grpc.rpc import Admission, Rpc, status_of, tenant_of
from service.doors.grpc.tensors import (
    SERVICE,
    ModelStreamInferResponse,
    decoder,
    message,
    read_infer_request,
    reading_request,
    write_answer,
)
from service.doors.kit.headers import call_id_of
from service.doors.kit.ledger import CLIENT_CLOSED, Ledger, Tracing
from service.doors.kit.link import QUIET_S, Link
from service.doors.kit.pieces import OneByOne
from service.doors.kit.problems import ProblemText, document_of
from service.doors.kit.upstream import MakeUpstream, trim
from service.doors.oip import models
from service.doors.oip.models import MODELS, Model, error_text, model_of, statistics
from service.errors import NotReady, RequestTimeout
from service.image.json_body import fields_text_of_image
from service.keys import Authenticator
from service.metrics import Metrics

UNGUARDED: Final = frozenset({"ServerLive", "ServerReady"})
"""Methods without a key, like HTTP's health."""
Answer = Callable[[Any], Any]


class GrpcDoor:
    """One door on its event loop."""

    def __init__(
        self,
        limits: ServerSettings,
        metrics: Metrics,
        authenticator: Authenticator | None = None,
        tracing: Tracing | None = None,
        make_upstream: MakeUpstream = Link,
    ) -> None:
        """`authenticator` None: the service has no keys."""
        self.limits = limits
        self.authenticator = authenticator
        self.metrics = metrics
        self.link = make_upstream(limits, authenticator is not None, metrics)
        self.ledger = Ledger(metrics, tracing)
        self.admission = Admission(limits, authenticator, self.ledger, UNGUARDED)
        self.long_work = OneByOne()
        self.draining = asyncio.Event()
        """Set once draining."""
        self.calls = 0
        self.calls_before = -1
        """`calls` at the last look; the door is idle if it has not changed."""
        self.trimming = asyncio.get_running_loop().call_later(QUIET_S, self.trim)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Every method of the service. Requests come as bytes, so that malformed ones get the usual
        errors."""
        pages: dict[str, tuple[str, Answer]] = {
            "ServerLive": ("live", lambda _: {"live": True}),
            "ServerReady": ("ready", lambda _: {"ready": self.is_ready()}),
            "ModelReady": ("ready", self.model_ready),
            "ServerMetadata": ("model", lambda _: models.server_metadata()),
            "ModelMetadata": ("model", lambda one: models.metadata(named(one))),
            "ModelConfig": ("model", lambda one: {"config": models.config(named(one))}),
            "ModelStatistics": ("model", self.model_statistics),
            "RepositoryIndex": ("model", lambda _: {"models": models.index(self.link.state)}),
        }
        found = {}
        for method in SERVICE.methods:
            encode = message(method.output_type.name).SerializeToString
            if method.name == "ModelStreamInfer":
                make: Any = grpc.stream_stream_rpc_method_handler
                answer: Any = self.stream
            elif method.name in UNGUARDED:
                make = grpc.stream_stream_rpc_method_handler
                answer = self.probe(method, *pages[method.name])
            else:
                make = grpc.unary_unary_rpc_method_handler
                is_infer = method.name == "ModelInfer"
                answer = self.infer if is_infer else self.page(method, *pages[method.name])
            found[method.name] = make(answer, response_serializer=encode)
        return grpc.method_handlers_generic_handler(SERVICE.full_name, found)

    # inference

    async def infer(self, data: bytes, context: Any) -> Any:
        rpc = Rpc(context, "ModelInfer", self.ledger)
        self.admission.message_came()
        given = [data]
        del data  # an error's traceback has this frame: it must not hold the message

        async def work() -> Any:
            return await self.call(rpc, read_infer_request(given.pop()))

        return await self.responded(rpc, work)

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Requests take effect in their order: each gets its response before the next is read. An
        error does not end the stream; the drain does, once no request is left."""
        async for data in self.until_drain(requests, context):
            self.admission.message_came()
            rpc = Rpc(context, "ModelStreamInfer", self.ledger)
            response = ModelStreamInferResponse()
            try:
                request = read_infer_request(data)
                response.infer_response.id = request.id
                response.infer_response.CopyFrom(await self.call(rpc, request))
                rpc.end()
            except asyncio.CancelledError:
                rpc.end(CLIENT_CLOSED, "client_gone")
                raise
            except Exception as error:
                problem = document_of(error, rpc.request_id)
                response.error_message = error_text(problem)
                rpc.end(problem["status"], problem["code"])
            yield response

    async def until_drain(
        self, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """The messages of a stream; aborts it if the drain begins while none comes."""
        draining = asyncio.ensure_future(self.draining.wait())
        coming: asyncio.Future[bytes | None] = asyncio.Future()
        timeout: float | None = self.limits.receive_timeout_s
        try:
            while True:
                coming = asyncio.ensure_future(anext(requests, None))
                await asyncio.wait(
                    (coming, draining), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if not coming.done():
                    coming.cancel()
                    error = NotReady(self.link.draining) if draining.done() else silent(timeout)
                    await context.abort(*status_of(document_of(error, b"")))
                timeout = None  # after its first message a stream may pause
                data = await coming
                if data is None:
                    return
                yield data
        finally:
            draining.cancel()
            coming.cancel()

    async def call(self, rpc: Rpc, request: Any) -> Any:
        """The engine's reply to one request; raises the matching AttndError."""
        self.calls += 1
        rpc.tenant = tenant_of(self.authenticator, rpc.context.invocation_metadata())
        model = model_of(request.model_name, request.model_version)
        rpc.op = model.name
        link = self.link
        link.ready()
        call = await self.long_work.do(reading_request(model, request), rpc.tenant.namespace)
        slot, length = link.arena.lay(call.pieces())
        try:
            answered, place = await link.call(
                model.operation,
                slot,
                length,
                self.limits.max_answer_bytes,
                rpc.deadline_us(call.wanted.deadline_us),
                call_id_of(rpc.request_id),
                rpc.tenant,
            )
        finally:
            link.arena.give_back(slot)
        rpc.stages = answered.stages
        try:
            if answered.status >= 400:
                raise ProblemText(fields_text_of_image(answered.image, PROBLEM))
            return write_answer(model, answered.image, call.wanted)
        finally:
            link.arena.give_back(place)

    async def responded(self, rpc: Rpc, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the work's response, or abort with its error; records both in the ledger."""
        problem = None
        try:
            response = await work()
        except asyncio.CancelledError:
            rpc.end(CLIENT_CLOSED, "client_gone")
            raise
        except Exception as error:
            problem = document_of(error, rpc.request_id)
        if problem is not None:  # outside of the handler, so that the error's frames are freed
            await rpc.fail(problem)
        rpc.context.set_trailing_metadata(rpc.trailing)
        rpc.end()
        return response

    # pages

    def page(self, method: Any, op: str, answer: Answer) -> Callable[..., Awaitable[Any]]:
        """A method that needs no engine."""
        decode, made = decoder(method.input_type.name), message(method.output_type.name)

        async def handle(data: bytes, context: Any) -> Any:
            rpc = Rpc(context, method.name, self.ledger)
            rpc.op = op
            self.admission.message_came()

            async def work() -> Any:
                rpc.tenant = tenant_of(self.authenticator, context.invocation_metadata())
                if method.name == "ModelStatistics":
                    rpc.tenant.require("admin", method.name)
                return ParseDict(answer(decode(data)), made())

            return await self.responded(rpc, work)

        return handle

    def probe(self, method: Any, op: str, answer: Answer) -> Callable[..., Awaitable[Any]]:
        """A method that responds without reading its message, which may never come."""
        made = message(method.output_type.name)

        async def handle(_: Any, context: Any) -> None:
            self.admission.probe_came()
            rpc = Rpc(context, method.name, self.ledger)
            rpc.op = op
            await context.write(ParseDict(answer(None), made()))
            context.set_trailing_metadata(rpc.trailing)
            rpc.end()

        return handle

    def is_ready(self) -> bool:
        try:
            self.link.check_heard()
        except NotReady:
            return False
        return True

    def model_ready(self, request: Any) -> Any:
        named(request)
        return {"ready": self.is_ready()}

    def model_statistics(self, request: Any) -> Any:
        self.ledger.settle()
        found = [named(request)] if request.name else MODELS.values()
        return {"model_stats": statistics(found, self.metrics)}

    # the end

    def drain(self, reason: str) -> None:
        self.link.draining = reason
        self.draining.set()

    def trim(self) -> None:
        if self.calls == self.calls_before:
            trim(asyncio.get_running_loop(), self.link)
        self.calls_before = self.calls
        self.trimming = asyncio.get_running_loop().call_later(QUIET_S, self.trim)

    def close(self) -> None:
        self.trimming.cancel()
        self.ledger.settle()
        self.link.close()


def named(request: Any) -> Model:
    """The model that a request is about. Raises NoSuchRoute."""
    return model_of(request.name, request.version)


def silent(seconds: float | None) -> RequestTimeout:
    text = f"no message came within {seconds:g} s: send one, or raise server.receive_timeout_s"
    return RequestTimeout(text)
