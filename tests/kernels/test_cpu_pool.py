"""The CPU pool's storage: 5-D and paired 4-D hold the same, page for page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pooled import normal

from kernels.backend import PoolGeometry
from kernels.cpu.pool import allocate, pair
from kernels.cpu.tensors import BITS, TORCH_DTYPES, narrow, to_torch, widen

DTYPES = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paired_4d_storage_reads_as_the_5d_storage_does(rng, dtype, layout) -> None:
    geometry = PoolGeometry(1, 6, 4, 2, 8, layout, dtype)
    one = allocate(geometry)
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
    pool = allocate(PoolGeometry(1, 2, 3, 1, 8, "NHD", dtype))
    pool.fill_with_nan()
    everywhere = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
    assert pool.k.read(0, *everywhere).isnan().all()
    assert pool.v.read(0, *everywhere).isnan().all()


def test_narrowing_leaves_its_input_alone(rng) -> None:
    values = to_torch(normal(rng, (3, 1, 8), "fp32"))
    before = values.clone()
    narrow(values, "fp8_e4m3", 1.0)
    assert torch.equal(values, before)
