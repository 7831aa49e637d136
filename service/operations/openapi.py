"""The OpenAPI document of the operations: schemas of fields and replies, bodies by media type.

An operation with tensors has two media types: JSON, with a schema of every tensor, first, as it is
what a form can send; and safetensors, a binary string described by `x-attnd-fields` and
`x-attnd-tensors`.
"""

from __future__ import annotations

from typing import Any, Final

from attnd.wire.errors import ErrorCode
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from service.errors import KINDS
from service.image.json_tensors import FLOATS, integer_range
from service.operations.examples import PATHS, USUAL
from service.operations.schema.spec import Operation, Symbols, TensorSpec
from service.operations.table import OPERATIONS

Schema = dict[str, Any]

SAFETENSORS: Final = "application/vnd.safetensors"
JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
REF: Final = "#/components/schemas/"

ERRORS_OF_ALL: Final = (400, 401, 403, 405, 408, 413, 422, 429, 431, 500, 501, 503, 504)
ERRORS_OF_BODIES: Final = (415,)
ERRORS_OF_STATE: Final = (404, 409, 410, 507)


class Problem(BaseModel):
    """RFC 9457: the body of every error, with the relevant numbers as further members."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str


def schemas() -> dict[str, Schema]:
    """JSON schemas of all models in requests and replies, for `components.schemas`."""
    models: list[type[BaseModel]] = [Problem]
    for operation in OPERATIONS:
        models += [operation.fields] * operation.has_body
        models += [operation.answer] if operation.answer is not None else []
    _, document = models_json_schema(
        [(model, "validation") for model in models], ref_template=REF + "{model}"
    )
    definitions: dict[str, Schema] = document["$defs"]
    for operation in OPERATIONS:
        if operation.has_body:
            drop(definitions[operation.fields.__name__], operation.path_names)
    return definitions


def drop(schema: Schema, names: tuple[str, ...]) -> None:
    for name in names:
        del schema["properties"][name]
        schema["required"].remove(name)


def operation_object(operation: Operation, example: Any = None) -> Schema:
    """The operation with its parameters, bodies and errors; the door adds headers. `example` is of
    the request's body."""
    document: Schema = {
        "tags": [operation.tag],
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": parameters(operation),
        "responses": {str(operation.status): response(operation), **errors(operation)},
        "x-attnd-scope": operation.scope,
    }
    if operation.description:
        document["description"] = operation.description
    if operation.has_body:
        document["requestBody"] = {"required": True, "content": request_content(operation, example)}
    return document


def parameters(operation: Operation) -> list[Schema]:
    schema = operation.fields.model_json_schema(ref_template=REF + "{model}")
    required = schema.get("required", [])
    examples = {name: PATHS.get(operation.name, USUAL[name]) for name in operation.path_names}
    return [
        {
            "name": name,
            "in": "path" if name in operation.path_names else "query",
            "required": name in required,
            "schema": without_null(schema["properties"][name]),
            **({"example": examples[name]} if name in examples else {}),
        }
        for name in operation.path_names + operation.query_names
    ]


def without_null(schema: Schema) -> Schema:
    """The schema without null: in a query the parameter is omitted instead."""
    kept = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(kept) != 1:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    return {**rest, **kept[0]}


def request_content(operation: Operation, example: Any) -> Schema:
    spelled: Schema = {"schema": {"$ref": REF + operation.fields.__name__}}
    if not operation.has_tensors:
        return {JSON: with_example(spelled, example)}
    document = content(operation.fields, operation.takes, "request")
    with_example(document[JSON], example)
    drop(document[JSON]["schema"], operation.path_names)
    return document


def response(operation: Operation) -> Schema:
    document: Schema = {"description": operation.answer_text}
    if operation.answer is not None:
        spelled = {"schema": {"$ref": REF + operation.answer.__name__}}
        document["content"] = (
            content(operation.answer, operation.gives, "response")
            if operation.has_tensors
            else {JSON: spelled}
        )
    return document


