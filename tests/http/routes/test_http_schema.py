"""The OpenAPI document: true of the routes it names, and held to it by schemathesis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from http_messages import HEAD_DIM, KV_HEADS, QO_HEADS, SAFETENSORS, WIRE_DTYPE, write_body
from http_service import Service, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from numpy import zeros
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.operations.table import OPERATIONS

pytestmark = pytest.mark.long

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
DEADLINE = "X-Attnd-Deadline-Ms"
PAGES = ("/health/live", "/health/ready", "/metrics")
ERRORS_OF_PAGES = {"405", "422", "500", "503"}


def bodies() -> Iterator[bytes]:
    """Safetensors bodies for schemathesis: right, nearly right, and noise."""
    q = zeros((1, QO_HEADS, HEAD_DIM), WIRE_DTYPE)
    kv = zeros((1, KV_HEADS, HEAD_DIM), WIRE_DTYPE)
    one = {"layer": 0, "sequences": ["a"]}
    yield write_body(SAFETENSORS, one, {"q": q})
    yield write_body(SAFETENSORS, one, {"k": kv, "v": kv})
    yield write_body(SAFETENSORS, one, {})
    ragged = {"qo_indptr": [0, 1], "kv_indptr": [0, 1]}
    yield write_body(SAFETENSORS, ragged, {"q": q, "k": kv, "v": kv})
    yield write_body(SAFETENSORS, {"indptr": [0, 1]}, {"o": q, "lse": zeros((1, QO_HEADS), "f4")})
    yield b""


schemathesis.openapi.media_type(
    SAFETENSORS, st.sampled_from(list(bodies())) | st.binary(max_size=64)
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving("--cache.host-bytes", "8MiB", "--cache.records-share", "1.0") as running:
        yield running


@pytest.fixture(scope="module")
def document(service: Service) -> Any:
    with service.client() as client:
        return client.get("/openapi.json").json()


@pytest.fixture(scope="module")
def api(service: Service) -> Any:
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


ROUTES = [(one.path, one.method.lower()) for one in OPERATIONS] + [(page, "get") for page in PAGES]


@pytest.mark.parametrize(("path", "method"), ROUTES)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_reply_conforms_to_the_document(
    service: Service, api: Any, path: str, method: str, mode: GenerationMode
) -> None:
    operation = api[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        (case.headers or {}).pop(DEADLINE, None)  # a short one is a 504, and rightly so
        case.call_and_validate(checks=CHECKS)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "nothing can be wrong with this request"
    finally:
        with service.client() as client:  # an engine that is emptied refuses new sequences, rightly
            for engine in client.get("/v1/engines").json()["engines"]:
                if engine["draining"]:
                    url = f"/v1/engines/{engine['name']}/drain"
                    client.post(url, json={"stop": True}).raise_for_status()


@pytest.mark.parametrize("path", PAGES)
def test_the_errors_of_a_page_are_reported_as_problems(document: Any, path: str) -> None:
    responses = document["paths"][path]["get"]["responses"]
    errors = responses.keys() - {"200"}
    assert errors >= ERRORS_OF_PAGES
    for status in errors:
        assert set(responses[status]["content"]) == {"application/problem+json"}, status
