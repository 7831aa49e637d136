"""The wide kernel's host side: resources of every specialisation, tensor maps, argument layout."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.backend import Layout, PoolGeometry
from kernels.compile import compile_spec
from kernels.cuda.common.kernel import RESERVED, shared_limit
from kernels.cuda.kv import tensor_maps
from kernels.cuda.wide import variants as wide
from tests.cuda.compiled import chosen

HEAD_DIMS = (64, 128, 192, 256)
PLAIN = [wide.variant(d, "fp16", page) for d in HEAD_DIMS for page in (0, 16)]
OTHERS = [
    *(wide.variant(d, "fp16", page) for d in (64, 128) for page in (8, 64)),
    *(wide.variant(d, "fp16", 8, has_mask=True) for d in (64, 128)),
    *(wide.variant(d, "bf16", 16) for d in HEAD_DIMS),
    *(wide.variant(d, "bf16", page) for d in (64, 128) for page in (0, 8)),
    *(wide.variant(d, "fp16", 16, has_mask=True) for d in HEAD_DIMS),
    *(wide.variant(d, "fp16", 16, has_soft_cap=True) for d in HEAD_DIMS),
    wide.variant(128, "fp16", 0, has_mask=True, has_soft_cap=True),
    wide.variant(64, "fp16", 0, has_mask=True),
    wide.variant(64, "bf16", 64, has_mask=True, has_soft_cap=True),
    wide.variant(64, "bf16", 8, has_mask=True, has_soft_cap=True),
    *(wide.variant(d, "fp16", 16, storage="fp8_e4m3") for d in (64, 128, 192)),
    *(wide.variant(d, "bf16", 5, True, True, "fp8_e5m2") for d in (64, 128, 192)),
    wide.variant(128, "fp16", 16, has_mask=True, storage="fp8_e5m2"),
    wide.variant(128, "bf16", 16, has_soft_cap=True, storage="fp8_e4m3"),
]
SHORT = [
    wide.short_variant(wide.variant(128, dtype, page))
    for dtype in ("fp16", "bf16")
    for page in (0, 16, 64)
]
LONG = [
    wide.long_variant(wide.variant(64, dtype, page))
    for dtype in ("fp16", "bf16")
    for page in (0, 16)
]


TOKENS = [
    wide.variant(d, "fp16", page, has_mask=mask, has_soft_cap=cap)
    for d in (64, 128)
    for page, mask, cap in ((1, False, False), (5, True, False), (5, False, True), (5, True, True))
]
PAIRS = [wide.pair_variant(variant) for variant in PLAIN]


@pytest.mark.long
@pytest.mark.parametrize(
    "variant",
    chosen([*PLAIN, *OTHERS, *TOKENS, *filter(None, [*SHORT, *LONG, *PAIRS])], 12),
    ids=lambda variant: str(variant.spec),
)
def test_every_specialisation_compiles_without_spills_or_serialised_products(
    variant: wide.WideVariant,
) -> None:
    compiled = compile_spec(variant.spec, "sm_90a")
    resources = compiled.resources
    assert resources.spill_bytes == 0, resources
    assert resources.stack_bytes == 0, resources
    assert resources.registers <= 65536 // (variant.threads * variant.blocks), resources
    assert "C75" not in compiled.log, compiled.log  # ptxas says when it serialises wgmma
    assert variant.blocks * (variant.shared_bytes + RESERVED) <= shared_limit("sm_90a")


STORED = [
    wide.variant(d, "fp16", 16, has_soft_cap=has_cap, storage="fp8_e4m3")
    for d in (64, 128, 192)
    for has_cap in (False, True)
]
CAPPED = [wide.variant(d, "fp16", 16, has_soft_cap=True) for d in HEAD_DIMS]


@pytest.mark.long
@pytest.mark.parametrize(
    "variant", chosen([*PLAIN[1::2], *STORED, *CAPPED], 10), ids=lambda variant: str(variant.spec)
)
def test_variants_of_invariant_numerics_spill_nothing_and_serialise_no_products(
    variant: wide.WideVariant,
) -> None:
    few = wide.few_variant(variant)
    for one in (few, wide.joining_variant(few), wide.joining_variant(variant)):
        compiled = compile_spec(one.spec, "sm_90a")
        assert compiled.resources.spill_bytes == 0, compiled.resources
        assert compiled.resources.stack_bytes == 0, compiled.resources
        assert "C75" not in compiled.log, compiled.log
        assert one.blocks * (one.shared_bytes + RESERVED) <= shared_limit("sm_90a")


@pytest.mark.parametrize("page", [0, 5, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_ctas_have_the_arithmetic_of_one(head_dim: int, page: int) -> None:
    usual = wide.variant(head_dim, "bf16", 16)
    pair = wide.pair_variant(wide.variant(head_dim, "bf16", page))
    assert pair is not None and (pair.blocks, pair.tile_rows) == (2, 64)
    assert pair.tile_keys == usual.tile_keys and pair.by_token == (page == 5)
    assert 2 * (pair.shared_bytes + RESERVED) <= shared_limit("sm_90a")


@pytest.mark.parametrize("variant", [*PLAIN, *OTHERS], ids=lambda variant: str(variant.spec))
def test_few_rows_have_the_arithmetic_of_many(variant: wide.WideVariant) -> None:
    few = wide.few_variant(variant)
    assert few.tile_rows == 64 and few.tile_keys == variant.tile_keys
    assert few.query_registers == variant.query_registers
    for one in (few, wide.joining_variant(few), wide.joining_variant(variant)):
        assert one.shared_bytes <= wide.MOST_SHARED


def test_queries_are_in_registers_where_there_is_room_for_them() -> None:
    for head_dim, plain, general in ((64, 192, 128), (128, 128, 128), (192, 64, 64), (256, 64, 64)):
        for mask, cap in ((False, False), (True, False), (False, True), (True, True)):
            made = wide.variant(head_dim, "fp16", 16, mask, cap)
            assert made.tile_keys == (general if mask or cap else plain), made
            assert made.query_registers == (head_dim <= (64 if mask or cap else 128)), made


def box_offsets(shape: tensor_maps.MapShape, corner: tuple[int, ...]) -> np.ndarray:
    """Byte offsets in memory of a box's elements, in the order they land in shared memory."""
    grid = np.indices(shape.box[::-1]).reshape(len(shape.box), -1)[::-1]
    at = grid + np.array(corner)[:, None]
    assert (at < np.array(shape.extents)[:, None]).all(), (shape, corner)
    return (at * np.array((2, *shape.strides))[:, None]).sum(0)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_page_lands_as_groups_of_eight_keys_by_blocks_of_64_dims(
    layout: Layout, page_size: int, head_dim: int
) -> None:
    g = PoolGeometry(2, 3, page_size, 4, head_dim, layout, "fp16")
    elements = np.arange(g.num_layers * np.prod(g.layer_shape)).reshape(2, *g.layer_shape)
    if layout == "HND":
        elements = elements.swapaxes(3, 4)  # [layer, page, k or v, slot, head, dim]
    shape = tensor_maps.paged_shape(g.groups[0], layout, head_dim, g.num_layers * g.num_pages)
    nhd = layout == "NHD"
    blocks = head_dim // 64 if nhd else 0
    groups = 0 if nhd else page_size // 8
    for layer, page, head in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        corner = (0, 0, head * blocks, head * groups, layer * g.num_pages + page)
        wanted = elements[layer, page, 0, :, head]  # [slot, dim]
        wanted = wanted.reshape(page_size // 8, 8, head_dim // 64, 64).swapaxes(1, 2)
        assert (box_offsets(shape, corner) == 2 * wanted.ravel()).all(), corner


def test_ragged_keys_land_as_blocks_of_64_dims() -> None:
    variant = wide.variant(128, "fp16", 0)
    shape = tensor_maps.ragged_shape(1000, 4, 128, variant.tile_keys)
    elements = np.arange(1000 * 4 * 128).reshape(1000, 4, 128)
    wanted = elements[37 : 37 + variant.tile_keys, 3, 64:]
    assert (box_offsets(shape, (0, 37, 3 * 2 + 1)) == 2 * wanted.ravel()).all()


def test_geometries_that_the_kernel_does_not_support_go_to_the_other_kernel() -> None:
    assert wide.supports("sm_90a", 128, "fp16", "fp16", 16, 0.1)
    assert wide.supports("sm_90a", 64, "bf16", "bf16", 0, 0.1)
    assert wide.supports("sm_90a", 128, "bf16", "fp8_e4m3", 5, 0.1)
    assert wide.supports("sm_90a", 128, "fp16", "fp16", 5, 0.1)
    refused = [
        ("sm_100", 128, "fp16", "fp16", 16, 0.1),
        ("sm_90a", 80, "fp16", "fp16", 16, 0.1),
        ("sm_90a", 128, "bf16", "fp16", 16, 0.1),
        ("sm_90a", 256, "fp16", "fp8_e4m3", 16, 0.1),
        ("sm_90a", 128, "fp16", "fp8_e4m3", 16, 0.0),
        ("sm_90a", 192, "fp16", "fp16", 5, 0.1),
        ("sm_90a", 128, "fp16", "fp16", 16, 0.0),
        ("sm_90a", 128, "fp16", "fp16", 16, -0.1),
    ]
    for case in refused:
        assert not wide.supports(*case), case  # type: ignore[arg-type]


def test_heads_worked_on_together_divide_the_heads() -> None:
    for heads in range(1, 33):
        for items, runs in ((16, 1), (200, 1), (2000, 500)):
            assert heads % wide.heads_together(heads, items, runs) == 0, (heads, items, runs)
    assert wide.heads_together(8, 256, 1) == 4
    assert wide.heads_together(8, 512, 16) == 2
