"""Valid requests: the values that the engine derives from their fields, once per header."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from declared import INFO, KV_HEADS, QO_HEADS, prepared, queries, rows

from service.errors import InvalidRequest
from service.operations.schema.fields import check_mask_length
from service.operations.schema.spec import Prepared

AB = {"layer": 1, "sequences": ["a", "b"]}


def same(array: Any, values: list[int]) -> bool:
    return array.dtype == np.int32 and array.tolist() == values


def test_the_fields_are_the_checked_ones_and_kept_once() -> None:
    request = prepared("decode", AB, {"q": queries(2)})
    assert request.operation.name == "decode"
    assert request.fields.layer == 1 and request.layout.fields == {}
    assert [entry.name for entry in request.layout.entries] == ["q"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_decode_takes_every_dtype_with_and_without_rows_to_append(dtype: Any) -> None:
    q, kv = rows(2, QO_HEADS, dtype), rows(2, dtype=np.float32)
    for tensors in ({"q": q}, {"q": q, "k": kv, "v": kv}):
        fields = prepared("decode", AB, tensors).fields
        assert fields.ids == ("a", "b")
        assert same(fields.qo_indptr_array, [0, 1, 2])
        assert fields.offset_array is None


def test_append_gives_one_row_to_each_or_as_requested() -> None:
    kv = {"k": rows(2), "v": rows(2)}
    fields = prepared("append", AB, kv).fields
    assert same(fields.indptr(2), [0, 1, 2])
    fields = prepared("append", {**AB, "append_indptr": [0, 2, 2], "offsets": [5, 0]}, kv).fields
    assert same(fields.indptr(2), [0, 2, 2]) and same(fields.offset_array, [5, 0])


def test_an_append_may_be_empty() -> None:
    kv = {"k": rows(0), "v": rows(0)}
    assert same(
        prepared("append", {**AB, "append_indptr": [0, 0, 0]}, kv).fields.indptr(0), [0] * 3
    )


@pytest.mark.parametrize("mask", [{"mask": np.ones(7, bool)}, {"packed_mask": np.ones(3, "u1")}])
def test_prefill_leaves_the_length_of_a_mask_to_the_pool(mask: dict[str, Any]) -> None:
    fields = {**AB, "qo_indptr": [0, 2, 3], "causal": True}
    request = prepared("prefill", fields, {"q": queries(3), "k": rows(3), "v": rows(3), **mask})
    assert same(request.fields.qo_indptr_array, [0, 2, 3])


@pytest.mark.parametrize(
    "mask", [{}, {"mask": np.ones(2 * 3 + 1, bool)}, {"packed_mask": np.ones(2, "u1")}]
)
def test_ragged_prefill_has_its_own_heads_and_dimension(mask: dict[str, Any]) -> None:
    fields = {"qo_indptr": [0, 2, 3], "kv_indptr": [0, 3, 4]}
    q, kv = np.zeros((3, 6, 24), "f2"), np.zeros((4, 3, 24), "f2")
    request = prepared("ragged_prefill", fields, {"q": q, "k": kv, "v": kv, **mask})
    assert same(request.fields.qo_indptr_array, [0, 2, 3])
    assert same(request.fields.kv_indptr_array, [0, 3, 4])


def test_levels_of_a_cascade_may_leave_out_rows_at_both_ends() -> None:
    levels = [
        {"sequences": ["root"], "qo_indptr": [0, 4]},
        {"sequences": ["a", "b"], "qo_indptr": [1, 2, 3]},
    ]
    fields = prepared("cascade", {"layer": 0, "levels": levels}, {"q": queries(4)}).fields
    assert [level.ids for level in fields.levels] == [("root",), ("a", "b")]
    assert same(fields.levels[1].qo_indptr_array, [1, 2, 3])


def merge(fields: dict[str, Any], *shape: int) -> Prepared:
    return prepared(
        "merge", fields, {"o": np.zeros(shape, "f2"), "lse": np.zeros(shape[:-1], "f4")}
    )


def test_merge_takes_dense_and_ragged_states() -> None:
    assert merge({}, 3, 2, 1, 4).fields.indptr_array is None
    assert same(merge({"indptr": [0, 2, 3]}, 3, 1, 4).fields.indptr_array, [0, 2, 3])
    assert same(merge({"indptr": [0]}, 0, 1, 4).fields.indptr_array, [0])


def test_gather_takes_all_tokens_or_some() -> None:
    fields = prepared("gather", AB).fields
    assert (fields.ids, fields.start, fields.stop, fields.dtype) == (("a", "b"), 0, None, None)
    fields = prepared("gather", {**AB, "start": 5, "stop": 5, "dtype": "bf16"}).fields
    assert (fields.start, fields.stop) == (5, 5)


def test_as_many_sequences_as_one_create_takes_are_prepared() -> None:
    new = [{"id": f"fork-{i}", "parent": "root"} for i in range(20_000)]
    assert len(prepared("create_sequences", {"sequences": new}).fields.sequences) == 20_000
    assert len(prepared("create_sequences", {"sequences": [{}] * 65536}).fields.sequences) == 65536


def test_operations_without_tensors_are_prepared_by_their_fields() -> None:
    assert prepared("list_sequences", {}).fields.limit == 100
    assert prepared("truncate", {"id": "a", "length": 0}).fields.id == "a"
    assert prepared("page_table", {"sequences": ["a"]}).fields.ids == ("a",)
    for name in ("info", "pool"):
        prepared(name, {})


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
