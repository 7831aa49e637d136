"""Masks as bits: equal to numpy's packing, and readable again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.masks import make_mask, mask_row_offsets, packbits, read_bits


@given(st.lists(st.booleans(), max_size=70))
def test_packbits_equals_numpys_little_order(bits) -> None:
    flat = np.array(bits, bool)
    assert np.array_equal(packbits(flat), np.packbits(flat, bitorder="little"))


@pytest.mark.parametrize("padded", [False, True])
@given(shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 11)), max_size=4))
def test_every_bit_is_found_at_its_rows_offset(padded, shapes) -> None:
    rng = np.random.default_rng(0)
    masks = [rng.random(shape) < 0.5 for shape in shapes]
    flat = np.concatenate([np.zeros(0, bool), *(m.ravel() for m in masks)])
    qo, kv = [s[0] for s in shapes], [s[1] for s in shapes]
    each = [np.zeros(0, np.uint8), *(packbits(mask) for mask in masks)]
    bits = np.concatenate(each) if padded else packbits(flat)
    offsets = mask_row_offsets(qo, kv, padded=padded)
    rows = [row for mask in masks for row in mask]
    assert len(offsets) == len(rows)
    for offset, row in zip(offsets, rows, strict=True):
        assert np.array_equal(read_bits(bits, offset + np.arange(len(row))), row)


def test_a_mask_of_another_size_than_its_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="7 elements: the lengths claim 8"):
        make_mask(np.ones(7, bool), [2, 1], [3, 2])


def test_a_mask_that_is_not_boolean_is_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        packbits(np.ones(4, np.uint8))
