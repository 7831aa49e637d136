"""Batches over several engines: cut by sequences, joined in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.cluster.routing.batch_split import JOINED, join, split_batch
from service.errors import InvalidRequest
from service.operations.attention import DecodeFields, PrefillFields
from service.operations.prefix import CommitSequencesFields
from service.operations.rows import AppendFields, GatherFields
from service.operations.schema.fields import Fields
from service.operations.schema.page_names import ExtraKey
from service.operations.sequences import TruncateSequencesFields
from service.operations.table import BY_NAME

GROUPS = ([0, 3], [1], [2])


def dumped(fields: Fields) -> dict[str, Any]:
    return fields.model_dump(exclude_unset=True)


def test_rows_go_with_their_sequences() -> None:
    fields = AppendFields(
        layer=1,
        sequences=["a", "b", "c", "d"],
        append_indptr=[0, 2, 2, 3, 6],
        offsets=[5, 6, 7, 8],
    )
    k = np.arange(6.0).reshape(6, 1, 1)
    pieces = split_batch(dumped(fields), {"k": k}, GROUPS)
    assert [piece.fields["sequences"] for piece in pieces] == [["a", "d"], ["b"], ["c"]]
    assert [piece.fields["append_indptr"] for piece in pieces] == [[0, 2, 5], [0, 0], [0, 1]]
    assert [piece.fields["offsets"] for piece in pieces] == [[5, 8], [6], [7]]
    rows = [piece.arrays["k"].ravel().tolist() for piece in pieces]
    assert rows == [[0, 1, 3, 4, 5], [], [2]]
    replies = [({"lengths": [9, 11]}, {}), ({"lengths": [6]}, {}), ({"lengths": [8]}, {})]
    assert join(pieces, replies) == ({"lengths": [9, 6, 8, 11]}, {})


def test_rows_of_many_layers_go_with_their_sequences() -> None:
    fields = AppendFields(
        layers=[0, 1], sequences=["a", "b", "c", "d"], append_indptr=[0, 2, 2, 3, 6]
    )
    k = np.arange(12.0).reshape(2, 6, 1, 1)
    ids = np.arange(6, dtype=np.uint32)
    pieces = split_batch(dumped(fields), {"k": k, "token_ids": ids}, GROUPS)
    named = [piece.arrays["token_ids"].tolist() for piece in pieces]
    assert named == [[0, 1, 3, 4, 5], [], [2]], "one for each row"
    assert [piece.fields["layers"] for piece in pieces] == [[0, 1]] * 3
    rows = [piece.arrays["k"][:, :, 0, 0].tolist() for piece in pieces]
    assert rows == [[[0, 1, 3, 4, 5], [6, 7, 9, 10, 11]], [[], []], [[2], [8]]]


def test_token_ids_go_with_their_sequences_whatever_the_rows() -> None:
    fields = {"sequences": ["a", "b", "c", "d"], "ids_indptr": [0, 2, 2, 3, 4]}
    ids = np.arange(4, dtype=np.uint32)
    pieces = split_batch(fields | {"token_ids": ids.tolist()}, {}, GROUPS)
    arrays = split_batch(fields, {"token_ids": ids}, GROUPS)
    for found in (pieces, arrays):
        assert [one.fields["ids_indptr"] for one in found] == [[0, 2, 3], [0, 0], [0, 1]]
    assert [one.fields["token_ids"] for one in pieces] == [[0, 1, 3], [], [2]]
    assert [one.arrays["token_ids"].tolist() for one in arrays] == [[0, 1, 3], [], [2]]
    known = [({"known_len": [1, 4]}, {}), ({"known_len": [2]}, {}), ({"known_len": [3]}, {})]
    assert join(pieces, known) == ({"known_len": [1, 2, 3, 4]}, {})


def test_truncations_and_kept_rows_go_with_their_sequences() -> None:
    fields = TruncateSequencesFields(
        sequences=["a", "b", "c", "d"],
        lengths=[1, 2, 3, 4],
        keep=[5, 6, 7, 8, 9],
        keep_indptr=[0, 2, 2, 3, 5],
    )
    pieces = split_batch(dumped(fields), {}, GROUPS)
    assert [piece.fields["lengths"] for piece in pieces] == [[1, 4], [2], [3]]
    assert [piece.fields["keep"] for piece in pieces] == [[5, 6, 8, 9], [], [7]]
    assert [piece.fields["keep_indptr"] for piece in pieces] == [[0, 2, 4], [0, 0], [0, 1]]
    replies = [({"sequences": [{"id": one} for one in ids]}, {}) for ids in ("ad", "b", "c")]
    joined, _ = join(pieces, replies)
    assert [one["id"] for one in joined["sequences"]] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_names_to_commit_go_with_their_sequences(kind: str) -> None:
    ids = [1, 2, 3, 4, 5, 6]
    given: dict[str, Any] = {"token_ids": ids} if kind == "list" else {}
    fields = CommitSequencesFields(
        sequences=["a", "b", "c", "d"],
        names_indptr=[0, 2, 2, 3, 6],
        offsets=[8, 0, 4, 0],
        extra=[[ExtraKey(first_token=at, key="0c")] for at in range(4)],
        **given,
    )
    arrays = {} if kind == "list" else {"token_ids": np.array(ids, np.uint32)}
    pieces = split_batch(dumped(fields), arrays, GROUPS)
    assert [piece.fields["offsets"] for piece in pieces] == [[8, 0], [0], [4]]
    extra = [[keys[0]["first_token"] for keys in piece.fields["extra"]] for piece in pieces]
    assert extra == [[0, 3], [1], [2]]
    held = [piece.fields if kind == "list" else piece.arrays for piece in pieces]
    assert [list(one["token_ids"]) for one in held] == [[1, 2, 4, 5, 6], [], [3]]
    answers = [
        {"committed_lens": [8, 9], "num_pages": [2, 3], "last_keys": ["x", None]},
        {"committed_lens": [6], "num_pages": [1], "last_keys": ["y"]},
        {"committed_lens": [7], "num_pages": [4], "last_keys": ["z"]},
    ]
    joined, _ = join(pieces, [(one, {}) for one in answers])
    assert joined == {
        "committed_lens": [8, 6, 7, 9],
        "num_pages": [2, 1, 4, 3],
        "last_keys": ["x", "y", "z", None],
    }


def test_fields_that_were_not_given_are_not_sent() -> None:
    (piece, _) = split_batch(dumped(DecodeFields(layer=0, sequences=["a", "b"])), {}, ([0], [1]))
    assert piece.fields == {"layer": 0, "sequences": ["a"]}


def test_states_come_back_in_the_order_of_the_request() -> None:
    fields = PrefillFields(layer=0, sequences=["a", "b", "c", "d"], qo_indptr=[0, 1, 3, 4, 6])
    q = np.arange(6.0).reshape(6, 1, 1)
    pieces = split_batch(dumped(fields), {"q": q}, GROUPS)
    replies = [
        (
            {"lse_base": "e", "levels": 1 + at, "cascade": at == 1},
            {"o": 10 * piece.arrays["q"], "lse": piece.arrays["q"][:, :, 0]},
        )
        for at, piece in enumerate(pieces)
    ]
    joined, arrays = join(pieces, replies)
    assert joined == {"lse_base": "e", "levels": 3, "cascade": True}
    np.testing.assert_array_equal(arrays["o"], 10 * q)
    np.testing.assert_array_equal(arrays["lse"], q[:, :, 0])


def test_gathered_rows_follow_each_engines_kv_indptr() -> None:
    pieces = split_batch(dumped(GatherFields(layer=0, sequences=["a", "b", "c", "d"])), {}, GROUPS)
    rows = [np.array([[1.0], [2.0], [9.0]]), np.empty((0, 1)), np.array([[5.0]])]
    replies = [
        ({"kv_indptr": [0, 2, 3]}, {"k": rows[0]}),
        ({"kv_indptr": [0, 0]}, {"k": rows[1]}),
        ({"kv_indptr": [0, 1]}, {"k": rows[2]}),
    ]
    fields, arrays = join(pieces, replies)
    assert fields == {"kv_indptr": [0, 2, 2, 3, 4]}
    assert arrays["k"].ravel().tolist() == [1, 2, 5, 9]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_mask_is_cut_by_the_lengths_of_its_sequences(is_packed: bool) -> None:
    qo, kv = np.array([2, 1, 0, 3]), np.array([9, 7, 9, 9], np.int32)
    indptr = [0, *np.cumsum(qo).tolist()]
    fields = PrefillFields(layer=0, sequences=["a", "b", "c", "d"], qo_indptr=indptr)
    rng = np.random.default_rng(0)
    parts = [
        rng.integers(0, 2, rows * keys).astype(bool) for rows, keys in zip(qo, kv, strict=True)
    ]
    name = "packed_mask" if is_packed else "mask"
    if is_packed:
        parts = [np.packbits(part, bitorder="little") for part in parts]
    arrays = {"q": np.zeros((6, 1, 1)), name: np.concatenate(parts), "sinks": np.array([0.5])}
    pieces = split_batch(dumped(fields), arrays, GROUPS, kv)
    for piece, group in zip(pieces, GROUPS, strict=True):
        np.testing.assert_array_equal(
            piece.arrays[name], np.concatenate([parts[at] for at in group])
        )
        assert piece.arrays["sinks"].tolist() == [0.5], "each engine needs all of them"
    with pytest.raises(InvalidRequest, match=name):
        split_batch(dumped(fields), arrays, GROUPS, kv + 8)


def test_every_field_of_the_reply_to_a_batch_has_its_way_of_joining() -> None:
    answers = [one.answer for one in BY_NAME.values() if one.routed == "sequences"]
    named = {name for answer in answers if answer is not None for name in answer.model_fields}
    assert named == JOINED.keys() | {"kv_indptr"}


@pytest.mark.parametrize(
    ("given", "joined"),
    [((True, True), True), ((True, False), False), ((True, None), False), ((None, True), False)],
)
def test_a_commit_is_durable_where_all_engines_say_so(
    given: tuple[bool | None, ...], joined: bool
) -> None:
    fields = CommitSequencesFields(sequences=["a", "b"], names_indptr=[0, 1, 2])
    pieces = split_batch(dumped(fields), {}, [[0], [1]])
    one = {"committed_lens": [4], "num_pages": [1], "last_keys": ["x"]}
    replies = [one | ({} if durable is None else {"durable": durable}) for durable in given]
    assert join(pieces, [(reply, {}) for reply in replies])[0]["durable"] is joined
