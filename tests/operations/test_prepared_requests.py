"""Valid requests: the values that the engine derives from their fields, once per header."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declared import INFO, KV_HEADS, prepared, queries, rows

from service.errors import InvalidRequest
from service.operations.schema.fields import check_mask_length

AB = {"layer": 1, "sequences": ["a", "b"]}


def same(array: Any, values: list[int]) -> bool:
    return array.dtype == np.int32 and array.tolist() == values


@pytest.mark.parametrize("mask", [{"mask": np.ones(7, bool)}, {"packed_mask": np.ones(3, "u1")}])
def test_prefill_leaves_the_length_of_a_mask_to_the_pool(mask: dict[str, Any]) -> None:
    fields = {**AB, "qo_indptr": [0, 2, 3], "causal": True}
    request = prepared("prefill", fields, {"q": queries(3), "k": rows(3), "v": rows(3), **mask})
    assert same(request.fields.qo_indptr_array, [0, 2, 3])


def test_a_pool_of_one_head_takes_any_number_of_query_heads() -> None:
    assert INFO.num_kv_heads == KV_HEADS
    for heads in (KV_HEADS, 7 * KV_HEADS):
        prepared("decode", AB, {"q": rows(2, heads)})


@pytest.mark.parametrize(
    ("size", "packed", "right"),
    [(7, False, True), (6, False, False), (2, True, True), (1, True, False), (0, True, False)],
)
def test_a_masks_length_is_held_to_the_stored_lengths(size: int, packed: bool, right: bool) -> None:
    lens = np.array([2, 1, 0], np.int32), np.array([3, 1, 9], np.int32)
    if right:
        check_mask_length(size, packed, *lens)
        return
    with pytest.raises(InvalidRequest, match=r"needs \d (bytes|elements)") as reply:
        check_mask_length(size, packed, *lens)
    assert reply.value.field == ("packed_mask" if packed else "mask")


def test_a_masks_length_may_pass_int32() -> None:
    lens = np.array([2**17], np.int32)
    check_mask_length(2**34, False, lens, lens)
    check_mask_length(2**31, True, lens, lens)


@pytest.mark.parametrize(
    ("operation", "fields"),
    [("delete_sequences", {"ids": ["a", "b"]}), ("page_table", AB)],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_ids_are_put_into_their_namespace_whether_they_were_read_before(
    operation: str, fields: dict[str, Any]
) -> None:
    made = prepared(operation, fields, {}).fields
    read = "names" if "ids" in fields else "ids"
    assert getattr(made, read) == ("a", "b")
    made.put_before_ids("team/")
    assert getattr(made, read) == ("team/a", "team/b")
