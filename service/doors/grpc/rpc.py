"""Calls of the gRPC door: their admission, their metadata and their outcome."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from attnd.wire.frames import NO_STAGES

from config.server import ServerSettings
from service.doors.kit.headers import request_id_of, server_timing, traceparent_of
from service.doors.kit.ledger import Ledger
from service.doors.kit.problems import document_of
from service.doors.oip.models import error_text
from service.errors import AttndError, MalformedRequest, Overloaded
from service.image.json_text import dump_json
from service.keys import Authenticator
from service.tenants import ANONYMOUS, OPEN, Tenant

SERVICE: Final = "/inference.GRPCInferenceService"
PROBLEM_KEY: Final = "attnd-problem"
"""The trailing metadata's key for the problem document."""
LONGEST_PROBLEM: Final = 4096
"""In characters; a longer one could exceed clients' limits on metadata."""
LONGEST_TEXT: Final = 2048
CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    410: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.OUT_OF_RANGE,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.UNAVAILABLE,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""gRPC's codes by HTTP's statuses; INTERNAL for others."""


class Rpc:
    """A call's metadata and outcome; a stream has one for each request."""

    def __init__(self, context: Any, method: str, ledger: Ledger) -> None:
        self.ledger = ledger
        self.started = time.perf_counter()
        self.context = context
        self.method = method
        self.path = f"{SERVICE}/{method}"
        self.op = "unknown"
        self.status = 200
        self.code = "ok"
        self.seconds = 0.0
        self.stages: Sequence[float] = NO_STAGES
        self.peer = str(context.peer())
        self.metadata = dict(context.invocation_metadata() or ())
        self.request_id = request_id_of(self.given("x-request-id"))
        self.traceparent = traceparent_of(self.given("traceparent"))
        self.tenant = ANONYMOUS

    def given(self, name: str) -> bytes:
        """A value of the metadata; empty if it is missing."""
        value = self.metadata.get(name, "")
        return value.encode("latin-1", "replace") if isinstance(value, str) else bytes(value)

    @property
    def trailing(self) -> tuple[tuple[str, str], ...]:
        """The trailing metadata of every response."""
        timing = server_timing(self.stages).decode("ascii")
        return ("x-request-id", self.request_id.decode("ascii")), ("server-timing", timing)

    def deadline_us(self, wanted: int) -> int:
        """The operation's time limit: the shorter of gRPC's deadline and `wanted` (the request's
        parameter); 0 for none."""
        left = self.context.time_remaining()
        limits = [wanted] if wanted else []
        if left is not None:
            limits.append(max(1, int(min(left, 3600.0) * 1e6)))
        return min(limits, default=0)

    def end(self, status: int = 200, code: str = "ok") -> None:
        """Stop the clock, and record the call."""
        self.status, self.code = status, code
        self.seconds = time.perf_counter() - self.started
        self.ledger.add(self)

    async def fail(self, problem: Mapping[str, Any], code: grpc.StatusCode | None = None) -> None:
        """Record the call, and abort it with a problem; `code` None: the problem's own."""
        self.end(problem["status"], problem["code"])
        own, text = status_of(problem)
        document = dump_json(problem)
        metadata = ((PROBLEM_KEY, document),) if len(document) <= LONGEST_PROBLEM else ()
        await self.context.abort(code or own, text, (*self.trailing, *metadata))


def status_of(problem: Mapping[str, Any]) -> tuple[grpc.StatusCode, str]:
    code = CODES.get(problem["status"], grpc.StatusCode.INTERNAL)
    if problem["code"] == "sequence_exists":
        code = grpc.StatusCode.ALREADY_EXISTS
    return code, error_text(problem)[:LONGEST_TEXT]


AUTHORIZATION: Final = "authorization"
LATER_S: Final = 0.5
"""A stream times out by itself; another call without a message is cancelled this much later."""
MAX_PROBES: Final = 256
"""Calls without a key at once; each ends within milliseconds if its client reads."""
SHARES: Final = 2
"""With keys, one namespace may have 1/2 of all calls."""


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The calls of one door. A call counts until its task ends."""

    def __init__(
        self,
        limits: ServerSettings,
        authenticator: Authenticator | None,
        ledger: Ledger,
        needs_no_key: frozenset[str],
    ) -> None:
        self.limits = limits
        self.authenticator = authenticator
        self.ledger = ledger
        self.needs_no_key = needs_no_key
        """Methods that respond without a key, and without a message."""
        self.taken: Counter[str] = Counter()
        """Calls by namespace."""
        self.probes: dict[Any, None] = {}
        """Tasks of calls without a key, oldest first."""
        self.silent: dict[Any, asyncio.TimerHandle] = {}
        """Timers of calls without a message, by their tasks."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        method = details.method.rpartition("/")[2]
        handler = await continuation(details)
        if handler is None or method in self.needs_no_key:
            return handler
        try:
            tenant = tenant_of(self.authenticator, details.invocation_metadata)
            self.take_place(tenant)
        except AttndError as error:
            return self.refusing(method, error)
        return handler

    def take_place(self, tenant: Tenant) -> None:
        """Raises Overloaded."""
        most = self.limits.grpc_max_calls
        share = most if self.authenticator is None else max(most // SHARES, 1)
        name = tenant.namespace
        if self.taken.total() >= most or self.taken[name] >= share:
            text = (
                f"{self.taken[name]} calls of this namespace are running, limits are {share} and "
                f"{most} for all: retry later, or raise server.grpc_max_calls"
            )
            raise Overloaded(text, retry_after_s=1.0)
        task: Any = asyncio.current_task()
        self.taken[name] += 1
        loop = asyncio.get_running_loop()
        self.silent[task] = loop.call_later(self.limits.receive_timeout_s + LATER_S, task.cancel)
        task.add_done_callback(lambda task: self.give_place(task, name))

    def give_place(self, task: Any, name: str) -> None:
        self.message_came(task)
        self.taken[name] -= 1
        if not self.taken[name]:
            del self.taken[name]

    def probe_came(self) -> None:
        """Count the current call, which needs no key; ends the oldest one where too many wait for
        their clients to read."""
        task: Any = asyncio.current_task()
        if len(self.probes) >= MAX_PROBES:
            oldest = next(iter(self.probes))
            del self.probes[oldest]
            oldest.cancel()
        self.probes[task] = None
        task.add_done_callback(lambda task: self.probes.pop(task, None))

    def message_came(self, task: Any = None) -> None:
        """A call has its first message: stop its timer."""
        timer = self.silent.pop(task or asyncio.current_task(), None)
        if timer is not None:
            timer.cancel()

    def refusing(self, method: str, error: AttndError) -> Any:
        """A handler that responds with an error, and reads nothing."""

        async def refuse(_: Any, context: Any) -> None:
            rpc = Rpc(context, method, self.ledger)
            is_full = isinstance(error, Overloaded)  # as gRPC's own limits
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_full else None
            await rpc.fail(document_of(error, rpc.request_id), code)

        return grpc.stream_stream_rpc_method_handler(refuse)


def tenant_of(authenticator: Authenticator | None, metadata: Any) -> Tenant:
    """The tenant of a call. Raises Unauthorized, MalformedRequest."""
    if authenticator is None:
        return OPEN
    shown = [value for name, value in metadata or () if name == AUTHORIZATION]
    if len(shown) > 1:
        raise MalformedRequest("the metadata authorization is given twice: send it once")
    text = shown[0] if shown else ""
    return authenticator.tenant_of(
        text.encode("latin-1", "replace") if isinstance(text, str) else text
    )
