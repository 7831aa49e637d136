"""Kernels find each row of a pool where the CPU's tensors have it, in pools of one group of layers
and of several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.backend import NUMPY_DTYPES, LayerGroup, Layout, PoolGeometry, Unsupported
from kernels.cpu.pool import allocate, pool_of
from kernels.cuda import checks
from kernels.cuda.kv import pool as cuda_pool
from kernels.cuda.kv.pool import pool_view

GROUPS = (
    LayerGroup((0, 2, 3), 4, 64, 64, 8, "fp16", window=24),
    LayerGroup((1, 5), 2, 128, 128, 32, "bf16"),
    LayerGroup((4,), 2, 64, 64, 16, "fp8_e4m3", window=9),
    LayerGroup((6, 7), 2, 192, 128, 16, "fp16", window=9),
    LayerGroup((8,), 1, 576, 512, 16, "bf16", kind="latent"),
)
ADDRESS = 2**40


def pools(layout: Layout) -> tuple[PoolGeometry, ...]:
    return (
        PoolGeometry(3, 5, 16, 2, 64, layout, "fp16"),
        PoolGeometry.of_groups(GROUPS, 5, layout, (0.5, 2.0)),
    )


def places(geometry: PoolGeometry, group: LayerGroup) -> list[tuple[torch.Tensor, int]]:
    """The first byte of each row of K and of V, `[layer, page, token, head]`, on the host."""
    memory = allocate(geometry)
    pool = pool_of(memory, geometry, group)
    return [(one.by_token, one.by_token.data_ptr() - memory.data_ptr()) for one in (pool.k, pool.v)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_are_where_the_strides_say(layout: Layout) -> None:
    for geometry in pools(layout):
        for group in geometry.groups:
            kv = pool_view(geometry, group, ADDRESS)
            size = NUMPY_DTYPES[group.dtype].itemsize
            unit = size * kv.row_unit
            for (tensor, begin), address in zip(places(geometry, group), (kv.k, kv.v), strict=True):
                if not (row := size * tensor.shape[-1]):
                    continue  # V of latents
                within = kv.token_rows * row, kv.head_rows * row
                got = (kv.layer_bytes, kv.page_rows * unit, *within)
                want = [one * size for one in tensor.stride()]
                # a stride of one layer, or of one head, moves nothing
                used = [at for at in range(4) if tensor.shape[at] > 1]
                assert [got[at] for at in used] == [want[at] for at in used], (layout, group)
                assert address - ADDRESS == begin
            assert kv.layer_rows * unit == kv.layer_bytes
            assert (kv.k_scale, kv.v_scale) == geometry.scales_of(group.dtype)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_map_s_boxes_are_pages_of_one_layer(layout: Layout, monkeypatch) -> None:
    """The copy engine's box of each page of each layer begins at that page, and ends in it."""
    made: list[Any] = []

    def encode(shape: Any, address: int, _: Any) -> bytes:
        made.append((shape, address))
        return b""

    monkeypatch.setattr("kernels.cuda.kv.tensor_maps._encode", encode)
    for geometry in pools(layout):
        for group in (*geometry.groups[:2], *geometry.groups[3:4]):
            rows = places(geometry, group)
            kv = pool_view(geometry, group, ADDRESS)
            for layer in range(len(group.layers)):
                made.clear()
                kv.maps(layer, 128)
                for (shape, address), (tensor, begin) in zip(made, rows, strict=True):
                    for page in range(geometry.num_pages):
                        want = begin + 2 * int(np.dot(tensor.stride()[:2], (layer, page)))
                        assert address - ADDRESS + page * shape.strides[-1] == want
                    assert shape.extents[-1] >= geometry.num_pages
                    assert max(shape.extents[-1] - 1, 0) * shape.strides[-1] < (
                        geometry.num_pages * geometry.payload_bytes
                    )


def test_a_pool_of_several_groups_takes_whole_pages(monkeypatch) -> None:
    taken = []

    class Transfers:
        def scratch(self, size: int) -> None:
            taken.append(size)

    for geometry in pools("NHD"):
        cuda_pool.allocate(geometry, Transfers(), poison=False)  # type: ignore[arg-type]
    assert taken == [5 * geometry.payload_bytes for geometry in pools("NHD")]


@pytest.mark.parametrize(
    ("group", "field"),
    [
        (LayerGroup((0,), 2, 64, 64, 16, "fp32"), "dtype"),
        (LayerGroup((0,), 2, 40, 40, 16, "fp16"), "head_dim"),
        (LayerGroup((0,), 2, 192, 100, 16, "fp16"), "v_head_dim"),
        (LayerGroup((0,), 2, 264, 128, 16, "fp16"), "head_dim"),
        (LayerGroup((0,), 2, 192, 72, 16, "fp8_e4m3"), "v_head_dim"),
        (LayerGroup((0,), 1, 576, 512, 16, "fp8_e4m3", kind="latent"), "dtype"),
        (LayerGroup((0,), 1, 570, 512, 16, "bf16", kind="latent"), "row"),
    ],
)
def test_groups_without_kernels_are_refused(group: LayerGroup, field: str) -> None:
    other = LayerGroup((1,), 2, 64, 64, 16, "fp16")
    with pytest.raises(Unsupported) as refusal:
        checks.check_pool(PoolGeometry.of_groups((other, group), 4))
    assert refusal.value.field == field
