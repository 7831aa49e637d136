"""The kernels of latent pools, and of K and V of two sizes, without a device."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from compiled import chosen

from kernels.backend import DType, LayerGroup, PoolGeometry, Scoring
from kernels.compile import SOURCES, compile_spec
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.attention.kernel_sets import kernel_sets
from kernels.cuda.kv import tensor_maps
from kernels.cuda.kv.pool import pool_view
from kernels.cuda.kv.ragged import ragged_view
from kernels.cuda.latent import variants as latent
from kernels.cuda.plain.variants import plain_kernel
from kernels.cuda.specs import group_specs
from kernels.cuda.wide import variants as wide

LATENTS = list(product(("fp16", "bf16"), latent.PAGE_SIZES, (False, True), (False, True)))
UNEQUAL = [
    wide.variant(192, "bf16", page, mask, cap, v_head_dim=128)
    for page, mask, cap in product((0, 8, 16, 64), (False, True), (False, True))
]


@pytest.mark.long
@pytest.mark.parametrize("options", chosen(LATENTS, 11))
def test_no_latent_kernel_spills(options: Any) -> None:
    compiled = compile_spec(latent.latent_kernel(*options).spec, "sm_90a")
    assert (compiled.resources.stack_bytes, compiled.resources.spill_bytes) == (0, 0)
    assert not re.findall(r"C75\d\d", compiled.log), "products are serialised"


@pytest.mark.long
@pytest.mark.parametrize("variant", chosen(UNEQUAL, 7), ids=str)
def test_no_kernel_of_two_sizes_spills(variant: wide.WideVariant) -> None:
    others = [variant, wide.few_variant(variant)]
    if not variant.has_mask:
        others += map(wide.joining_variant, others.copy())
    for one in others:
        assert one.shared_bytes <= wide.MOST_SHARED
        compiled = compile_spec(one.spec, "sm_90a")
        assert (compiled.resources.stack_bytes, compiled.resources.spill_bytes) == (0, 0), one
        assert not re.findall(r"C75\d\d", compiled.log), "products are serialised"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_plain_kernel_has_all_shapes(arch: str) -> None:
    shapes: list[tuple[tuple[int, int], bool, DType, DType]] = [
        ((576, 512), True, "bf16", "bf16"),
        ((72, 40), False, "fp16", "fp16"),
        ((192, 128), False, "bf16", "fp8_e4m3"),
    ]
    for shape in shapes:
        assert compile_spec(plain_kernel(*shape).spec, arch).resources.spill_bytes == 0


def test_shared_memory_of_the_latent_kernel_is_as_its_source_lays_it_out() -> None:
    text = (SOURCES / "latent/shared.cuh").read_text()
    for has_mask in (False, True):
        known = {"kTileRows": 64, "kTileKeys": 64, "kBlocks": 9, "kLeftBlocks": 4}
        known |= {"kPairKeys": 128, "HAS_MASK": has_mask, "kQueryBlock": 64 * 128}
        known |= {"kTileBytes": 64 * 9 * 128}
        for name, value in re.findall(
            r"^constexpr int (kAt\w+|kSharedBytes) =\s*(.+?);", text, re.M
        ):
            value = re.sub(r"\((.+?) \? (\d+) : (\d+)\)", r"(\2 if \1 else \3)", value)
            known[name] = eval(value, {}, known)
        assert latent.shared_bytes(has_mask) == known["kSharedBytes"] <= wide.MOST_SHARED


def latent_group(page_size: int = 16, dtype: DType = "bf16", dims=(576, 512)) -> LayerGroup:
    return LayerGroup((0, 1), 1, *dims, page_size, dtype, None, "latent")


def entries(group: LayerGroup, compute: DType, arch: str, split: int = 0, scale=1.0) -> set[str]:
    view = pool_view(PoolGeometry.of_groups((group,), 64), group, 0)
    config = AttentionConfig(view, 16, compute, Scoring(scale), False)
    sets = kernel_sets(config.shape, arch, 132, split)
    return {kernel.entry for one in sets.values() for kernel in one.kernels}


@pytest.mark.parametrize("split", [0, 2048])
def test_each_shape_has_a_kernel(split: int) -> None:
    group, unequal = latent_group(), LayerGroup((0,), 2, 192, 128, 16, "fp16")
    assert entries(group, "bf16", "sm_90a", split) == {"attend_latent"}
    assert entries(group, "bf16", "sm_90a", split, -1.0) == {"attend_plain"}
    assert entries(group, "bf16", "sm_80", split) == {"attend_plain"}
    assert entries(latent_group(5), "bf16", "sm_90a", split) == {"attend_plain"}
    assert entries(latent_group(dims=(96, 64)), "bf16", "sm_90a", split) == {"attend_plain"}
    assert entries(unequal, "fp16", "sm_90a", split) == {"attend_wide"}
    assert entries(unequal, "fp16", "sm_90a", split, 0.0) == {"attend_plain"}
    assert entries(unequal, "fp16", "sm_100", split) == {"attend_plain"}
    other = LayerGroup((0,), 2, 64, 128, 16, "fp16")
    assert entries(other, "fp16", "sm_90a", split) == {"attend_plain"}


def test_ragged_keys_of_two_sizes_go_by_wgmma() -> None:
    view = ragged_view(8, 192, "fp16", 1 << 20, 2 << 20, 64, 128)
    shape = AttentionConfig(view, 8, "fp16", Scoring(1.0), False).shape
    for split, page, entry in ((0, 5, "wide"), (2048, 16, "wide"), (2048, 5, "plain")):
        sets = kernel_sets(shape, "sm_90a", 132, split, page)
        kernels = {kernel.entry for one in sets.values() for kernel in one.kernels}
        assert kernels == {f"attend_{entry}"}


def test_what_a_group_launches_is_compiled_before_a_service_starts() -> None:
    specs = group_specs("sm_90a", latent_group(), "invariant")
    sources = [one.source for one in specs]
    assert sources.count("latent/attend_latent") == 4
    assert {"rows/rows", "merge/merge", "pages/pages"} <= set(sources)
    unequal = LayerGroup((0,), 2, 192, 128, 16, "fp16")
    assert "wide/attend_wide" in {one.source for one in group_specs("sm_90a", unequal)}


def test_a_page_of_latents_lands_in_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(tensor_maps, "_encode", lambda *given: made.append(given) or b"")
    group = latent_group(16)
    geometry = PoolGeometry.of_groups((group,), 10)
    pool_view(geometry, group, 1 << 30).maps(1, 128)
    for (shape, address, _), blocks in zip(made, (4, 5), strict=True):
        assert shape.extents == (64, 8, 9, 2, 20)
        assert shape.strides == (1152, 128, 8 * 1152, 16 * 1152)
        assert shape.box == (64, 8, blocks, 2, 1)
        assert address == (1 << 30) + 10 * 16 * 1152
