"""merge_states against a float64 dense computation, and its algebra."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attnd import AttentionState, LseBase, empty_state, merge_state, merge_states
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[np.float64]
LN_2 = np.log(2.0)


def dense(scores: Array, values: Array) -> tuple[Array, Array]:
    """o [rows, D] and natural lse [rows] of scores [rows, keys] over values [keys, D], float64."""
    lse = np.logaddexp.reduce(scores, axis=1, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(lse), 0, lse)[:, None])
    return weights @ values, lse


def parts_of(
    scores: Array, values: Array, cuts: list[int], base: LseBase = "e"
) -> list[AttentionState]:
    """One float32 state per run of keys between the cuts; rows are heads of one token."""
    edges = [0, *sorted(cuts), scores.shape[1]]
    states = []
    for begin, end in itertools.pairwise(edges):
        o, lse = dense(scores[:, begin:end], values[begin:end])
        lse = lse / LN_2 if base == "2" else lse
        states.append(AttentionState(o.astype(np.float32), lse.astype(np.float32), base))
    return states


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("cuts", [[], [1], [0, 64], [5, 5, 5], [10, 33, 50]])
def test_parts_of_any_cut_merge_into_the_whole(cuts: list[int], base: LseBase) -> None:
    rng = np.random.default_rng(7)
    scores, values = rng.standard_normal((6, 64)) * 5, rng.standard_normal((64, 8))
    o, lse = dense(scores, values)
    merged = merge_states(parts_of(scores, values, cuts, base))
    assert merged.lse_base == base
    np.testing.assert_allclose(merged.o, o, atol=1e-6)
    np.testing.assert_allclose(merged.lse * (LN_2 if base == "2" else 1), lse, atol=1e-5)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1000.0]),
    cuts=st.lists(st.integers(0, 24), max_size=4),
)
def test_merge_is_commutative_and_associative(seed: int, scale: float, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    scores, values = rng.standard_normal((3, 24)) * scale, rng.standard_normal((24, 4))
    states = parts_of(scores, values, cuts)
    at_once = merge_states(states)
    shuffled = [states[i] for i in rng.permutation(len(states))]
    one_by_one = shuffled[0]
    for state in shuffled[1:]:
        one_by_one = merge_state(one_by_one, state)
    np.testing.assert_allclose(one_by_one.o, at_once.o, atol=1e-5)
    np.testing.assert_allclose(one_by_one.lse, at_once.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("base", ["e", "2"])
def test_the_empty_state_is_neutral_bit_for_bit(dtype: type, base: LseBase) -> None:
    rng = np.random.default_rng(3)
    o: NDArray[Any] = rng.standard_normal((5, 2, 8)).astype(dtype)
    state = AttentionState(o, rng.standard_normal((5, 2)).astype(np.float32) * 40, base)
    empty = empty_state(o.shape, dtype, base)
    for merged in (merge_state(empty, state), merge_state(state, empty), merge_states([state])):
        assert merged.o.dtype == o.dtype
        assert merged.o.tobytes() == o.tobytes()
        assert merged.lse.tobytes() == state.lse.tobytes()


def test_empty_merged_with_empty_is_empty_and_never_nan() -> None:
    merged = merge_states([empty_state((4, 2, 8)) for _ in range(3)])
    assert (merged.o == 0).all()
    assert np.isneginf(merged.lse).all()


def test_the_o_of_an_empty_row_does_not_reach_the_result() -> None:
    for garbage in (np.nan, np.inf, -np.inf):
        dirty = AttentionState(
            np.full((1, 2, 4), garbage, np.float32), np.full((1, 2), -np.inf, np.float32)
        )
        clean = AttentionState(np.ones((1, 2, 4), np.float32), np.zeros((1, 2), np.float32))
        merged = merge_states([dirty, clean])
        assert (merged.o == 1).all(), f"{garbage} leaked: {merged.o}"


def test_huge_and_tiny_lse_do_not_overflow() -> None:
    o = np.stack([np.full((1, 4), i, np.float32) for i in range(3)])
    states = [
        AttentionState(o[i], np.array([lse], np.float32))
        for i, lse in enumerate([3e38, 3e38, -3e38])
    ]
    merged = merge_states(states)
    assert np.isfinite(merged.lse).all()
    np.testing.assert_array_equal(merged.o, np.full((1, 4), 0.5, np.float32))


def test_a_nan_is_not_hidden() -> None:
    bad = AttentionState(np.ones((1, 4), np.float32), np.array([np.nan], np.float32))
    merged = merge_states([bad, empty_state((1, 4))])
    assert np.isnan(merged.lse).all()
    assert np.isnan(merged.o).all()


def test_states_of_different_bases_merge_into_base_e_by_default() -> None:
    rng = np.random.default_rng(11)
    scores, values = rng.standard_normal((4, 10)), rng.standard_normal((10, 4))
    a = parts_of(scores, values, [4])[0]
    b = parts_of(scores, values, [4], "2")[1]
    o, lse = dense(scores, values)
    natural, binary = merge_states([a, b]), merge_states([a, b], lse_base="2")
    assert (natural.lse_base, binary.lse_base) == ("e", "2")
    np.testing.assert_allclose(natural.lse, lse, atol=1e-5)
    np.testing.assert_allclose(binary.lse * LN_2, lse, atol=1e-5)
    np.testing.assert_allclose(natural.o, o, atol=1e-6)


def test_to_base_there_and_back_keeps_the_state() -> None:
    state = AttentionState(np.ones((1, 2), np.float32), np.array([-np.inf], np.float32))
    assert np.isneginf(state.to_base("2").lse).all()
    state = AttentionState(np.ones((2, 2), np.float32), np.array([3.5, -70], np.float32))
    np.testing.assert_allclose(state.to_base("2").to_base("e").lse, state.lse, rtol=1e-6)


def test_states_that_do_not_fit_are_refused_with_their_shapes() -> None:
    one = empty_state((2, 3, 4))
    with pytest.raises(ValueError, match="at least one"):
        merge_states([])
    with pytest.raises(ValueError, match=r"state 1 has o float32 \(2, 3, 5\)"):
        merge_states([one, empty_state((2, 3, 5))])
    with pytest.raises(ValueError, match="float16"):
        merge_states([one, empty_state((2, 3, 4), np.float16)])
    with pytest.raises(TypeError, match=r"must be a state"):
        merge_states([(np.zeros((1, 1, 8)), np.zeros((1, 1)))])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="less head_dim"):
        AttentionState(np.zeros((2, 3, 4), np.float32), np.zeros((2, 4), np.float32))
