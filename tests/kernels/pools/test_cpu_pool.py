"""The CPU pool's storage: 5-D and paired 4-D hold the same, page for page; and the cached work of a
plan, which changes no result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pooled import Pooled, normal

from kernels import make_backend
from kernels.backend import Attend, Plan, PoolGeometry, Scoring
from kernels.cpu.pool import allocate, pair, pool_of
from kernels.cpu.prepared import KEPT_SCORES, MOST_KEPT, Preparer
from kernels.cpu.tensors import BITS, TORCH_DTYPES, narrow, to_torch, widen
from kernels.cpu.work import PagedShape
from kernels.geometry import POISON
from kernels.masks import make_mask

DTYPES = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paired_4d_storage_reads_as_the_5d_storage_does(rng, dtype, layout) -> None:
    geometry = PoolGeometry(1, 6, 4, 2, 8, layout, dtype)
    one = pool_of(allocate(geometry), geometry, geometry.groups[0])
    shape = (6, *geometry.layer_shape[2:])
    bits = BITS[TORCH_DTYPES[dtype].itemsize]
    two = pair(torch.empty(shape, dtype=bits), torch.empty(shape, dtype=bits), layout, dtype)
    k, v = (normal(rng, (24, 2, 8), "fp32") for _ in range(2))
    slots = torch.from_numpy(rng.permutation(24))
    page, offset = slots // 4, slots % 4
    pages = torch.tensor([[5, 0, 3], [1, 1, 2]])
    for pool in (one, two):
        pool.k.write(0, page, offset, k)
        pool.v.write(0, page, offset, v)
    for a, b in [(one.k, two.k), (one.v, two.v)]:
        assert torch.equal(a.read(0, page, offset), b.read(0, page, offset))
        assert torch.equal(a.load(pages, 11), b.load(pages, 11))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_widen_to_what_torch_makes_of_them(dtype) -> None:
    width = TORCH_DTYPES[dtype].itemsize
    every = np.arange(2**16, dtype=np.uint32).astype(
        {1: np.uint8, 2: np.uint16, 4: np.uint32}[width]
    )
    bits = torch.from_numpy(every.view({1: np.uint8, 2: np.int16, 4: np.int32}[width]))
    got, want = widen(bits, dtype), bits.view(TORCH_DTYPES[dtype]).to(torch.float32)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_nan_in_every_format(dtype) -> None:
    geometry = PoolGeometry(1, 2, 3, 1, 8, "NHD", dtype)
    pool = pool_of(allocate(geometry).fill_(POISON), geometry, geometry.groups[0])
    everywhere = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
    assert pool.k.read(0, *everywhere).isnan().all()
    assert pool.v.read(0, *everywhere).isnan().all()


def test_narrowing_leaves_its_input_alone(rng) -> None:
    values = to_torch(normal(rng, (3, 1, 8), "fp32"))
    before = values.clone()
    narrow(values, "fp8_e4m3", 1.0)
    assert torch.equal(values, before)


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
    prepare = Preparer(PagedShape(32, 16, 16 * 2 * 64, 1, {0: 0, 1: 32, 2: 64}), 0)
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
    prepare = Preparer(PagedShape(pages, 16, 16 * 2 * 64, 1, {0: 0}), 0)
    pooled = Pooled(make_backend("cpu", replace(GEOMETRY, num_pages=pages)), rng, "fp16")
    run = pooled.add(pages * 16)
    request = Attend(0, normal(rng, (64, 8, 64), "fp16"), pooled.flat([run], [64], True), SCORING)
    assert prepare([request])[0] is not prepare([request])[0]
