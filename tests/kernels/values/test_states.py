"""The algebra of states: merging is commutative and associative, and empty is its identity."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kernels.backend import AttentionState
from kernels.states import (
    merge_ragged_states,
    merge_state,
    merge_state_in_place,
    merge_states,
)

ROWS, HEADS, DIM = 2, 3, 4
FEW = settings(max_examples=30, deadline=None)
finite = st.floats(-4, 4, width=32)
weights = st.one_of(st.just(-np.inf), st.floats(-80, 80, width=32))


@st.composite
def states(draw: st.DrawFn) -> AttentionState:
    o = draw(arrays.arrays(np.float32, (ROWS, HEADS, DIM), elements=finite))
    lse = draw(arrays.arrays(np.float32, (ROWS, HEADS), elements=weights))
    return AttentionState(np.where(np.isneginf(lse)[..., None], np.float32(0), o), lse)


def empty() -> AttentionState:
    lse = np.full((ROWS, HEADS), -np.inf, np.float32)
    return AttentionState(np.zeros((ROWS, HEADS, DIM), np.float32), lse)


def assert_alike(a: AttentionState, b: AttentionState) -> None:
    np.testing.assert_allclose(a.o, b.o, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(a.lse, b.lse, rtol=1e-6, atol=1e-5)


def stacked(members: list[AttentionState]) -> AttentionState:
    """[ROWS, T, ...] from T states."""
    if not members:
        return AttentionState(
            np.zeros((ROWS, 0, HEADS, DIM), np.float32), np.zeros((ROWS, 0, HEADS), np.float32)
        )
    return AttentionState(
        np.stack([m.o for m in members], 1), np.stack([m.lse for m in members], 1)
    )


@FEW
@given(states(), states())
def test_merging_is_commutative(a, b) -> None:
    assert_alike(merge_state(a, b), merge_state(b, a))


@FEW
@given(states(), states(), states())
def test_merging_is_associative(a, b, c) -> None:
    assert_alike(merge_state(merge_state(a, b), c), merge_state(a, merge_state(b, c)))


@FEW
@given(states())
def test_the_empty_state_is_the_identity(a) -> None:
    merged = merge_state(a, empty())
    np.testing.assert_array_equal(merged.o, a.o)
    np.testing.assert_allclose(merged.lse, a.lse)


def test_empty_merged_with_empty_is_empty() -> None:
    merged = merge_state(empty(), empty())
    assert not merged.o.any()
    assert np.isneginf(merged.lse).all()


@FEW
@given(st.lists(states(), max_size=5))
def test_many_at_once_equal_two_at_a_time(members) -> None:
    one_by_one = empty()
    for member in members:
        merge_state_in_place(one_by_one, member)
    all_at_once = stacked(members)
    assert_alike(merge_states(all_at_once.o, all_at_once.lse), one_by_one)


@FEW
@given(st.lists(states(), max_size=5), st.data())
def test_variable_length_lists_equal_each_list_alone(members, data) -> None:
    flat = [(o, lse) for m in members for o, lse in zip(m.o, m.lse, strict=True)]
    cuts = data.draw(st.lists(st.integers(0, len(flat)), max_size=4))
    indptr = np.array([0, *sorted(cuts), len(flat)], np.int32)
    o = np.array([o for o, _ in flat], np.float32).reshape(-1, HEADS, DIM)
    lse = np.array([lse for _, lse in flat], np.float32).reshape(-1, HEADS)
    got = merge_ragged_states(o, lse, indptr)
    for t, (begin, end) in enumerate(pairwise(indptr)):
        alone = merge_states(o[None, begin:end], lse[None, begin:end])
        assert_alike(AttentionState(got.o[t : t + 1], got.lse[t : t + 1]), alone)


@FEW
@given(states(), states())
def test_numpy_equals_the_float64_oracle(a, b) -> None:
    o, lse = oracle.merge([(a.o, a.lse), (b.o, b.lse)])
    assert_alike(merge_state(a, b), AttentionState(o, lse.astype(np.float32)))


def test_the_content_of_an_empty_state_is_never_read() -> None:
    spoilt = AttentionState(np.full((ROWS, HEADS, DIM), np.nan, np.float32), empty().lse)
    good = AttentionState(
        np.ones((ROWS, HEADS, DIM), np.float32), np.zeros((ROWS, HEADS), np.float32)
    )
    assert np.array_equal(merge_state(spoilt, good).o, good.o)


def test_o_keeps_its_dtype() -> None:
    half = AttentionState(np.ones((1, 1, 4), np.float16), np.zeros((1, 1), np.float32))
    assert merge_state(half, half).o.dtype == np.float16


@pytest.mark.parametrize("indptr", [[1, 2], [0, 1], [0, 3, 2]])
def test_an_indptr_that_does_not_cover_the_states_is_refused(indptr) -> None:
    o, lse = np.zeros((2, 1, 4), np.float32), np.zeros((2, 1), np.float32)
    with pytest.raises(ValueError, match="indptr"):
        merge_ragged_states(o, lse, np.array(indptr))


def test_shapes_that_disagree_are_refused() -> None:
    o = np.zeros((2, 2, 1, 4), np.float32)
    with pytest.raises(ValueError, match="lse"):
        merge_states(o, np.zeros((2, 1), np.float32))
    with pytest.raises(ValueError, match="shapes"):
        merge_state(AttentionState(o[0], o[0, ..., 0]), AttentionState(o[0, :1], o[0, :1, ..., 0]))
