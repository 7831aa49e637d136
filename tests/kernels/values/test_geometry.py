"""`PoolGeometry`: sizes and scales follow from its fields."""

from __future__ import annotations

import pytest

from kernels.backend import PoolGeometry


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_scales_do_not_apply_to_pools_that_hold_real_values(dtype) -> None:
    assert PoolGeometry(1, 2, 4, 1, 64, "NHD", dtype, 0.02, 0.03).scales == (1.0, 1.0)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_scales_of_an_fp8_pool_are_its_own(dtype) -> None:
    assert PoolGeometry(1, 2, 4, 1, 64, "NHD", dtype, 0.02, 0.03).scales == (0.02, 0.03)


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2), ("fp8_e5m2", 1)])
def test_a_page_holds_k_and_v_of_every_head_and_token(dtype, width) -> None:
    geometry = PoolGeometry(3, 7, 4, 2, 64, "HND", dtype)
    assert geometry.layer_shape == (7, 2, 2, 4, 64)
    assert geometry.page_bytes == 2 * 2 * 4 * 64 * width
    assert geometry.token_bytes == geometry.page_bytes // 4
