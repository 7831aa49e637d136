"""Ways to run an engine that tests of its operations share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.backend import DType, Layout, PoolGeometry
from tests.engine.pool_model import CPU_GEOMETRY


@pytest.fixture(params=[20.0, 1e-6], ids=["whole", "sliced"])
def slice_ms(request: pytest.FixtureRequest) -> float:
    """Every operation at once, or cut into slices."""
    return float(request.param)


@pytest.fixture
def geometry(dtype: DType, layout: Layout) -> PoolGeometry:
    """Of a test that has these two as parameters."""
    return replace(CPU_GEOMETRY, dtype=dtype, layout=layout, k_scale=0.3, v_scale=2.5)
