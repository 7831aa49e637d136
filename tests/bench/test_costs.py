"""The planner's estimates are near what was measured."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from bench.costs import errors, median_error, queued_seconds


def test_units_go_to_the_worker_that_is_free_first() -> None:
    assert queued_seconds([0.0, 0.0], [4.0, 3.0, 2.0]) == 5.0
    assert queued_seconds([0.0, 10.0], [4.0, 3.0, 2.0]) == 9.0


def test_no_units_end_at_once() -> None:
    assert queued_seconds([7.0], []) == 0.0


def test_the_median_estimate_is_within_a_tenth_of_the_committed_measurements() -> None:
    pairs = errors()
    assert len(pairs) > 20
    assert median_error(pairs) < 0.1, pairs
