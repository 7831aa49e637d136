"""The table: declarations that hold together; docs/road.md has their numbers and paths."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from attnd.wire.dtypes import DTYPES
from declared import prepared, queries, rows

from service.doors.http.endpoints.operation import query_values
from service.errors import Forbidden, InvalidRequest
from service.operations.schema.spec import Operation
from service.operations.table import BY_NAME, BY_NUMBER, OPERATIONS
from service.tenants import SCOPES, tenant_of


def test_every_operation_has_a_name_and_a_number_of_its_own() -> None:
    assert len(BY_NAME) == len(BY_NUMBER) == len(OPERATIONS)


def test_calls_that_only_give_pages_back_are_marked() -> None:
    assert {one.name for one in OPERATIONS if one.frees} == {
        *("delete_sequence", "delete_sequences", "truncate", "truncate_sequences"),
        *("release_lease", "unpin", "evict", "clear", "cancel_import"),
        *("delete_records", "clear_records", "release_records"),
    }


def test_every_operation_declares_where_it_goes_in_a_cluster() -> None:
    routed = {one.name: one.routed for one in OPERATIONS}
    assert {name for name, how in routed.items() if how == "sequence"} >= {
        *("get_sequence", "delete_sequence", "truncate", "commit")
    }
    assert {name for name, how in routed.items() if how == "sequences"} == {
        *("append", "gather", "decode", "prefill", "truncate_sequences", "commit_sequences")
    }
    with pytest.raises(ValueError, match="declare it"):
        replace(BY_NAME["info"], routing=None)


READ = (
    *("list_sequences", "get_sequence", "page_table", "gather", "info", "pool", "events", "holds"),
    *("decode", "prefill", "ragged_prefill", "cascade", "merge", "export_sequence", "get_import"),
    *("match_prefix", "prefetch", "renew_lease", "release_lease"),
    *("contains_records", "get_records", "touch_records", "release_records"),
)
APPEND = (
    *("create_sequences", "append", "truncate", "truncate_sequences", "commit", "commit_sequences"),
    *("delete_sequence", "delete_sequences", "import_sequence", "cancel_import"),
    *("pin", "unpin", "evict", "clear"),
    *("put_records", "delete_records", "clear_records"),
)
ADMIN = ("get_namespace", "set_namespace", "list_namespaces", "engines", "drain_engine", "snapshot")
AB = {"layer": 0, "sequences": ["a", "b"]}
WITH_ROWS = {"q": queries(2), "k": rows(2), "v": rows(2)}
NEEDED: list[tuple[str, set[str], dict[str, Any], dict[str, Any]]] = [
    *((name, {"read"}, {}, {}) for name in READ),
    *((name, {"append"}, {}, {}) for name in APPEND),
    *((name, {"admin"}, {}, {}) for name in ADMIN),
    ("decode", {"read"}, AB, {"q": queries(2)}),
    ("decode", {"read", "append"}, AB, WITH_ROWS),
    ("prefill", {"read", "append"}, AB | {"qo_indptr": [0, 1, 2]}, WITH_ROWS),
]
"""The scopes that docs/api.md says a call needs."""


def test_every_operation_needs_a_scope() -> None:
    assert BY_NAME.keys() == {*READ, *APPEND, *ADMIN}


@pytest.mark.parametrize(("name", "needed", "fields", "tensors"), NEEDED)
def test_a_key_without_a_scope_is_refused_and_no_other(
    name: str, needed: set[str], fields: dict[str, Any], tensors: dict[str, Any]
) -> None:
    """Before anything else of the request is read."""
    for count in (1, 2, 3):
        for scopes in combinations(SCOPES, count):
            try:
                prepared(name, fields, tensors, tenant_of("a", scopes))
                missing = None
            except Forbidden as refused:
                missing = refused.extra["scope"]
            except InvalidRequest:
                missing = None
            lacks = needed - {*scopes}
            assert missing in lacks if lacks else missing is None, (name, scopes)


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


@pytest.mark.parametrize("text", ["", "two", "1.0", "\u0661", "9" * 5000, "--1", " 1"])
def test_text_that_is_no_number_is_left_for_the_fields_to_reject(text: str) -> None:
    assert query_values(BY_NAME["list_sequences"], [("limit", text)]) == {"limit": text}
