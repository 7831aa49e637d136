"""The table: declarations that hold together; docs/road.md has their numbers and paths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attnd.wire.dtypes import DTYPES

from service.doors.http.endpoints.operation import query_values
from service.operations.schema.spec import Operation
from service.operations.table import BY_NAME, BY_NUMBER, OPERATIONS


def test_every_operation_has_a_name_and_a_number_of_its_own() -> None:
    assert len(BY_NAME) == len(BY_NUMBER) == len(OPERATIONS)


def test_calls_that_only_give_pages_back_are_marked() -> None:
    assert {one.name for one in OPERATIONS if one.frees} == {
        *("delete_sequence", "delete_sequences", "truncate", "truncate_sequences"),
        *("release_lease", "unpin", "evict", "clear", "cancel_import"),
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
