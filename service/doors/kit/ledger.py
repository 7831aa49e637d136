"""Records answered requests some milliseconds later: their log lines, metrics and spans.

A client that sends its next request at once would otherwise wait for all of these. Spans need
OpenTelemetry, the extra `otel`; only this module imports it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from attnd.wire.frames import NO_STAGES, STAGES

from service import __version__
from service.doors.kit.headers import request_id_of, server_timing, traceparent_of
from service.extras import how_to_install
from service.metrics import Metrics
from service.tenants import ANONYMOUS, OPEN, Tenant

ACCESS: Final = logging.getLogger("attnd.access")
DELAY_S: Final = 0.01
"""Delay between a response and its records."""
OTHERS_S: Final = 0.015
"""After this delay the other processes have recorded their earlier requests, too."""
QUIET: Final = frozenset({"live", "ready", "metrics"})
"""Called by machines every few seconds: logged at debug."""
CLIENT_CLOSED: Final = 499
"""The status logged for a client that closed its connection before the response."""


class AnsweredRequest(Protocol):
    """An answered request of any protocol. `status` is HTTP's, `started` by the performance
    counter; `traceparent` is empty for a caller without a trace."""

    request_id: bytes
    op: str
    method: str
    path: str
    status: int
    code: str
    started: float
    seconds: float
    stages: Sequence[float]
    tenant: Tenant
    traceparent: bytes

    @property
    def peer(self) -> str: ...


@dataclass(slots=True, eq=False)
class GatewayRequest:
    """A request of the gateway, and its outcome."""

    method: str
    path: str
    peer: str
    request_id: bytes
    traceparent: bytes
    op: str = "model"
    status: int = 200
    code: str = "ok"
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    stages: Sequence[float] = NO_STAGES
    tenant: Tenant = ANONYMOUS

    @classmethod
    def begin(cls, method: str, path: str, peer: str, given: Callable[..., Any]) -> GatewayRequest:
        """`given` returns a header's value, or its second argument."""
        request_id, trace = (given(key, "").encode() for key in ("x-request-id", "traceparent"))
        return cls(method, path, peer, request_id_of(request_id), traceparent_of(trace))

    @property
    def trailing(self) -> tuple[tuple[str, str], ...]:
        """The headers, or trailing metadata, of every response."""
        timing = server_timing(self.stages).decode("ascii")
        return ("x-request-id", self.request_id.decode("ascii")), ("server-timing", timing)


class RequestLedger:
    """The records of one event loop; `settle` writes them at once (for `/metrics`, at the end)."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._answered: list[AnsweredRequest] = []

    def add(self, request: AnsweredRequest) -> None:
        if not self._answered:
            asyncio.get_running_loop().call_later(DELAY_S, self.settle)
        self._answered.append(request)

    def settle(self) -> None:
        answered, self._answered = self._answered, []
        for request in answered:
            self._metrics.observe(request.op, request.code, request.seconds)
            if self._tracing is not None:
                self._tracing.record(request)
        log(answered)


def log(answered: Sequence[AnsweredRequest]) -> None:
    """Write access lines, in one record: a record costs as much as several lines."""
    usual: list[AnsweredRequest] = []
    quiet: list[AnsweredRequest] = []
    for request in answered:
        (quiet if request.op in QUIET and request.status == 200 else usual).append(request)
    for level, requests in ((logging.INFO, usual), (logging.DEBUG, quiet)):
        if requests and ACCESS.isEnabledFor(level):
            ACCESS.log(level, "request", extra={"each": [fields_of(one) for one in requests]})


def fields_of(request: AnsweredRequest) -> dict[str, object]:
    fields: dict[str, object] = {
        "id": request.request_id.decode("ascii"),
        "op": request.op,
        "method": request.method,
        "path": request.path,
        "status": request.status,
        "code": request.code,
        "duration_ms": round(request.seconds * 1e3, 3),
        "peer": request.peer,
    }
    if request.tenant not in (OPEN, ANONYMOUS):
        fields["namespace"] = request.tenant.namespace
    return fields


SAMPLED: Final = 1
EXPORT_S: Final = 5.0
"""Timeout of a collector that receives spans."""


class TracingError(ValueError):
    """Spans cannot be sent; one line with the setting and the remedy."""


class Tracing:
    """Records answered requests as spans; `exporter` sends them some seconds later, in batches."""

    def __init__(self, exporter: Any, process: str) -> None:
        """Raises ImportError without the extra."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        about = {"service.name": "attnd", "service.version": __version__, "attnd.process": process}
        self.otel = trace
        self.provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(about))
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self.provider.get_tracer("attnd", __version__)

    def record(self, request: AnsweredRequest) -> None:
        """Record a span for an answered request, if its caller samples."""
        trace = request.traceparent
        if not trace or not int(trace[53:55], 16) & SAMPLED:
            return
        otel = self.otel
        caller = otel.SpanContext(
            trace_id=int(trace[3:35], 16),
            span_id=int(trace[36:52], 16),
            is_remote=True,
            trace_flags=otel.TraceFlags(SAMPLED),
        )
        started = time.time() - (time.perf_counter() - request.started)
        ended = started + request.seconds
        span = self.tracer.start_span(
            request.op,
            context=otel.set_span_in_context(otel.NonRecordingSpan(caller)),
            kind=otel.SpanKind.SERVER,
            attributes=attributes(request),
            start_time=nanoseconds(started),
        )
        for stage, seconds, end in stage_ends(request, started, ended):
            span.add_event(stage, {"attnd.seconds": seconds}, timestamp=nanoseconds(end))
        if request.status >= 500:
            span.set_status(otel.Status(otel.StatusCode.ERROR, request.code))
        span.end(nanoseconds(ended))

    async def close(self) -> None:
        """Send the remaining spans."""
        await asyncio.get_running_loop().run_in_executor(None, self.provider.shutdown)


def attributes(request: AnsweredRequest) -> dict[str, str | int]:
    return {
        "http.request.method": request.method,
        "url.path": request.path,
        "http.response.status_code": request.status,
        "attnd.code": request.code,
        "attnd.namespace": request.tenant.namespace,
        "attnd.request_id": request.request_id.decode("ascii"),
    }


def stage_ends(
    request: AnsweredRequest, started: float, ended: float
) -> list[tuple[str, float, float]]:
    """Name, seconds and end of each stage that the request reached. Stages follow one another, and
    the last one ends with the request."""
    found: list[tuple[str, float, float]] = []
    end = ended
    for stage, seconds in zip(reversed(STAGES), reversed(request.stages), strict=True):
        if seconds:
            found.append((stage, seconds, max(end, started)))
        end -= seconds
    return found[::-1]


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def make_tracing(endpoint: str | None, process: str) -> Tracing | None:
    """Tracing with the collector at `endpoint` (OTLP over HTTP, by default at its path
    /v1/traces); None without an endpoint.

    Raises TracingError.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        has_path = urlsplit(endpoint).path.strip("/")
        url = endpoint if has_path else endpoint.rstrip("/") + "/v1/traces"
        return Tracing(OTLPSpanExporter(endpoint=url, timeout=EXPORT_S), process)
    except ImportError as error:
        text = f"log.otlp_endpoint {endpoint}: {error}: {how_to_install('otel')}"
        raise TracingError(f"{text}, or remove the setting") from error
