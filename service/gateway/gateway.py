"""The gateway's requests: their places, what they call, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from attnd.calls.call import Reply
from attnd.wire.frames import STAGES

from config.sections import Settings
from service.doors.kit.ledger import CLIENT_CLOSED, Ledger, Record
from service.doors.kit.problems import document_of
from service.doors.kit.process import DRAINING
from service.errors import AnswerTooLarge, Overloaded
from service.gateway import models
from service.gateway.requests import Inference
from service.gateway.upstream import Caller, Upstream

T = TypeVar("T")
OPEN_METHODS: Final = frozenset({"ServerLive", "ServerReady"})
"""Methods without a key. Methods have their names of gRPC over HTTP, too."""
LESS: Final = "request less per call, or raise oip.max_message_bytes"
TIMED: Final = [stage.replace("_", "-") for stage in STAGES]


class Refused(Exception):
    """The request is answered by this problem document; `text` is what clients show."""

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(problem["code"])
        self.problem = problem
        self.text = f"{problem['code']}: {problem['detail']}"


class Gateway:
    """Requests of both protocols, on one event loop."""

    def __init__(self, settings: Settings, upstream: Upstream, ledger: Ledger) -> None:
        self.settings = settings
        self.upstream = upstream
        self.ledger = ledger
        self.calls: Counter[str] = Counter()
        """Calls under way, by their caller's share."""
        self.tallies = {name: models.Tally() for name in models.MODELS}
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

    async def run(self, record: Record, work: Callable[[], Awaitable[T]]) -> T:
        """The result of a request's work; records how it ends. Raises Refused."""
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
            if (tally := self.tallies.get(record.op)) is not None:
                tally.add(record.code == "ok", record.seconds)
        raise Refused(problem)  # outside of the handler, so that the error's frames are freed

    async def infer(
        self, record: Record, caller: Caller, request: Inference, deadline_s: float | None
    ) -> Reply:
        """The service's reply, by the earlier one of the request's and the client's deadline."""
        record.op = request.model.name
        record.tenant = caller.tenant
        if request.timeout_s is not None:
            deadline_s = min(request.timeout_s, deadline_s or request.timeout_s)
        reply = await self.upstream.call(caller, request, record, deadline_s)
        size = sum(array.nbytes for array in reply.tensors.values())
        if size > (limit := self.settings.oip.max_message_bytes):
            raise AnswerTooLarge(size, limit, LESS)
        record.stages = [reply.meta.timings.get(stage, 0.0) for stage in TIMED]
        return reply

    async def page(self, name: str, caller: Caller, model: str, version: str) -> dict[str, Any]:
        """The answer of a method that calls no operation; `model` may be empty."""
        is_of_one = name in ("ModelMetadata", "ModelConfig", "ModelReady")
        one = models.model_of(model, version) if model or is_of_one else None
        match name, one:
            case "ServerLive", _:
                return {"live": True}
            case "ServerMetadata", _:
                return models.SERVER
            case "ModelMetadata", models.Model():
                return models.metadata(one)
            case "ModelConfig", models.Model():
                return {"config": models.config(one)}
            case "ModelStatistics", _:
                await self.upstream.require_admin(caller)
                asked = models.MODELS.values() if one is None else [one]
                return {"model_stats": [self.tallies[each.name].statistics(each) for each in asked]}
        state = ("draining", DRAINING) if self.draining.is_set() else await self.upstream.state()
        if name == "RepositoryIndex":
            return {"models": models.index(*state)}
        named = {} if one is None else {"name": one.name}
        return {"ready": state[0] == "ready", "reason": state[1], **named}
