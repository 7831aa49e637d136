"""Both forms of a ragged mask become the same bits, read through an offset per plan row."""

from __future__ import annotations

import numpy as np
import pytest

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
