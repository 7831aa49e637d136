"""`PoolGeometry`: sizes and scales follow from its fields."""

from __future__ import annotations

import pytest

from kernels.backend import LayerGroup, PoolGeometry
from kernels.geometry import with_least_waste


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


def group(layers, heads=2, dim=64, page_size=32, window=None, **more) -> LayerGroup:
    return LayerGroup(tuple(layers), heads, dim, dim, page_size, "fp16", window, **more)


def test_a_pool_without_groups_has_one() -> None:
    geometry = PoolGeometry(3, 7, 4, 2, 64, "HND", "bf16")
    assert geometry.groups == (LayerGroup((0, 1, 2), 2, 64, 64, 4, "bf16"),)
    assert geometry.places == ((0, 0), (0, 1), (0, 2))
    assert geometry.block_steps(geometry.groups[0]) == (1, 7)
    assert geometry.payload_bytes == 3 * geometry.page_bytes
    assert (geometry.num_pieces, geometry.piece_bytes) == (3, geometry.page_bytes)


def test_all_groups_have_pages_of_one_size_in_whole_blocks() -> None:
    groups = group(range(5), window=100, page_size=8), group([5, 6], heads=4), group([7], dim=128)
    geometry = PoolGeometry.of_groups(groups, 9)
    assert (geometry.num_layers, geometry.page_size, geometry.num_kv_heads) == (8, 32, 4)
    assert geometry.leading == 1
    sizes = [one.page_bytes for one in groups]
    assert sizes == [5 * 8 * 512, 2 * 32 * 1024, 32 * 1024]
    assert geometry.payload_bytes == 2 * 32 * 1024
    assert geometry.piece_bytes == geometry.payload_bytes
    for one in groups:
        page_step, layer_step = geometry.block_steps(one)
        assert layer_step == 1
        assert page_step * one.layer_bytes == geometry.payload_bytes
        assert page_step >= len(one.layers)


@pytest.mark.parametrize(
    ("groups", "rule"),
    [
        ((group([0, 2]),), "each of the layers"),
        ((group([0, 1]), group([1])), "each of the layers"),
        ((group([0], window=4), group([1], window=8)), "one group must have no window"),
    ],
)
def test_groups_that_make_no_pool_are_refused(groups, rule) -> None:
    with pytest.raises(ValueError, match=rule):
        PoolGeometry.of_groups(groups, 4)


@pytest.mark.parametrize(
    ("windowed", "full", "page_size", "want"),
    [
        ((range(18), 8, 64, 128), (range(18, 36), 8, 64), 64, 64),  # gpt-oss-120b
        ((range(18), 8, 64, 128), (range(18, 36), 8, 64), 16, 16),
        ((range(52), 16, 128, 1024), (range(52, 62), 16, 128), 64, 8),  # Gemma 3 27B
    ],
)
def test_tokens_per_page_are_those_for_which_a_sequence_holds_the_fewest_bytes(
    windowed, full, page_size, want
) -> None:
    layers, heads, dim, window = windowed
    groups = with_least_waste(
        (
            group(layers, heads, dim, page_size, window),
            group(*full[:3], page_size),
        )
    )
    assert [one.page_size for one in groups] == [want, page_size]


def test_the_value_of_a_latent_row_takes_no_bytes_of_its_own() -> None:
    latent = LayerGroup((0,), 1, 576, 512, 16, "bf16", kind="latent")
    assert (latent.token_bytes, latent.layer_bytes) == (1152, 16 * 1152)
    unequal = LayerGroup((0,), 2, 192, 128, 16, "bf16")
    assert unequal.token_bytes == 2 * (192 + 128) * 2
