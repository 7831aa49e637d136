"""OpenAPI of the operations: every field, tensor and error, in both media types."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, make_dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
from attnd.wire import answer_table
from attnd.wire.answer_table import ANSWERS, ARRAYS, TEXT, layout_of
from attnd.wire.answers import Info
from attnd.wire.operations import ROUTES
from declared import INFO
from pydantic import TypeAdapter
from typing_extensions import TypeAliasType

from service.errors import KINDS, Cancelled, InvalidRequest, UnsupportedMediaType
from service.image.json_body import image_of_json
from service.image.reading import read_layout
from service.operations.examples import bodies
from service.operations.openapi import JSON, PROBLEM, REF, SAFETENSORS, operation_object, schemas
from service.operations.schema.fields import InfoAnswer
from service.operations.schema.spec import Operation, prepare
from service.operations.table import BY_NAME, OPERATIONS

TENSORS = {
    "append": ({"k", "v", "token_ids"}, set()),
    "decode": ({"q", "k", "v", "sinks", "token_ids"}, {"o", "lse"}),
    "prefill": ({"q", "k", "v", "mask", "packed_mask", "sinks", "token_ids"}, {"o", "lse"}),
    "ragged_prefill": ({"q", "k", "v", "mask", "packed_mask", "sinks"}, {"o", "lse"}),
    "cascade": ({"q", "sinks"}, {"o", "lse", "o.{i}", "lse.{i}"}),
    "merge": ({"o", "lse", "sinks"}, {"o", "lse"}),
    "gather": (set(), {"k", "v"}),
    "create_sequences": ({"token_ids", "page_keys"}, set()),
    "match_prefix": ({"token_ids", "page_keys"}, set()),
    "prefetch": ({"token_ids", "page_keys"}, set()),
    "commit": ({"token_ids", "page_keys"}, set()),
    "commit_sequences": ({"token_ids", "page_keys"}, set()),
    "export_sequence": (set(), {"token_ids", "page_keys", "k", "v"}),
    "import_sequence": ({"token_ids", "page_keys", "k", "v"}, set()),
}
KEYS = {"keys", "key_lens"}
TENSORS |= {name: (KEYS, set()) for name in BY_NAME if name.endswith("_records")}
TENSORS |= {"put_records": (KEYS | {"sizes", "values"}, set()), "get_records": (KEYS, {"values"})}
for name in ("clear_records", "release_records"):
    del TENSORS[name]
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)


def references(document: Any) -> set[str]:
    pieces = json.dumps(document).split(f'"$ref": "{REF}')[1:]
    return {piece.partition('"')[0] for piece in pieces}


def test_every_reference_leads_somewhere() -> None:
    known = schemas()
    assert references([*map(operation_object, OPERATIONS), known]) <= known.keys()


@pytest.mark.parametrize("name", TENSORS)
def test_the_tensors_are_reported_for_both_media_types(name: str) -> None:
    document = operation_object(BY_NAME[name])
    bodies = (document["requestBody"], document["responses"][str(BY_NAME[name].status)])
    for body, names in zip(bodies, TENSORS[name], strict=True):
        assert set(body["content"]) == {SAFETENSORS, JSON}
        binary = body["content"][SAFETENSORS]["schema"]
        assert set(binary["x-attnd-tensors"]) == names and binary["format"] == "binary"
        for schema in binary["x-attnd-tensors"].values():
            assert schema["dtype"] and schema["shape"].startswith("[") and schema["description"]
        spelled = body["content"][JSON]["schema"]["properties"].get("tensors", {})
        listed = set(spelled.get("properties", {}))
        assert listed == {one for one in names if "{" not in one}


def test_control_routes_speak_json_only() -> None:
    for operation in OPERATIONS:
        if operation.name not in TENSORS and operation.has_body:
            assert set(operation_object(operation)["requestBody"]["content"]) == {JSON}


def test_states_of_levels_are_reported_by_pattern() -> None:
    answer = operation_object(BY_NAME["cascade"])["responses"]["200"]["content"][JSON]["schema"]
    patterns = answer["properties"]["tensors"]["patternProperties"]
    assert set(patterns) == {r"^o\.[0-9]+$", r"^lse\.[0-9]+$"}


def test_a_merge_documents_both_of_its_forms() -> None:
    content = operation_object(BY_NAME["merge"])["requestBody"]["content"]
    schema = content[SAFETENSORS]["schema"]["x-attnd-tensors"]["o"]["shape"]
    assert schema == "[T, n, H, D], or [nnz, H, D] with indptr"
    shape = content[JSON]["schema"]["properties"]["tensors"]["properties"]["lse"]["properties"]
    assert (shape["shape"]["minItems"], shape["shape"]["maxItems"]) == (2, 3)


@each_operation
def test_every_error_is_reported_as_a_problem(operation: Operation) -> None:
    responses = operation_object(operation)["responses"]
    never: set[type] = {Cancelled}  # on the road
    never |= set() if operation.has_body else {UnsupportedMediaType}
    errors = {str(kind.status) for cls, kind in KINDS.items() if cls not in never}
    assert set(responses) == errors | {str(operation.status)}
    for status in errors:
        assert set(responses[status]["content"]) == {PROBLEM}
        assert "`" in responses[status]["description"]


def test_parameters_of_the_path_are_not_in_the_body() -> None:
    (parameter,) = operation_object(BY_NAME["truncate"])["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("id", "path", True)
    body = schemas()["TruncateFields"]
    assert set(body["properties"]) == {"length", "keep", "layer", "reserve", "token_ids"}
    assert body["required"] == ["length"]


@pytest.mark.parametrize("name", ["commit", "export_sequence", "import_sequence"])
def test_parameters_of_the_path_are_not_in_a_body_with_tensors(name: str) -> None:
    document = operation_object(BY_NAME[name])
    assert [one["name"] for one in document["parameters"]] == ["id"]
    body = document["requestBody"]["content"][JSON]["schema"]
    assert "id" not in body["properties"] and "id" not in body["required"]


def test_parameters_of_a_query_are_reported_with_their_rules() -> None:
    parameters = operation_object(BY_NAME["list_sequences"])["parameters"]
    after, limit = parameters
    assert (after["in"], after["required"], after["schema"]["type"]) == ("query", False, "string")
    assert (limit["schema"]["minimum"], limit["schema"]["maximum"]) == (1, 1000)


@pytest.mark.parametrize(
    "of", ["PageTable", "Append", "Gather", "Decode", "Prefill", "CascadeLevel"]
)
def test_ids_are_reported_to_be_different(of: str) -> None:
    schema = schemas()[f"{of}Fields"]["properties"]["sequences"]
    assert schema["uniqueItems"] is True and schema["minItems"] == 1


@pytest.mark.parametrize(
    ("model", "field", "least"),
    [
        ("PrefillFields", "qo_indptr", 2),
        ("RaggedPrefillFields", "qo_indptr", 2),
        ("RaggedPrefillFields", "kv_indptr", 2),
        ("CascadeLevelFields", "qo_indptr", 2),
        ("AppendFields", "append_indptr", 2),
        ("MergeFields", "indptr", 1),
    ],
)
def test_prefix_sums_are_reported_not_to_be_empty(model: str, field: str, least: int) -> None:
    schema = schemas()[model]["properties"][field]
    assert schema.get("anyOf", [schema])[0]["minItems"] == least


@pytest.mark.parametrize(
    ("operation", "tensor", "dtype"),
    [("commit", "token_ids", "U32"), ("commit", "page_keys", "U8"), ("prefill", "mask", "BOOL")],
)
def test_the_range_of_a_tensors_integers_is_the_one_that_is_read(
    operation: str, tensor: str, dtype: str
) -> None:
    def is_read(value: object) -> bool:
        body = {"tensors": {tensor: {"dtype": dtype, "shape": [1], "data": [value]}}}
        try:
            image_of_json(json.dumps(body).encode(), {})
        except InvalidRequest:
            return False
        return True

    content = operation_object(BY_NAME[operation])["requestBody"]["content"]
    schema = content[JSON]["schema"]["properties"]["tensors"]["properties"][tensor]
    items = schema["properties"]["data"]["items"]
    *others, integer = items.get("anyOf", [items])
    assert others == ([{"type": "boolean"}] if is_read(True) else [])
    low, high = integer["minimum"], integer["maximum"]
    assert integer["type"] == "integer" and is_read(low) and is_read(high)
    assert not any(map(is_read, (low - 1, high + 1, low + 0.5, "NaN")))


def test_every_field_of_a_request_is_described_or_plain() -> None:
    plain = {"layer", "sequences", "id", "length"}
    for operation in OPERATIONS:
        for name, field in operation.fields.model_fields.items():
            assert field.description or name in plain, (operation.name, name)


EXAMPLES = bodies(INFO.num_kv_heads, INFO.head_dim, INFO.page_size)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_right_requests(name: str) -> None:
    document = operation_object(BY_NAME[name], EXAMPLES[name])
    example = document["requestBody"]["content"][JSON]["example"]
    given = dict.fromkeys(BY_NAME[name].path_names, "chat-1")
    parts = image_of_json(json.dumps(example).encode(), given)
    room = sum(map(len, parts[1:]))
    request = prepare(BY_NAME[name], bytes(parts[0][8:]), room, INFO)
    layout = read_layout(bytes(parts[0][8:]), room)
    assert TypeAdapter(BY_NAME[name].fields).validate_python(layout.fields) == request.fields


def test_every_operation_has_its_answer_in_the_table_of_clients() -> None:
    assert ROUTES.keys() - ANSWERS.keys() == {"export_sequence"}
    assert InfoAnswer.model_fields.keys() == layout_of(Info).members.keys(), (
        "the engine's own model"
    )
    for kind in [one for one in ANSWERS.values() if isinstance(one, type)]:
        texts = dict(TEXT.findall(inspect.getdoc(kind) or ""))
        assert texts.keys() <= {one.name for one in fields(kind)}, "texts of fields that are gone"
        described = schemas().get(kind.__name__, {"properties": {}})["properties"]
        for name in described.keys() & texts.keys():
            assert described[name]["description"] == " ".join(texts[name].split())


def test_arrays_are_tensors_also_where_their_type_is_an_alias(monkeypatch: Any) -> None:
    """`type NDArray[S] = ...`, as numpy 2.5 has it."""
    scalar = TypeVar("scalar", bound=np.generic)
    alias: Any = TypeAliasType("alias", np.ndarray[Any, np.dtype[scalar]], type_params=(scalar,))
    monkeypatch.setattr(answer_table, "ARRAYS", (*ARRAYS[:1], alias))
    made = make_dataclass("made", [("o", alias[np.float32]), ("count", int)])
    layout = layout_of(made)
    assert (layout.tensors, layout.members) == (("o",), {"count": int})
