"""The OpenAPI document: the operations, the door's own pages, and what all answers have."""

from __future__ import annotations

from typing import Any, Final

from fastapi.openapi.utils import get_openapi

from service import __version__
from service.doors.http.protocol.exchange import (
    DEADLINE_HEADER,
    JSON,
    MAX_DEADLINE_MS,
    MIN_DEADLINE_MS,
    PROBLEM,
    SAFETENSORS,
)
from service.operations.openapi import error_response, operation_object, schemas
from service.operations.table import OPERATIONS

Schema = dict[str, Any]

DESCRIPTION: Final = f"""
Attention and KV cache as a service. Control routes speak JSON. Tensor routes speak `{SAFETENSORS}`:
the fields are a JSON object, as text, under the key `request` of the safetensors `__metadata__`,
and the answer's are under `response`; tensors are named. They also take and give `{JSON}`, with
the tensors spelled out beside the fields. `Accept` chooses the form of the answer; without it, it
is that of the request.

Every response carries `X-Request-ID` and `Server-Timing`. Every error is `{PROBLEM}`, with a `code`
and the numbers that matter.
"""
SECURITY: Final = {
    "type": "http",
    "scheme": "bearer",
    "description": "Where the service has keys. `x-attnd-scope` is what an operation asks for.",
}
ERRORS_OF_PAGES: Final = (401, 403, 405, 422, 429, 500, 503, 504)
HEADERS: Final = {
    "X-Request-ID": {"schema": {"type": "string"}},
    "Server-Timing": {
        "description": "queue, plan, copy-in, kernel, copy-out, encode; ms",
        "schema": {"type": "string"},
    },
}
PARAMETERS: Final = (
    {
        "name": "X-Request-ID",
        "in": "header",
        "required": False,
        "description": "Echoed; one is made when it is absent or not printable ASCII.",
        "schema": {"type": "string", "maxLength": 128},
    },
    {
        "name": DEADLINE_HEADER,
        "in": "header",
        "required": False,
        "description": "Milliseconds the operation may take, waiting included; then 504, and it "
        "has changed nothing. Absent: server.deadline_s.",
        "schema": {"type": "number", "minimum": MIN_DEADLINE_MS, "maximum": MAX_DEADLINE_MS},
    },
)


def document() -> Schema:
    """The whole document."""
    told = get_openapi(title="attnd", version=__version__, description=DESCRIPTION, routes=[])
    told["components"] = {"schemas": schemas(), "securitySchemes": {"key": SECURITY}}
    told["security"] = [{}, {"key": []}]
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        found = operation_object(operation)
        paths.setdefault(operation.path, {})[operation.method.lower()] = with_headers(found)
    for path, name, summary, content in pages():
        paths[path] = {"get": with_headers(page_object(name, summary, content))}
    told["paths"] = paths
    return told


def pages() -> tuple[tuple[str, str, str, Schema], ...]:
    """Path, name, summary and content of what the door answers itself."""
    text: Schema = {"text/plain": {"schema": {"type": "string"}}}
    return (
        ("/health/live", "live", "Whether the process answers", status_of("live")),
        (
            "/health/ready",
            "ready",
            "Whether requests are taken; 503 with the reason when not",
            status_of("ready"),
        ),
        ("/metrics", "metrics", "Metrics in Prometheus' text format", text),
    )


def status_of(word: str) -> Schema:
    properties = {"status": {"type": "string", "enum": [word]}}
    return {JSON: {"schema": {"type": "object", "required": ["status"], "properties": properties}}}


def page_object(name: str, summary: str, content: Schema) -> Schema:
    errors = {str(status): error_response(status) for status in ERRORS_OF_PAGES}
    return {
        "tags": ["health"],
        "operationId": name,
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}, **errors},
    }


def with_headers(found: Schema) -> Schema:
    """Add the headers every request may bring and every response has."""
    found["parameters"] = [*found.get("parameters", ()), *PARAMETERS]
    for response in found["responses"].values():
        response["headers"] = HEADERS
    return found
