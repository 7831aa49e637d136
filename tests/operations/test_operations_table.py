"""The table: numbers and names that never change, and declarations that hold together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attnd.wire.dtypes import DTYPES

from service.errors import InvalidRequest
from service.operations.schema.query import query_values
from service.operations.schema.spec import Operation
from service.operations.table import BY_NAME, BY_NUMBER, OPERATIONS

NUMBERS = {
    "create_sequences": 1,
    "list_sequences": 2,
    "get_sequence": 3,
    "delete_sequence": 4,
    "truncate": 5,
    "page_table": 6,
    "append": 7,
    "gather": 8,
    "decode": 9,
    "prefill": 10,
    "ragged_prefill": 11,
    "cascade": 12,
    "merge": 13,
    "info": 14,
    "pool": 15,
    "match_prefix": 16,
    "commit": 17,
    "renew_lease": 18,
    "release_lease": 19,
    "pin": 20,
    "unpin": 21,
    "evict": 22,
    "clear": 23,
    "get_namespace": 24,
    "set_namespace": 25,
    "delete_sequences": 26,
    "events": 27,
    "export_sequence": 28,
    "import_sequence": 29,
    "get_import": 30,
    "cancel_import": 31,
    "engines": 32,
    "snapshot": 33,
    "claim": 34,
    "hand_over": 35,
    "drain_engine": 36,
    "list_namespaces": 37,
    "holds": 38,
    "truncate_sequences": 39,
    "commit_sequences": 40,
    "prefetch": 41,
}


def test_the_roads_numbers_never_change() -> None:
    assert {operation.name: operation.number for operation in OPERATIONS} == NUMBERS
    assert len(BY_NAME) == len(BY_NUMBER) == len(OPERATIONS)


def test_calls_that_only_give_pages_back_are_marked() -> None:
    assert {one.name for one in OPERATIONS if one.frees} == {
        *("delete_sequence", "delete_sequences", "truncate", "truncate_sequences"),
        *("release_lease", "unpin", "evict", "clear", "cancel_import"),
    }


def test_every_operation_declares_where_it_goes_in_a_cluster() -> None:
    routed = {one.name: one.routed for one in OPERATIONS}
    assert {name for name, how in routed.items() if how == "sequence"} >= {
        *("get_sequence", "delete_sequence", "truncate", "commit"),
    }
    assert {name for name, how in routed.items() if how == "sequences"} == {
        *("append", "gather", "decode", "prefill", "truncate_sequences", "commit_sequences"),
    }
    with pytest.raises(ValueError, match="declare it"):
        replace(BY_NAME["info"], routing=None)


def test_no_two_operations_share_method_and_path() -> None:
    assert len({(one.method, one.path) for one in OPERATIONS}) == len(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_a_declaration_holds_together(operation: Operation) -> None:
    fields = operation.fields.model_fields
    assert set(operation.path_names) <= set(fields)
    assert operation.has_body or set(fields) == {*operation.path_names, *operation.query_names}
    assert (operation.answer is None) == (operation.status == 204)
    for specs in (operation.takes, operation.gives):
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names)
        for spec in specs:
            assert set(spec.dtypes) <= set(DTYPES) and spec.shape and spec.words
            assert not spec.like or spec.like in names
    assert hash(operation) != hash(BY_NAME["info"]) or operation.name == "info"


def test_a_query_becomes_fields() -> None:
    query = query_values(BY_NAME["list_sequences"], [("limit", "2"), ("after", "7")])
    assert query == {"limit": 2, "after": "7"}
    assert query_values(BY_NAME["info"], []) == {}


@pytest.mark.parametrize("text", ["", "two", "1.0", "\u0661", "9" * 5000, "--1", " 1"])
def test_text_that_is_no_number_is_left_for_the_fields_to_reject(text: str) -> None:
    assert query_values(BY_NAME["list_sequences"], [("limit", text)]) == {"limit": text}


@pytest.mark.parametrize(
    ("name", "pairs", "field"),
    [
        ("info", [("x", "1")], "query"),
        ("decode", [("layer", "1")], "query"),
        ("get_sequence", [("id", "a")], "query"),
        ("list_sequences", [("x", "1")], "x"),
        ("list_sequences", [("limit", "1"), ("limit", "1")], "limit"),
    ],
)
def test_parameters_that_a_route_does_not_take_are_refused(
    name: str, pairs: list[tuple[str, str]], field: str
) -> None:
    with pytest.raises(InvalidRequest) as reply:
        query_values(BY_NAME[name], pairs)
    assert reply.value.field == field