def errors(operation: Operation) -> dict[str, Schema]:
    """The responses for every error of the operation, as problem+json."""
    statuses = ERRORS_OF_ALL + ERRORS_OF_STATE + ERRORS_OF_BODIES * operation.has_body
    return {str(status): error_response(status) for status in sorted(statuses)}


def error_response(status: int) -> Schema:
    kinds = [kind for kind in KINDS.values() if kind.status == status]
    return {
        "description": "; ".join(map(about, kinds)),
        "content": {PROBLEM: {"schema": {"$ref": f"{REF}Problem"}}},
    }


def about(kind: ErrorCode) -> str:
    members = f" ({', '.join(kind.members)})" if kind.members else ""
    return f"`{kind.code}`: {kind.title}{members}"


def with_example(spelled: Schema, example: Any) -> Schema:
    if example is not None:
        spelled["example"] = example
    return spelled


def content(model: type[BaseModel], tensors: tuple[TensorSpec, ...], key: str) -> Schema:
    binary = {
        "type": "string",
        "format": "binary",
        "contentMediaType": SAFETENSORS,
        "description": f"safetensors; the fields as JSON text in `__metadata__.{key}`.",
        "x-attnd-fields": {"$ref": REF + model.__name__},
        "x-attnd-tensors": {one.name: tensor_facts(one) for one in tensors},
    }
    return {JSON: {"schema": json_body(model, tensors)}, SAFETENSORS: {"schema": binary}}


def json_body(model: type[BaseModel], tensors: tuple[TensorSpec, ...]) -> Schema:
    """The fields' schema with `tensors` beside them."""
    schema = model.model_json_schema(ref_template=REF + "{model}")
    schema.pop("$defs", None)
    schema["title"] = f"{model.__name__}WithTensors"
    if not tensors:
        return schema
    required = [one.name for one in tensors if not one.optional]
    spelled: Schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {one.name: tensor_schema(one) for one in tensors if "{" not in one.name},
        "required": required,
    }
    if numbered := [one for one in tensors if "{" in one.name]:
        spelled["patternProperties"] = {pattern(one.name): tensor_schema(one) for one in numbered}
    schema["properties"]["tensors"] = spelled
    if required:
        schema.setdefault("required", []).append("tensors")
    return schema


def shape_words(spec: TensorSpec) -> str:
    def words(shape: Symbols) -> str:
        return f"[{', '.join(map(str, shape))}]"

    ragged = "" if spec.ragged is None else f", or {words(spec.ragged)} with indptr"
    return words(spec.shape) + ragged


def tensor_facts(spec: TensorSpec) -> Schema:
    """A tensor for safetensors: dtypes, shape and meaning."""
    return {
        "dtype": list(spec.dtypes),
        "shape": shape_words(spec),
        "description": spec.words,
        "required": not spec.optional,
    }


def pattern(name: str) -> str:
    """The regular expression of a numbered tensor's names."""
    return "^" + name.replace(".", r"\.").replace("{i}", "[0-9]+") + "$"


def tensor_schema(spec: TensorSpec) -> Schema:
    """A tensor for JSON: an object of dtype, shape and data."""
    ranks = [len(shape) for shape in (spec.shape, spec.ragged) if shape is not None]
    shape = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0},
        "minItems": min(ranks),
        "maxItems": max(ranks),
        "description": shape_words(spec),
    }
    data = {"type": "array", "items": element(spec.dtypes), "description": "flat, row-major"}
    return {
        "type": "object",
        "description": f"{shape_words(spec)}: {spec.words}",
        "additionalProperties": False,
        "required": ["dtype", "shape", "data"],
        "properties": {
            "dtype": {"type": "string", "enum": list(spec.dtypes)},
            "shape": shape,
            "data": data,
        },
    }


def element(dtypes: tuple[str, ...]) -> Schema:
    if dtypes == ("BOOL",):
        return {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 1}]}
    if len(dtypes) == 1 and dtypes[0] not in FLOATS:
        low, high = integer_range(dtypes[0])
        return {"type": "integer", "minimum": low, "maximum": high}
    spelled = {"type": "string", "enum": ["Infinity", "-Infinity", "NaN"]}
    return {"anyOf": [{"type": "number"}, spelled]}
