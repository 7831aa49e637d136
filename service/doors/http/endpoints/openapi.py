"""The OpenAPI document: operations, the door's own pages, and the headers of all responses."""

from __future__ import annotations

from typing import Any, Final

from fastapi.openapi.utils import get_openapi

from service import __version__
from service.doors.http.protocol.exchange import DEADLINE_HEADER, MAX_DEADLINE_MS, MIN_DEADLINE_MS
from service.doors.kit.headers import JSON, PROBLEM, SAFETENSORS
from service.operations.openapi import error_response, operation_object, schemas
from service.operations.table import OPERATIONS

Schema = dict[str, Any]

DESCRIPTION: Final = f"""
Attention and KV cache as a service. Control routes use JSON. Tensor routes use `{SAFETENSORS}`: the
request's fields are a JSON object, as text, under the key `request` of the safetensors
`__metadata__`, the response's under `response`; tensors are named. Tensor routes accept and return
`{JSON}`, too, with tensors as lists of numbers beside the fields. `Accept` chooses the form of the
response; the default is that of the request.

Every response carries `X-Request-ID` and `Server-Timing`. Every error is `{PROBLEM}`, with a `code`
and the numbers that apply.
"""
SECURITY: Final = {
    "type": "http",
    "scheme": "bearer",
    "description": "For a service with keys. `x-attnd-scope` is an operation's scope.",
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
        "description": "Returned in the response; replaced by a random id if it is invalid.",
        "schema": {"type": "string", "maxLength": 128},
    },
    {
        "name": DEADLINE_HEADER,
        "in": "header",
        "required": False,
        "description": "Time limit of the operation in milliseconds, waiting included; then 504, "
        "and nothing was changed. Default: server.deadline_s.",
        "schema": {"type": "number", "minimum": MIN_DEADLINE_MS, "maximum": MAX_DEADLINE_MS},
    },
)


def document() -> Schema:
    found = get_openapi(title="attnd", version=__version__, description=DESCRIPTION, routes=[])
    found["components"] = {"schemas": schemas(), "securitySchemes": {"key": SECURITY}}
    found["security"] = [{}, {"key": []}]
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        methods = paths.setdefault(operation.path, {})
        methods[operation.method.lower()] = with_headers(operation_object(operation))
    for path, name, summary, content in pages():
        paths[path] = {"get": with_headers(page_object(name, summary, content))}
    found["paths"] = paths
    return found


def pages() -> tuple[tuple[str, str, str, Schema], ...]:
    """Path, name, summary and content of the door's own pages."""
    text: Schema = {"text/plain": {"schema": {"type": "string"}}}
    return (
        ("/health/live", "live", "Whether the process responds", status_of("live")),
        (
            "/health/ready",
            "ready",
            "Whether requests are accepted; else 503 with the reason",
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
        "responses": {"200": {"description": "The response.", "content": content}, **errors},
    }


def with_headers(found: Schema) -> Schema:
    """Add the headers that every request may have, and every response has."""
    found["parameters"] = [*found.get("parameters", ()), *PARAMETERS]
    for response in found["responses"].values():
        response["headers"] = HEADERS
    return found
