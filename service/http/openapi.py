"""The OpenAPI document: FastAPI's for the control routes, and the tensor routes added to it.

A tensor route is documented in both media types: as a JSON schema with every tensor spelled out,
and as safetensors, a binary string whose `x-attnd-fields` and `x-attnd-tensors` say the same.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service import __version__, schemas
from service.errors import KINDS
from service.http.bodies import JSON, PROBLEM, SAFETENSORS
from service.http.exchange import DEADLINE_HEADER, MAX_DEADLINE_MS, MIN_DEADLINE_MS
from service.http.tensor_docs import DOCS, RouteDoc, TensorDoc
from service.http.tensor_routes import ROUTES, TensorRoute

Schema = dict[str, Any]
REF: Final = "#/components/schemas/"

DESCRIPTION: Final = f"""
Attention and KV cache as a service. Control routes speak JSON. Tensor routes speak `{SAFETENSORS}`:
the fields are a JSON object, as text, under the key `request` of the safetensors `__metadata__`,
and the answer's are under `response`; tensors are named. They also take and give `{JSON}`, with
the tensors spelled out beside the fields. `Accept` chooses the form of the answer; without it, it
is that of the request.

Every response carries `X-Request-ID` and `Server-Timing`. Every error is `{PROBLEM}`, with a `code`
and the numbers that matter.
"""

ERRORS_OF_ALL: Final = (405, 422, 429, 500, 503, 504)
ERRORS_OF_BODIES: Final = (400, 413, 415)
ERRORS_OF_STATE: Final = (404, 409, 507)


def document(app: FastAPI) -> Schema:
    """The whole OpenAPI document."""
    told = get_openapi(
        title="attnd",
        version=__version__,
        description=DESCRIPTION,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    schemas_told = told.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas_told.pop(name, None)
    schemas_told.update(model_schemas())
    for path in told["paths"].values():
        for operation in path.values():
            add_errors(operation, bool(operation.get("requestBody")))
            add_headers(operation)
    for path, route in ROUTES.items():
        told["paths"][path] = {"post": tensor_operation(route, DOCS[path])}
    return told


def model_schemas() -> dict[str, Schema]:
    """JSON schemas of all models that a body or an answer is made of."""
    models: list[type[Any]] = [
        schemas.CreateFields,
        schemas.TruncateFields,
        schemas.PageTableFields,
        schemas.Problem,
        *(route.fields for route in ROUTES.values()),
        *(route.answer for route in ROUTES.values()),
    ]
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=REF + "{model}"
    )
    found: dict[str, Schema] = definitions["$defs"]
    return found


def add_errors(operation: Schema, has_body: bool) -> None:
    """Every error that the operation can answer, as problem+json."""
    statuses = ERRORS_OF_ALL + ERRORS_OF_STATE + (ERRORS_OF_BODIES if has_body else ())
    responses = operation.setdefault("responses", {})
    for status in sorted(statuses):
        kinds = [kind for kind in KINDS.values() if kind.status == status]
        responses[str(status)] = {
            "description": "; ".join(f"`{kind.code}`: {kind.title}" for kind in kinds),
            "content": {PROBLEM: {"schema": {"$ref": f"{REF}Problem"}}},
        }


def add_headers(operation: Schema) -> None:
    """The headers every request may bring and every response has."""
    operation.setdefault("parameters", []).extend(
        (
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
                "description": "Milliseconds the operation may wait for its turn; then 504, and "
                "it has not run. Absent: server.deadline_s.",
                "schema": {
                    "type": "number",
                    "minimum": MIN_DEADLINE_MS,
                    "maximum": MAX_DEADLINE_MS,
                },
            },
        )
    )
    for response in operation["responses"].values():
        response.setdefault("headers", {}).update(
            {
                "X-Request-ID": {"schema": {"type": "string"}},
                "Server-Timing": {
                    "description": "queue, plan, copy-in, kernel, copy-out, encode; ms",
                    "schema": {"type": "string"},
                },
            }
        )


def tensor_operation(route: TensorRoute, doc: RouteDoc) -> Schema:
    """One tensor route."""
    operation: Schema = {
        "tags": ["tensors"],
        "operationId": route.op,
        "summary": doc.summary,
        "description": doc.description,
        "requestBody": {
            "required": True,
            "content": content(route.fields, doc.takes, "request", doc.example),
        },
        "responses": {
            "200": {
                "description": doc.answer,
                "content": content(route.answer, doc.gives, "response", None),
            }
        },
    }
    add_errors(operation, has_body=True)
    add_headers(operation)
    return operation


def content(
    model: type[schemas.Fields], tensors: tuple[TensorDoc, ...], key: str, example: Any
) -> Schema:
    """The two media types of a body."""
    spelled: Schema = {"schema": json_body(model, tensors)}
    if example is not None:
        spelled["example"] = example
    binary = {
        "type": "string",
        "format": "binary",
        "contentMediaType": SAFETENSORS,
        "description": f"safetensors; the fields as JSON text in `__metadata__.{key}`.",
        "x-attnd-fields": {"$ref": REF + model.__name__},
        "x-attnd-tensors": {one.name: one.told() for one in tensors},
    }
    return {SAFETENSORS: {"schema": binary}, JSON: spelled}


def json_body(model: type[schemas.Fields], tensors: tuple[TensorDoc, ...]) -> Schema:
    """The fields' schema with `tensors` beside them."""
    schema = model.model_json_schema(ref_template=REF + "{model}")
    schema.pop("$defs", None)
    schema["title"] = f"{model.__name__}WithTensors"
    required = [one.name for one in tensors if one.required]
    spelled: Schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {one.name: one.schema() for one in tensors if "{" not in one.name},
        "required": required,
    }
    if states := [one for one in tensors if "{" in one.name]:
        spelled["patternProperties"] = {one.pattern(): one.schema() for one in states}
    if tensors:
        schema["properties"]["tensors"] = spelled
    if required:
        schema.setdefault("required", []).append("tensors")
    return schema
