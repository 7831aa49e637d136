"""The times of sets of kernels, and what their choice loses on them. Needs no device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.kernel_sets import INVARIANT, Timed, fit, losses, scaled
from bench.report.provenance import workloads
from kernels.cuda.attention.choice import batch_kind
from kernels.cuda.plan.costs import H200


def timed(name: str) -> Timed:
    """A row that no set takes longer for than another."""
    (row,) = (row for row in workloads() if row["name"] == name)
    made = Timed.of({"row": row, "us": {}})
    return replace(made, us=dict.fromkeys((*made.sets, INVARIANT), 10.0))


def test_what_the_choice_loses_is_beside_the_fastest_set_and_beside_invariant() -> None:
    row = timed("cascade/64x(8k+512)")
    kind = batch_kind([row.plan], row.sets["usual"].planner, row.sets)
    slow = replace(row, us={**row.us, kind: 20.0})
    beside, behind, count = losses([row, slow], H200.sets)
    assert beside == pytest.approx(math.log(2) / 2)
    assert behind == pytest.approx(math.log(2 / 1.01) / 2)
    assert count == 1


def test_all_constants_are_scaled_and_a_fit_finds_some_that_lose_less() -> None:
    twice = scaled(H200.sets, iter([2.0] * 100))
    assert twice.launch == 2 * H200.sets.launch
    assert twice.key["few"][256] == 2 * H200.sets.key["few"][256]
    assert twice.fp8_key["few"] == 2 * H200.sets.fp8_key["few"]
    row = timed("cascade/64x(8k+512)")
    assert row.chosen(H200.sets) == 10.0
    row = replace(row, us={**row.us, "pair fixed": 5.0})
    best = fit([row, row], 100)
    assert losses([row], best)[0] <= losses([row], H200.sets)[0]
    assert row.chosen(best) == 5.0
