"""Extensions at many layers at once: all or none, one length everywhere, undone latest first."""

from __future__ import annotations

import numpy as np
import pytest
from core_pool import TokenPool, int32

from service.core.errors import (
    IntegrityError,
    InvalidRequest,
    LengthMismatch,
    OutOfPages,
    UnknownSequence,
)

LAYERS = (2, 0, 1)


@pytest.fixture
def pool() -> TokenPool:
    made = TokenPool(num_pages=8, page_size=4, num_layers=3)
    made.start("a", [1, 2, 3])
    made.start("b", [4, 5, 6, 7])
    return made


def lengths(pool: TokenPool) -> list[list[int]]:
    return [pool.tree.lengths(["a", "b"], layer).tolist() for layer in pool.layers]


def test_undoing_takes_the_latest_back_first(pool: TokenPool) -> None:
    free = pool.tree.allocator.num_free
    first = pool.tree.extend_layers(LAYERS, ["a", "b"], int32(3, 3))
    second = pool.tree.extend_layers(LAYERS, ["b", "a"], int32(4, 0))
    with pytest.raises(IntegrityError):
        pool.tree.undo(first)
    pool.tree.undo(second)
    pool.tree.undo(first)
    assert lengths(pool) == [[3, 4]] * 3
    assert pool.tree.allocator.num_free == free
    pool.tree.check_integrity()


def test_a_step_of_a_deleted_sequence_cannot_be_rolled_back(pool: TokenPool) -> None:
    extension = pool.tree.extend_layers(LAYERS, ["a"], int32(1))
    pool.tree.free(["a"])
    with pytest.raises(IntegrityError, match="have changed"):
        pool.tree.undo(extension)


@pytest.mark.parametrize(
    ("ids", "counts", "offsets", "error"),
    [
        (["a", "none"], int32(1, 1), None, UnknownSequence),
        (["a", "a"], int32(1, 1), None, InvalidRequest),
        (["a"], int32(1), int32(2), LengthMismatch),
        (["a", "b"], int32(20, 20), None, OutOfPages),
    ],
)
def test_a_rejected_step_changes_nothing(
    pool: TokenPool, ids: list[str], counts: np.ndarray, offsets: object, error: type[Exception]
) -> None:
    before, free = lengths(pool), pool.tree.allocator.num_free
    with pytest.raises(error):
        pool.tree.extend_layers(LAYERS, ids, counts, offsets)  # type: ignore[arg-type]
    assert (lengths(pool), pool.tree.allocator.num_free) == (before, free)


def test_layers_of_unequal_length_are_refused_with_the_numbers(pool: TokenPool) -> None:
    pool.append("b", [8], layers=[1])
    with pytest.raises(InvalidRequest, match="b: has 4 to 5 tokens"):
        pool.tree.extend_layers(LAYERS, ["a", "b"], int32(1, 1))
    pool.tree.extend_layers((0, 2), ["a", "b"], int32(1, 1))
    with pytest.raises(InvalidRequest, match="0 to 2"):
        pool.tree.extend_layers((0, 3), ["a"], int32(1))
