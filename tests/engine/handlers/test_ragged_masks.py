"""Both forms of a ragged mask become the same bits, read through an offset per plan row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.backend import Mask
from service.engine.handlers.attention import ragged_mask
from service.errors import InvalidRequest

QO_INDPTR = np.array([0, 2, 2, 5], dtype=np.int32)
KV_LENS = np.array([3, 4, 5], dtype=np.int32)
ROW_KV = [3, 3, 5, 5, 5]


def bit(mask: Mask, row: int, key: int) -> bool:
    at = int(mask.row_offsets[row]) + key
    return bool(mask.bits[at // 8] >> (at % 8) & 1)


@pytest.mark.parametrize("order", [None, np.array([4, 0, 2, 1, 3], dtype=np.int32)])
@pytest.mark.parametrize("packed", [False, True])
def test_every_bit_is_found_where_its_row_and_key_say(
    packed: bool, order: np.ndarray | None
) -> None:
    masks = [np.random.default_rng(seed).random(shape) < 0.5 for seed, shape in ((0, 6), (1, 15))]
    given = np.concatenate(
        [np.packbits(part, bitorder="little") if packed else part for part in masks]
    )
    made = ragged_mask(given, packed, QO_INDPTR, KV_LENS, order)
    by_row = [*masks[0].reshape(2, 3), *masks[1].reshape(3, 5)]
    for plan_row in range(5):
        row = plan_row if order is None else int(order[plan_row])
        got = [bit(made, plan_row, key) for key in range(ROW_KV[row])]
        assert got == by_row[row].tolist(), f"plan row {plan_row} is row {row}"


@pytest.mark.parametrize(("packed", "size"), [(False, 20), (False, 22), (True, 2), (True, 4)])
def test_a_wrong_length_is_refused_with_the_right_one(packed: bool, size: int) -> None:
    given = np.ones(size, dtype=np.uint8 if packed else bool)
    with pytest.raises(InvalidRequest) as caught:
        ragged_mask(given, packed, QO_INDPTR, KV_LENS, None)
    assert caught.value.field == ("packed_mask" if packed else "mask")
    assert str(size) in str(caught.value.value)
    assert ("3 bytes" if packed else "21 elements") in caught.value.rule


def test_no_rows_need_no_bits() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    made = ragged_mask(np.zeros(0, dtype=bool), False, np.zeros(1, np.int32), nothing, None)
    assert (made.bits.size, made.row_offsets.size) == (0, 0)


@settings(max_examples=100, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=5),
    packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_row_offsets_find_each_rows_part_of_a_ragged_mask(lens, packed, seed) -> None:
    expected, at = [], 0
    for qo_len, kv_len in lens:
        expected += [at + i * kv_len for i in range(qo_len)]
        at += qo_len * kv_len
        at += -at % 8 if packed else 0
    qo_indptr = np.array([0, *np.cumsum([qo_len for qo_len, _ in lens])], dtype=np.int32)
    kv_lens = np.array([kv_len for _, kv_len in lens], dtype=np.int32)
    given_mask = np.zeros(at // 8, np.uint8) if packed else np.zeros(at, bool)
    order = np.random.default_rng(seed).permutation(len(expected)).astype(np.int32)
    plain = ragged_mask(given_mask, packed, qo_indptr, kv_lens, None)
    assert plain.row_offsets.tolist() == expected
    shuffled = ragged_mask(given_mask, packed, qo_indptr, kv_lens, order).row_offsets
    assert shuffled.dtype == np.int64
    assert shuffled.tolist() == [expected[row] for row in order]
