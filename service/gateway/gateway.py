"""The gateway's requests: their places, what they call, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from config.sections import Settings
from service.doors.kit.ledger import CLIENT_CLOSED, GatewayRequest, RequestLedger
from service.doors.kit.problems import ProblemText, document_of
from service.doors.kit.process import DRAINING
from service.doors.kit.upstream import EngineReply
from service.errors import AnswerTooLarge, DeadlineExceeded, NotReady, Overloaded
from service.gateway.models import MODELS, SERVER, VERSION, model_of
from service.gateway.requests import Inference
from service.gateway.upstream import Caller, Upstream

T = TypeVar("T")
OPEN_METHODS: Final = frozenset({"ServerLive", "ServerReady"})
"""Methods without a key. Methods have their names of gRPC over HTTP, too."""
LESS: Final = "request less per call, or raise oip.max_message_bytes"


class RefusedRequest(Exception):
    """The request is answered by this problem document; `text` is what clients show."""

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(problem["code"])
        self.problem = problem
        self.text = f"{problem['code']}: {problem['detail']}"


class Gateway:
    """Requests of both protocols, on one event loop."""

    def __init__(self, settings: Settings, upstream: Upstream, ledger: RequestLedger) -> None:
        self.settings, self.upstream, self.ledger = settings, upstream, ledger
        self.calls: Counter[str] = Counter()
        """Calls under way, by their caller's share."""
        self.draining = asyncio.Event()

    @asynccontextmanager
    async def admitted(self, authorization: str) -> AsyncIterator[Caller]:
        """A place for a call; with keys one namespace has half of them. Raises Unauthorized and
        Overloaded."""
        caller = await self.upstream.caller(authorization)
        most = self.settings.oip.max_calls
        share = max(most // 2, 1) if caller.share else most
        if self.calls.total() >= most or self.calls[caller.share] >= share:
            text = f"{share} calls of one namespace and {most} of all are served at once"
            text = f"{text}: retry later, or raise oip.max_calls"
            raise Overloaded(text, retry_after_s=1.0, limit=share)
        self.calls[caller.share] += 1
        try:
            yield caller
        finally:
            self.calls[caller.share] -= 1
            self.calls = +self.calls  # without zeros

    async def run(self, record: GatewayRequest, work: Callable[[], Awaitable[T]]) -> T:
        """The result of a request's work; records how it ends. Raises RefusedRequest."""
        try:
            return await work()
        except asyncio.CancelledError:
            record.status, record.code = CLIENT_CLOSED, "client_gone"
            raise
        except Exception as error:
            problem = document_of(error, record.request_id)
            record.status, record.code = problem["status"], problem["code"]
        finally:
            record.seconds = time.perf_counter() - record.started
            self.ledger.add(record)
        raise RefusedRequest(
            problem
        )  # outside of the handler, so that the error's frames are freed

    async def infer(
        self, record: GatewayRequest, caller: Caller, request: Inference, deadline_s: float | None
    ) -> EngineReply:
        """The service's reply, by the earlier one of the request's and the client's deadline."""
        record.op, record.tenant = request.model.name, caller.tenant
        if request.timeout_s is not None:
            deadline_s = min(request.timeout_s, deadline_s or request.timeout_s)
        reply = await self.upstream.call(caller, request, record, deadline_s)
        size = sum(array.nbytes for array in reply.arrays.values())
        if size > (limit := self.settings.oip.max_message_bytes):
            raise AnswerTooLarge(size, limit, LESS)
        record.stages = reply.stages
        return reply

    async def page(self, name: str, model: str, version: str) -> dict[str, Any]:
        """The answer of a method that calls no operation; `model` is empty where it names none."""
        if name == "ServerLive":
            return {"live": True}
        if name == "ServerMetadata":
            return SERVER
        if name == "ModelMetadata":
            return model_of(model, version).metadata()
        if name == "ModelConfig":
            return {"config": model_of(model, version).config()}
        named = {"name": model_of(model, version).name} if name == "ModelReady" else {}
        why = await self.why_unready()
        if name == "RepositoryIndex":
            how = {"state": "UNAVAILABLE" if why else "READY", "reason": why}
            return {"models": [{"name": one, "version": VERSION, **how} for one in MODELS]}
        return {"ready": not why, "reason": why, **named}

    async def why_unready(self) -> str:
        """Empty where calls are served."""
        if self.draining.is_set():
            return DRAINING
        try:
            await self.upstream.check_ready()
        except (ProblemText, NotReady, DeadlineExceeded) as error:
            return str(error) or type(error).__name__
        return ""
