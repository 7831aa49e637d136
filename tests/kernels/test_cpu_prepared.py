"""The CPU backend's cached work of a plan changes no result, however the plan is used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pooled import Pooled, normal

from kernels import make_backend
from kernels.backend import Attend, Plan, PoolGeometry, Scoring
from kernels.cpu.prepared import KEPT_SCORES, MOST_KEPT, Preparer
from kernels.cpu.work import PagedShape
from kernels.masks import make_mask

GEOMETRY = PoolGeometry(3, 32, 16, 2, 64, "NHD", "fp16")
SCORING = Scoring(0.125)


@pytest.fixture
def pooled(rng) -> Pooled:
    made = Pooled(make_backend("cpu", GEOMETRY), rng, "fp16")
    every = np.arange(32 * 16, dtype=np.int32)
    for layer in range(3):
        k, v = (normal(rng, (every.size, 2, 64), "fp16") for _ in range(2))
        made.backend.append(layer, k, v, every)
    return made


def plan_of(pooled: Pooled, rng) -> Plan:
    runs = [pooled.add(keys) for keys in (37, 5, 64)]
    return pooled.flat(runs, [2, 1, 3], True)


def fresh(request: Attend) -> Attend:
    """The same request with a plan of another identity."""
    plan = request.plan
    return replace(request, plan=Plan(plan.levels, plan.positions, plan.order))


def test_a_plan_used_for_many_things_answers_each_as_a_plan_of_its_own(pooled, rng) -> None:
    plan = plan_of(pooled, rng)
    q, few = normal(rng, (6, 8, 64), "fp16"), normal(rng, (6, 2, 64), "fp16")
    mask = make_mask(rng.random(2 * 37 + 5 + 3 * 64) < 0.5, [2, 1, 3], [37, 5, 64])
    uses = [Attend(layer, q, plan, SCORING) for layer in (0, 2, 1, 0)]
    uses += [Attend(1, q, plan, Scoring(0.125, window_left=3)), Attend(1, few, plan, SCORING)]
    uses += [Attend(1, q, plan, SCORING, mask), Attend(1, q, plan, Scoring(0.5, 20.0))]
    for use in uses * 2:
        got = pooled.backend.attend([use]).result()[0]
        want = make_fresh(pooled, use)
        assert np.array_equal(got.o, want.o)
        assert np.array_equal(got.lse, want.lse)


def make_fresh(pooled: Pooled, use: Attend):
    return pooled.backend.attend([fresh(use)]).result()[0]


def test_requests_of_one_launch_keep_their_layers_apart(pooled, rng) -> None:
    plan = plan_of(pooled, rng)
    q = normal(rng, (6, 8, 64), "fp16")
    alone = [pooled.backend.attend([Attend(layer, q, plan, SCORING)]) for layer in range(3)]
    for layers in ((0, 1, 2), (2, 2, 1), (1, 1, 0), (0, 1, 2)):
        got = pooled.backend.attend([Attend(layer, q, plan, SCORING) for layer in layers])
        for layer, state in zip(layers, got.result(), strict=True):
            want = alone[layer].result()[0]
            np.testing.assert_allclose(state.lse, want.lse, atol=1e-5)
            np.testing.assert_allclose(
                state.o.astype(np.float32), want.o.astype(np.float32), atol=1e-3
            )


def test_layers_share_cached_work_and_few_plans_are_cached(pooled, rng) -> None:
    prepare = Preparer(PagedShape(32, 16, 16 * 2 * 64), 0)
    q, plan = normal(rng, (6, 8, 64), "fp16"), plan_of(pooled, rng)
    first, at = prepare([Attend(0, q, plan, SCORING)])
    again, later = prepare([Attend(2, q, plan, SCORING)])
    assert again is first
    assert (at, later) == (0, 64)
    for _ in range(MOST_KEPT):
        prepare([fresh(Attend(0, q, plan, SCORING))])
    assert prepare([Attend(0, q, plan, SCORING)])[0] is not first


def test_large_batches_are_not_kept(rng) -> None:
    pages = KEPT_SCORES // 16 // 64 + 1
    prepare = Preparer(PagedShape(pages, 16, 16 * 2 * 64), 0)
    pooled = Pooled(make_backend("cpu", replace(GEOMETRY, num_pages=pages)), rng, "fp16")
    run = pooled.add(pages * 16)
    request = Attend(0, normal(rng, (64, 8, 64), "fp16"), pooled.flat([run], [64], True), SCORING)
    assert prepare([request])[0] is not prepare([request])[0]
