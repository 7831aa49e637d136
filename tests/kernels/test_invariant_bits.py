"""With `numerics: invariant` the bits of a row do not depend on batch, sharing, pages or chunks."""

from __future__ import annotations

import numpy as np
import pytest

from bench.bits import Shape, run, shapes
from kernels.backend import Unsupported

SHAPES = shapes(900, 1200, 2, fp32=True)
IDS = [f"{s.geometry.dtype}-{s.geometry.page_size}-{s.geometry.head_dim}" for s in SHAPES]


@pytest.mark.parametrize("num_rows", [300, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_a_row_has_the_same_bits_however_it_is_computed(backend, rng, shape, num_rows) -> None:
    try:
        made = backend(shape.geometry, numerics="invariant")
    except Unsupported:
        pytest.skip("not on this device")
    rows, different = run(made, shape, rng, num_rows)
    assert rows >= num_rows
    assert different == []


def test_without_it_the_comparison_finds_rows_that_differ(backend, rng) -> None:
    shape: Shape = SHAPES[0]
    rows, different = run(backend(shape.geometry), shape, np.random.default_rng(7), 300)
    assert different, f"{rows} rows"


@pytest.mark.parametrize("page_size", [5, 16, 300])
def test_splits_are_whole_pages(backend, page_size) -> None:
    geometry = SHAPES[0].geometry
    made = backend(type(geometry)(1, 8, page_size, 2, 64, "NHD", "fp16"), numerics="invariant")
    assert made.split_keys >= 256 and made.split_keys % page_size == 0
