"""`traceparent`: echoed when it is one, and a span for each request whose caller samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import QO_HEADS, fill, post, rows
from http_service import Service, serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.doors.kit.ledger import Tracing
from tests.harness.waiting import WAIT_S, wait_for

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
NOT_SAMPLED = f"00-{TRACE}-{PARENT}-00"


@pytest.mark.parametrize("given", [SAMPLED, NOT_SAMPLED, f"cc-{TRACE}-{PARENT}-09-later.versions"])
def test_a_traceparent_is_echoed(client: httpx.Client, given: str) -> None:
    for path in ("/v1/info", "/health/live", "/v1/sequences/none", "/nowhere"):
        assert client.get(path, headers={"traceparent": given}).headers["traceparent"] == given


@pytest.mark.parametrize(
    "given",
    [
        "",
        "01",
        SAMPLED.upper(),
        SAMPLED[:-1],
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        SAMPLED.replace("-", "_"),
    ],
)
def test_an_invalid_traceparent_is_ignored(client: httpx.Client, given: str) -> None:
    answer = client.get("/v1/info", headers={"traceparent": given})
    assert answer.status_code == 200 and "traceparent" not in answer.headers


@pytest.fixture
def spans(service: Service) -> Iterator[InMemorySpanExporter]:
    """The door's spans, as sent."""
    kept = InMemorySpanExporter()
    tracing = Tracing(kept, "http-0")
    service.door.ledger._tracing = tracing
    yield kept
    service.door.ledger._tracing = None
    tracing.provider.shutdown()


def finished(service: Service, spans: InMemorySpanExporter, count: int) -> list[Any]:
    """The spans so far, in order of their start."""
    tracing = service.door.ledger._tracing
    wait_for(
        lambda: tracing.provider.force_flush() and len(spans.get_finished_spans()) >= count,
        "the spans",
    )
    return sorted(spans.get_finished_spans(), key=lambda span: span.start_time)


def test_a_sampled_request_is_a_span_with_its_stages(
    service: Service, client: httpx.Client, spans: InMemorySpanExporter, rng: np.random.Generator
) -> None:
    fill(client, rng, "a", 3)
    before = time.time_ns()
    q = {"q": rows(rng, 1, QO_HEADS)}
    headers = {"traceparent": SAMPLED, "x-request-id": "step-7"}
    fields = {"layer": 0, "sequences": ["a"]}
    answer = post(client, "/v1/decode", fields, q, headers=headers)
    timing = dict(one.strip().split(";dur=") for one in answer.headers["server-timing"].split(","))
    client.get("/v1/sequences/none", headers={"traceparent": SAMPLED})
    decode, missing = finished(service, spans, 2)
    assert (decode.name, decode.kind.name) == ("decode", "SERVER")
    assert f"{decode.context.trace_id:032x}" == TRACE
    assert f"{decode.parent.span_id:016x}" == PARENT and decode.parent.is_remote
    assert before <= decode.start_time < decode.end_time <= time.time_ns()
    wanted = {
        "http.request.method": "POST",
        "url.path": "/v1/decode",
        "http.response.status_code": 200,
        "attnd.code": "ok",
        "attnd.namespace": "default",
        "attnd.request_id": "step-7",
    }
    assert dict(decode.attributes) == wanted
    stages = {event.name: event.attributes["attnd.seconds"] for event in decode.events}
    assert "kernel" in stages and "queue" in stages
    for name, seconds in stages.items():
        assert abs(seconds * 1e3 - float(timing[name.replace("_", "-")])) < 0.01, name
    ends = [event.timestamp for event in decode.events]
    assert ends == sorted(ends) and decode.start_time <= ends[0] and ends[-1] <= decode.end_time
    assert missing.attributes["attnd.code"] == "unknown_sequence"


def test_nothing_is_a_span_unless_its_caller_samples(
    service: Service, client: httpx.Client, spans: InMemorySpanExporter
) -> None:
    for headers in ({}, {"traceparent": NOT_SAMPLED}, {"traceparent": "nonsense"}):
        client.get("/v1/info", headers=headers)
    client.get("/v1/pool", headers={"traceparent": SAMPLED})
    assert [span.name for span in finished(service, spans, 1)] == ["pool"]


def test_spans_reach_the_collector_before_the_door_ends() -> None:
    received: list[bytes] = []
    paths: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *reply: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        with serving("--log.otlp-endpoint", endpoint) as running, running.client() as client:
            client.get("/v1/info", headers={"traceparent": SAMPLED}, timeout=WAIT_S)
        collector.shutdown()
        thread.join()
    assert paths == ["/v1/traces"], "of an endpoint without a path"
    (sent,) = [ExportTraceServiceRequest.FromString(body) for body in received]
    (span,) = sent.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("info", TRACE, PARENT)
