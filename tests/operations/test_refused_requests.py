"""Requests that break a rule: each is refused by its header, with field, value and rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declared import HEAD_DIM, LAYERS, QO_HEADS, prepared, queries, rows

from service.errors import InvalidRequest
from service.operations.schema.page_names import ExtraKey, check_extra

Q1, KV1, KV2 = queries(1), rows(1), rows(2)
MANY = [f"s{number}" for number in range(4097)]
KV4097 = rows(4097)
A = {"layer": 0, "sequences": ["a"]}
P = {**A, "qo_indptr": [0, 1]}
R = {"qo_indptr": [0, 1], "kv_indptr": [0, 1]}
KV = {"k": KV1, "v": KV1}
QKV = {"q": Q1, **KV}
LSE1 = np.zeros((1, QO_HEADS), np.float32)


def level(*sequences: str, indptr: Any = (0, 1)) -> dict[str, Any]:
    return {"sequences": list(sequences), "qo_indptr": list(indptr)}


def cascade(*levels: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"layer": 0, "levels": list(levels), **more}


def new(*sequences: dict[str, Any]) -> dict[str, Any]:
    return {"sequences": list(sequences)}


def zeros(*sizes: int, dtype: Any = np.float32) -> Any:
    return np.zeros(sizes, dtype)


def state(*sizes: int) -> dict[str, Any]:
    return {"o": zeros(*sizes), "lse": zeros(*sizes[:-1])}


AB = {"layer": 0, "sequences": ["a", "b"]}
TWO, TWICE = level("a", indptr=(0, 2)), level("a", "a", indptr=(0, 1, 1))
LARGE_CASCADE = cascade(level("a"), level(*MANY[:4096], indptr=range(4097)))
LARGE_RAGGED = {"qo_indptr": [*range(4098)], "kv_indptr": [*range(4098)]}
QKV4097 = {"q": queries(4097), "k": KV4097, "v": KV4097}
F, NONE = zeros(), zeros(1, 0, 64)
MASKS = {"mask": np.ones(1, bool), "packed_mask": np.ones(1, np.uint8)}
PACKED = {"q": Q1, "k": KV2, "v": KV2, "packed_mask": np.ones(2, np.uint8)}
Case = tuple[str, dict[str, Any], dict[str, Any], str, str]

OF_FIELDS: list[Case] = [
    ("create_sequences", {}, {}, "sequences", "must be given"),
    ("create_sequences", {"sequences": []}, {}, "sequences", "at least 1"),
    (
        "create_sequences",
        {"sequences": [{}] * 1025},
        {},
        "sequences",
        "at most 1024 entries: send more",
    ),
    (
        "delete_sequences",
        {"ids": [f"s{n}" for n in range(1025)]},
        {},
        "ids",
        "at most 1024 entries",
    ),
    (
        "match_prefix",
        {},
        {"token_ids": zeros(2**17 + 1, dtype="u4")},
        "token_ids",
        "131072 in a call",
    ),
    (
        "commit",
        {"id": "a"},
        {"page_keys": zeros(2**17 + 1, 16, dtype="u1")},
        "page_keys",
        "further",
    ),
    (
        "truncate_sequences",
        {"sequences": [f"s{n}" for n in range(513)], "lengths": [0] * 513},
        {},
        "sequences",
        "at most 512 entries: send more calls",
    ),
    ("create_sequences", new({"id": "a"}, {"id": "a"}), {}, "sequences", "duplicate id"),
    ("create_sequences", {"sequences": [{"id": "a/b"}]}, {}, "sequences.0.id", "pattern"),
    ("create_sequences", new({"id": "."}), {}, "sequences.0.id", "and not . or .."),
    ("create_sequences", new({"id": "..."}, {"id": ".."}), {}, "sequences.1.id", "and not . or .."),
    ("import_sequence", {"id": ".."}, {}, "id", "and not . or .."),
    ("create_sequences", {"sequences": [{}, {"length": 1}]}, {}, "sequences.1", "requires parent"),
    ("create_sequences", {"sequences": [{"color": 1}]}, {}, "sequences.0.color", "no such field"),
    ("list_sequences", {"limit": 0}, {}, "limit", "greater than or equal to 1"),
    ("list_sequences", {"limit": 1001}, {}, "limit", "less than or equal to 1000"),
    ("list_sequences", {"limit": "2"}, {}, "limit", "integer"),
    ("list_sequences", {"after": "a b"}, {}, "after", "pattern"),
    ("get_sequence", {}, {}, "id", "must be given"),
    ("get_sequence", {"id": "a b"}, {}, "id", "pattern"),
    ("delete_sequence", {"id": "a", "force": True}, {}, "force", "no such field"),
    ("truncate", {"id": "a"}, {}, "length", "must be given"),
    ("truncate", {"id": "a", "length": -1}, {}, "length", "greater than or equal to 0"),
    ("page_table", {"sequences": MANY}, {}, "sequences", "at most 4096"),
    ("gather", {**A, "sequences": MANY}, {}, "sequences", "at most 4096"),
    ("append", {**A, "sequences": MANY}, {"k": KV4097, "v": KV4097}, "sequences", "at most 4096"),
    ("decode", {**A, "sequences": MANY}, {"q": queries(4097)}, "sequences", "at most 4096"),
    ("page_table", {"sequences": ["a", "a"]}, {}, "sequences", "duplicate id"),
    ("page_table", {"sequences": ["a"], "layer": LAYERS}, {}, "layer", "below num_layers = 2"),
    ("info", {"x": 1}, {}, "x", "no such field"),
    ("append", {"sequences": ["a"]}, KV, "layer", "must be given"),
    ("append", {**A, "layer": LAYERS}, KV, "layer", "below num_layers = 2"),
    ("decode", {**A, "layer": LAYERS}, {"q": queries(1)}, "layer", "below num_layers = 2"),
    ("append", {**A, "layer": -1}, KV, "layer", "greater than or equal to 0"),
    ("append", {**A, "layer": True}, KV, "layer", "integer"),
    ("append", {**A, "layer": "0"}, KV, "layer", "integer"),
    ("append", {**A, "layer": 0.0}, KV, "layer", "integer"),
    ("append", {**A, "sequences": []}, KV, "sequences", "at least 1"),
    ("append", {**A, "sequences": ["a", "a"]}, {"k": KV2, "v": KV2}, "sequences", "duplicate id"),
    ("append", {**A, "sequences": ["a b"]}, KV, "sequences.0", "pattern"),
    ("append", {**A, "sequences": ["a\n"]}, KV, "sequences.0", "pattern"),
    ("append", {**A, "sequences": ["x" * 129]}, KV, "sequences.0", "at most 128"),
    ("append", {**A, "sequences": [""]}, KV, "sequences.0", "pattern"),
    ("append", {**A, "append_indptr": []}, KV, "append_indptr", "at least 2"),
    ("append", {**A, "append_indptr": [0]}, KV, "append_indptr", "at least 2"),
    ("append", {**A, "append_indptr": [1, 1]}, KV, "append_indptr", "start at 0"),
    ("append", {**A, "append_indptr": [0, 2]}, KV, "append_indptr", "not exceed 1"),
    ("append", {**A, "append_indptr": [0, 2**31]}, KV, "append_indptr.1", "2147483647"),
    ("append", {**A, "append_indptr": [0, 1, 1]}, KV, "append_indptr", "must be 2"),
    ("append", {**A, "offsets": [0, 0]}, KV, "offsets", "must be 1"),
    ("append", {**A, "offsets": [-1]}, KV, "offsets.0", "greater than"),
    ("append", {**A, "causal": True}, KV, "causal", "no such field"),
    ("decode", {**A, "causal": True}, {"q": Q1}, "causal", "no such field"),
    ("decode", {**A, "sm_scale": 0.0}, {"q": Q1}, "sm_scale", "greater than"),
    ("decode", {**A, "sm_scale": -1.0}, {"q": Q1}, "sm_scale", "greater than"),
    ("decode", {**A, "sm_scale": 1e300}, {"q": Q1}, "sm_scale", "less than"),
    ("decode", {**A, "sm_scale": "1"}, {"q": Q1}, "sm_scale", "number"),
    ("decode", {**A, "logits_soft_cap": -1.0}, {"q": Q1}, "logits_soft_cap", "greater than"),
    ("decode", {**A, "sm_scale": 3e38}, {"q": Q1}, "sm_scale", "less than"),
    ("decode", {**A, "sm_scale": 1e-38}, {"q": Q1}, "sm_scale", "greater than"),
    ("decode", {**A, "logits_soft_cap": 1e-30}, {"q": Q1}, "logits_soft_cap", "at least 1e-10"),
    ("decode", {**A, "logits_soft_cap": 3e38}, {"q": Q1}, "logits_soft_cap", "less than"),
    ("decode", {**A, "window_left": -2}, {"q": Q1}, "window_left", "greater than"),
    ("decode", {**A, "window_left": 1.5}, {"q": Q1}, "window_left", "integer"),
    ("decode", {**A, "lse_base": "10"}, {"q": Q1}, "lse_base", "'e' or '2'"),
    ("decode", {**A, "cascade": "maybe"}, {"q": Q1}, "cascade", "'auto'"),
    ("prefill", A, {"q": Q1}, "qo_indptr", "must be given"),
    ("prefill", {**A, "qo_indptr": []}, {"q": Q1}, "qo_indptr", "at least 2"),
    ("prefill", {**A, "qo_indptr": [0, 0]}, {"q": Q1}, "qo_indptr", "must end at 1"),
    ("prefill", {**AB, "qo_indptr": [0, 2, 1]}, {"q": Q1}, "qo_indptr", "must not decrease"),
    ("ragged_prefill", {**R, "cascade": "auto"}, QKV, "cascade", "no such field"),
    ("ragged_prefill", {**R, "kv_indptr": [0, 0, 1]}, QKV, "kv_indptr", "must be 2"),
    ("ragged_prefill", {"qo_indptr": [0], "kv_indptr": [0]}, QKV, "qo_indptr", "at least 2"),
    ("cascade", cascade(), {"q": Q1}, "levels", "at least 1"),
    ("cascade", cascade(*[level("a")] * 17), {"q": Q1}, "levels", "at most 16"),
    ("cascade", LARGE_CASCADE, {"q": queries(4096)}, "levels", "together at most 4096 in a call"),
    ("ragged_prefill", LARGE_RAGGED, QKV4097, "qo_indptr", "at most 4096 requests in a call: send"),
    ("cascade", cascade(level("a"), layer=LAYERS), {"q": Q1}, "layer", "num_layers"),
    ("cascade", cascade({"sequences": ["a"]}), {"q": Q1}, "levels.0.qo_indptr", "must be given"),
    ("cascade", cascade(level("a"), TWO), {"q": Q1}, "levels.1.qo_indptr", "must not exceed 1"),
    ("cascade", cascade(TWICE), {"q": Q1}, "levels.0.sequences", "duplicate id"),
    ("cascade", cascade(level("a"), window_left=3), {"q": Q1}, "window_left", "no such field"),
    ("merge", {"indptr": []}, {"o": Q1, "lse": LSE1}, "indptr", "at least 1"),
    ("merge", {"indptr": [0, 2]}, {"o": Q1, "lse": LSE1}, "indptr", "must not exceed 1"),
    ("gather", {**A, "dtype": "fp8_e4m3"}, {}, "dtype", "'fp32'"),
    ("gather", {**A, "start": 3, "stop": 2}, {}, "stop", "start = 3"),
    ("gather", {**A, "start": -1}, {}, "start", "greater than"),
    ("gather", {**A, "layer": 2}, {}, "layer", "num_layers"),
    ("gather", {"layer": 0, "sequences": ["a", "a"]}, {}, "sequences", "duplicate id"),
]

OF_TENSORS: list[Case] = [
    ("append", A, {"k": KV1}, "tensors.v", "must be given"),
    ("append", A, {"k": KV1, "v": KV1, "q": Q1}, "tensors.q", "no such tensor"),
    ("append", A, {"k": KV2, "v": KV2}, "k.shape", "must be [1, 2, 64]"),
    ("append", A, {"k": KV1, "v": KV2}, "v.shape", "must be [1, 2, 64]"),
    ("append", {**A, "append_indptr": [0, 2]}, {"k": KV2, "v": KV1}, "v.shape", "[2, 2, 64]"),
    ("append", A, {"k": KV1[:, :1], "v": KV1[:, :1]}, "k.shape", "must be [1, 2, 64]"),
    ("append", A, {"k": KV1[..., :-1], "v": KV1[..., :-1]}, "k.shape", "must be [1, 2, 64]"),
    ("append", A, {"k": KV1[0], "v": KV1[0]}, "k.shape", "must be [1, 2, 64]"),
    ("append", {**A, "append_indptr": [0, 0]}, {"k": F, "v": F}, "k.shape", "[n, 2, 64]"),
    ("append", A, {"k": KV1.astype(np.float64), "v": KV1}, "k.dtype", "one of F32, F16, BF16"),
    ("append", A, {"k": KV1.astype(np.uint8), "v": KV1}, "k.dtype", "one of F32, F16, BF16"),
    ("append", A, {"k": KV1, "v": KV1.astype(np.float16)}, "v.dtype", "that of k, F32"),
    ("decode", A, {}, "tensors.q", "must be given"),
    ("decode", A, {"q": Q1, "k": KV1}, "tensors.v", "together or not at all"),
    ("decode", A, {"q": Q1, "v": KV1}, "tensors.k", "together or not at all"),
    ("decode", A, {"q": queries(2)}, "q.shape", "must be [1, num_qo_heads, 64]"),
    ("decode", A, {"q": zeros(1, QO_HEADS)}, "q.shape", "must be [1, num_qo_heads, 64]"),
    ("decode", A, {"q": zeros(1, 3, HEAD_DIM)}, "q.shape", "multiple of num_kv_heads = 2"),
    ("decode", A, {"q": zeros(1, 0, HEAD_DIM)}, "q.shape", "num_qo_heads at least 1"),
    ("decode", A, {"q": zeros(1, 65536, HEAD_DIM, dtype="f2")}, "q.shape", "at most 65535"),
    ("decode", A, {"q": zeros(1, QO_HEADS, HEAD_DIM + 1)}, "q.shape", "must be [1, num_qo_heads"),
    ("decode", A, {"q": Q1.astype(np.float64)}, "q.dtype", "one of F32, F16, BF16"),
    ("decode", A, {"q": Q1, "mask": np.ones(1, bool)}, "tensors.mask", "no such tensor"),
    ("prefill", P, {"q": Q1, "k": KV2, "v": KV2}, "k.shape", "must be [1, 2, 64]"),
    ("prefill", P, {"q": Q1, "mask": np.ones(1, np.uint8)}, "mask.dtype", "must be BOOL"),
    ("prefill", P, {"q": Q1, "mask": np.ones((1, 1), bool)}, "mask.shape", "one dimension"),
    ("prefill", P, {"q": Q1, "packed_mask": np.ones(1, bool)}, "packed_mask.dtype", "must be U8"),
    ("prefill", P, {"q": Q1, **MASKS}, "tensors.packed_mask", "cannot be combined"),
    ("ragged_prefill", R, {**QKV, "k": NONE, "v": NONE}, "k.shape", "least 1"),
    ("ragged_prefill", R, {**QKV, "k": zeros(1, 3, 64), "v": zeros(1, 3, 64)}, "q.shape", "= 3"),
    ("ragged_prefill", R, {**QKV, "q": zeros(1, 4, 32)}, "q.shape", "[n, num_qo_heads, 64]"),
    ("ragged_prefill", R, {**QKV, "v": KV2}, "v.shape", "[1, 2, 64]"),
    ("ragged_prefill", R, {**QKV, "q": Q1.astype("f2")}, "k.dtype", "that of q, F16"),
    ("ragged_prefill", R, {**QKV, "mask": np.ones(2, bool)}, "mask.shape", "needs 1 elements"),
    ("ragged_prefill", {**R, "kv_indptr": [0, 2]}, PACKED, "packed_mask.shape", "needs 1 bytes"),
    ("merge", {}, {"o": Q1.astype("f8"), "lse": LSE1}, "o.dtype", '.astype("float32")'),
    ("cascade", cascade(level("a")), QKV, "tensors.k", "no such tensor"),
    ("merge", {}, {"o": Q1}, "tensors.lse", "must be given"),
    ("merge", {}, {"o": Q1, "lse": LSE1}, "o.shape", "must be [T, n, H, head_dim]"),
    ("merge", {"indptr": [0, 1]}, {"o": Q1, "lse": LSE1.astype("f2")}, "lse.dtype", "must be F32"),
    ("merge", {"indptr": [0, 1]}, {"o": Q1, "lse": zeros(2, QO_HEADS)}, "lse.shape", "be [1, 4]"),
    ("merge", {}, state(1, 1, 0, 8), "o.shape", "at least 1"),
    ("merge", {}, state(1, 1, 8, 0), "o.shape", "at least 1"),
    ("merge", {"indptr": [0] * 20_000}, state(0, 1024, 1024), "o.shape", "too large an answer"),
    ("merge", {}, state(2**20, 0, 64, 64), "o.shape", "too large an answer"),
    ("gather", A, {"q": Q1}, "tensors.q", "no such tensor"),
    ("info", {}, {"q": Q1}, "tensors.q", "no such tensor"),
    ("create_sequences", {"sequences": [{}]}, {"q": Q1}, "tensors.q", "no such tensor"),
]


@pytest.mark.parametrize(
    "case",
    [*OF_FIELDS, *OF_TENSORS],
    ids=[f"{i}-{case[0]}-{case[3]}" for i, case in enumerate([*OF_FIELDS, *OF_TENSORS])],
)
def test_a_request_that_breaks_a_rule_is_named_in_the_error(case: Case) -> None:
    name, fields, tensors, field, rule = case
    with pytest.raises(InvalidRequest) as reply:
        prepared(name, fields, tensors)
    assert reply.value.field == field
    assert rule in reply.value.rule, reply.value


def extra(*firsts: int, key: str = "0c") -> list[dict[str, Any]]:
    return [{"first_token": first, "key": key} for first in firsts]


IDS8: dict[str, Any] = {"token_ids": list(range(8))}
BATCH: dict[str, Any] = IDS8 | {"sequences": ["a", "b"], "names_indptr": [0, 2, 8]}
TENSOR = {"token_ids": np.zeros(8, np.uint32)}
OF_EXTRA: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("match_prefix", {"extra": extra(3, 2)}, {}, "extra.1.first_token", "above 3, the one before"),
    ("prefetch", {"extra": extra(3, 3)}, {}, "extra.1.first_token", "above 3"),
    ("match_prefix", {"extra": extra(8)}, {}, "extra.0.first_token", "below 8, the number of"),
    ("commit", {"id": "a", "extra": extra(9)}, {}, "extra.0.first_token", "below 8"),
    ("match_prefix", {"extra": extra(-1)}, {}, "extra.0.first_token", "equal to 0"),
    ("match_prefix", {"extra": extra(2**80)}, {}, "extra.0.first_token", ""),
    ("match_prefix", {"extra": extra(1, key="")}, {}, "extra.0.key", "pattern"),
    ("match_prefix", {"extra": extra(1, key="0C")}, {}, "extra.0.key", "pattern"),
    ("match_prefix", {"extra": extra(1, key="0c" * 33)}, {}, "extra.0.key", "pattern"),
    ("match_prefix", {"extra": extra(*range(257))}, {}, "extra", "at most 256"),
    ("create_sequences", new({"prefix": IDS8 | {"extra": extra(8)}}), {},
     "sequences.0.prefix.extra.0.first_token", "below 8"),
    ("create_sequences", new({"prefix": {"extra": extra(7, 8)}}), TENSOR,
     "sequences.0.prefix.extra.1.first_token", "below 8"),
    ("create_sequences",
     new({"prefix": {"extra": extra(6)}}, {"prefix": {}}) | {"prefix_indptr": [0, 6, 8]}, TENSOR,
     "sequences.0.prefix.extra.0.first_token", "below 6"),
    ("create_sequences", new({"prefix": {"page_keys": ["0f" * 16], "extra": extra(0)}}), {},
     "sequences.0.prefix.extra", "goes with token_ids"),
    ("commit_sequences", BATCH | {"extra": [extra(2), []]}, {}, "extra.0.0.first_token", "below 2"),
    ("commit_sequences", BATCH | {"extra": [[]]}, {}, "extra", "must be 2, one per sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "tensors", "field", "rule"), OF_EXTRA)
def test_further_keys_are_in_order_within_the_prompt_and_short(
    name: str, fields: dict[str, Any], tensors: dict[str, Any], field: str, rule: str
) -> None:
    given = fields if name.endswith("sequences") else IDS8 | fields
    with pytest.raises(InvalidRequest) as reply:
        prepared(name, given, tensors)
    assert reply.value.field == field
    assert rule in reply.value.rule, reply.value


def test_a_page_has_at_most_four_further_keys() -> None:
    spread = [ExtraKey(**one) for one in extra(4, 5, 6, 7, 8, 9, 10, 11, 17)]
    check_extra("extra", spread, "token_ids", 18, 8)
    for page_size, wrong in ((16, "extra.4.first_token"), (10, "extra.4.first_token")):
        with pytest.raises(InvalidRequest, match="at most 4 in a page: give one digest") as reply:
            check_extra("extra", spread, "token_ids", 18, page_size)
        assert reply.value.field == wrong


def test_of_many_wrong_values_only_the_first_is_looked_at() -> None:
    with pytest.raises(InvalidRequest) as reply:
        prepared("page_table", {"sequences": list(range(4096))})
    assert reply.value.field == "sequences.0"


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(InvalidRequest) as reply:
        prepared("page_table", {"sequences": ["a"], "layer": list(range(30_000))})
    assert reply.value.field == "layer" and len(str(reply.value)) < 400


def test_two_fields_in_place_of_one_are_both_named() -> None:
    for fields, value in (({}, None), ({"ids": ["a"], "prefix": "a"}, "ids and prefix")):
        with pytest.raises(InvalidRequest) as refused:
            prepared("delete_sequences", fields, {})
        assert (refused.value.field, refused.value.value) == ("ids", value)


def test_heads_that_do_not_fit_are_shown_as_the_whole_shape() -> None:
    with pytest.raises(InvalidRequest) as reply:
        prepared("ragged_prefill", R, {**QKV, "k": zeros(1, 3, 64), "v": zeros(1, 3, 64)})
    assert (reply.value.field, reply.value.value) == ("q.shape", f"[1, {QO_HEADS}, 64]")
