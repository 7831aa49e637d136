"""The OpenAPI document: operations, the door's own pages, and the headers of all responses."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from fastapi.openapi.utils import get_openapi

from service import __version__
from service.doors.http.endpoints.events import PATH as EVENTS_PATH
from service.doors.kit.headers import DEADLINE, JSON, MAX_DEADLINE_MS, PROBLEM, SAFETENSORS
from service.image.json_text import dump_json
from service.operations.events import FROM_NOW
from service.operations.examples import bodies
from service.operations.openapi import error_response, operation_object, schemas
from service.operations.table import OPERATIONS

Schema = dict[str, Any]

DESCRIPTION: Final = f"""
Attention and KV cache as a service. Control routes use JSON. Tensor routes use `{SAFETENSORS}`: the
request's fields are a JSON object, as text, under the key `request` of the safetensors
`__metadata__`, the response's under `response`; tensors are named. Tensor routes accept and return
`{JSON}`, too, with tensors as lists of numbers beside the fields. `Accept` chooses the form of the
response; the default is that of the request.

The examples are for this pool, and succeed one after another, from the top. To begin again, delete
the sequence `chat-1`. Leases, pins and imports need a value of an earlier response.

Every response carries `X-Request-ID` and `Server-Timing`. Every error is `{PROBLEM}`, with a `code`
and the numbers that apply.
"""
SECURITY: Final = {
    "type": "http",
    "scheme": "bearer",
    "description": "For a service with keys. `x-attnd-scope` is an operation's scope.",
}
ERRORS_OF_PAGES: Final = (400, 401, 403, 405, 408, 422, 429, 431, 500, 503, 504)
HEADERS: Final = {
    "X-Request-ID": {"schema": {"type": "string"}},
    "Server-Timing": {
        "description": "queue, plan, copy-in, kernel, copy-out, encode; ms",
        "schema": {"type": "string"},
    },
}
RETRY_AFTER: Final = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
HEADERS_BY_STATUS: Final[dict[str, Schema]] = {
    "401": {"WWW-Authenticate": {"schema": {"type": "string"}}},
    "405": {"Allow": {"description": "the path's methods", "schema": {"type": "string"}}},
    "429": RETRY_AFTER,
    "503": RETRY_AFTER,
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
        "name": DEADLINE,
        "in": "header",
        "required": False,
        "description": "Time limit of the operation in milliseconds, waiting included; then 504, "
        "and nothing was changed. Default: server.deadline_s.",
        "schema": {"type": "number", "minimum": 1.0, "maximum": MAX_DEADLINE_MS},
    },
)


@cache
def document(num_kv_heads: int, head_dim: int, page_size: int) -> str:
    """The document as JSON, with examples for a pool of this shape. Made in 0.2 s, once."""
    examples = bodies(num_kv_heads, head_dim, page_size)
    found = get_openapi(title="attnd", version=__version__, description=DESCRIPTION, routes=[])
    found["components"] = {"schemas": schemas(), "securitySchemes": {"key": SECURITY}}
    found["security"] = [{}, {"key": []}]
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        methods = paths.setdefault(operation.path, {})
        methods[operation.method.lower()] = with_headers(
            operation_object(operation, examples.get(operation.name))
        )
    for path, name, summary, content in pages():
        paths[path] = {"get": with_headers(page_object(name, summary, content))}
    paths[EVENTS_PATH] = {"get": with_headers(event_stream())}
    found["paths"] = paths
    return dump_json(found)


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


def event_stream() -> Schema:
    """The stream of events, which ends with the service."""
    text: Schema = {"type": "string", "description": "server-sent events: `data` is a CacheEvent"}
    name = "stream_events"
    found = page_object(name, "Stream the cache's events", {"text/event-stream": {"schema": text}})
    number: Schema = {"type": "integer", "minimum": FROM_NOW, "maximum": 2**53 - 1}
    where = (("after", "query"), ("Last-Event-ID", "header"))
    parameters = [
        {"name": name, "in": place, "required": False, "schema": number} for name, place in where
    ]
    return {**found, "tags": ["prefix cache"], "parameters": parameters, "x-attnd-scope": "read"}


def with_headers(found: Schema) -> Schema:
    """Add the headers that every request may have, and every response has."""
    found["parameters"] = [*found.get("parameters", ()), *PARAMETERS]
    for status, response in found["responses"].items():
        response["headers"] = HEADERS | HEADERS_BY_STATUS.get(status, {})
    return found
