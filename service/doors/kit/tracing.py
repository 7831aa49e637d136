"""OpenTelemetry: a span for every request whose caller samples its trace, sent to a collector.

The library comes with the extra `otel`; only this module imports it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from attnd.wire.frames import STAGES

from service import __version__
from service.extras import how_to_install

if TYPE_CHECKING:
    from service.doors.kit.ledger import Request

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

    def record(self, request: Request) -> None:
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


def attributes(request: Request) -> dict[str, str | int]:
    return {
        "http.request.method": request.method,
        "url.path": request.path,
        "http.response.status_code": request.status,
        "attnd.code": request.code,
        "attnd.namespace": request.tenant.namespace,
        "attnd.request_id": request.request_id.decode("ascii"),
    }


def stage_ends(request: Request, started: float, ended: float) -> list[tuple[str, float, float]]:
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
    """Tracing with the collector at `endpoint` (OTLP over HTTP); None without an endpoint.

    Raises TracingError.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return Tracing(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S), process)
    except ImportError as error:
        text = f"log.otlp_endpoint {endpoint}: {error}: {how_to_install('otel')}"
        raise TracingError(f"{text}, or remove the setting") from error
