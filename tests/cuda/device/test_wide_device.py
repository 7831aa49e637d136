"""The wide kernel on a device against float64, dead slots poisoned with NaN; and tiles that a
custom mask hides whole: which they are, and both kernels' states without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.cuda.wide_cases import Case, case_variant, groups

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from kernels.backend import Attend, DType, Mask, PoolGeometry, Scoring  # noqa: E402
from kernels.masks import make_mask  # noqa: E402

MASKED = [case for case in (*groups()["general"], *groups()["skipped"]) if case.mask]


def seen_and_cut(bench: Any, item: Any, begin: int) -> tuple[bool, bool]:
    """The expected table entry of a tile whose item starts at key `begin` of its run."""
    case, (_, row_begin, num_rows, _, num_keys, start, causal, _) = bench.case, item
    rows = np.arange(row_begin // case.group, (row_begin + num_rows - 1) // case.group + 1)
    keys = start + np.arange(begin, min(begin + bench.variant.tile_keys, num_keys))
    own = bench.plan.positions[rows][:, None]
    left = np.ones((len(rows), len(keys)), bool)
    if causal & 1:
        left &= keys <= own
    if causal & 2:
        left &= keys >= own - case.window
    mask = bench.mask[rows][:, keys]
    return bool((left & mask).any()), bool((left & ~mask).any())


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_the_table_says_of_every_tile_whether_it_is_seen_and_cut(case: Case) -> None:
    from tests.cuda.wide_device import Bench, load

    variant = case_variant(case)
    bench = Bench(
        dataclasses.replace(case, granule=variant.tile_keys), variant, seed=1, poison=True
    )
    bench.visible.fill_(0x55555555)
    bench.launch(load(variant))
    bench.torch.cuda.synchronize()
    items = bench.items.cpu().numpy()
    table = bench.visible.cpu().numpy().view(np.uint32).reshape(len(items), -1, 2)
    for index, item in enumerate(items):
        tiles = 32 * table.shape[1]
        expected = [seen_and_cut(bench, item, t * variant.tile_keys) for t in range(tiles)]
        bits = table[index][:, :, None] >> np.arange(32, dtype=np.uint32) & 1
        found = bits.transpose(0, 2, 1).reshape(tiles, 2).astype(bool)
        np.testing.assert_array_equal(found, expected, err_msg=f"item {index} {item} of {case}")


@pytest.mark.parametrize("mask", ["islands", "hidden"])
def test_a_tile_that_is_not_visited_is_not_read(mask: str) -> None:
    from tests.cuda.wide_device import Bench, load

    shape = {"num_kv_heads": 1, "num_qo_heads": 4, "workers": 1}  # one worker: the run is not cut
    case = Case("not read", (32,), (4096,), mask=mask, causal=False, **shape)
    variant = case_variant(case)
    bench = Bench(case, variant, seed=3, poison=False)
    items = bench.items.cpu().numpy()
    kept = 0  # the least tile of an item of which nothing is seen is visited all the same
    for item in items:
        tiles = -(-int(item[4]) // variant.tile_keys)
        seen = [seen_and_cut(bench, item, t * variant.tile_keys)[0] for t in range(tiles)]
        for tile in range(tiles):
            if seen[tile] or (tile == 0 and not any(seen)):
                kept += 1
                continue
            first = int(item[3]) + tile * variant.tile_keys // case.page_size
            pages = bench.indices[first : first + variant.tile_keys // case.page_size]
            bench.slots[pages.long()] = float("nan")
    assert kept < 32, "nothing is skipped"
    bench.launch(load(variant))
    bench.torch.cuda.synchronize()
    bench.merge()
    assert bool(bench.o.isfinite().all()), "a NaN of a masked tile came through"


@lru_cache(maxsize=2)
def backend_of(geometry: PoolGeometry) -> Any:
    from device_cases import fill

    from kernels.cuda.backend import CudaBackend

    made = CudaBackend(geometry)
    fill(made, 1)
    return made


def mask_of(kind: str, qo_lens: list[int], kv_lens: list[int]) -> Mask:
    """Ragged masks: blocks on the diagonal, single pairs far apart, causal ones, empty ones."""
    parts = []
    for qo, kv in zip(qo_lens, kv_lens, strict=True):
        row, key = np.arange(qo)[:, None], np.arange(kv)[None]
        if kind == "blocks":
            seen = (row * 4 // max(qo, 1)) == (key * 4 // max(kv, 1))
        elif kind == "last":  # the last row and the last key of tiles of 32, 64 and 128
            seen = (row % 32 == 31) & (key % 384 == 127)
        elif kind == "causal":
            seen = key <= kv - qo + row
        else:
            seen = np.zeros((qo, kv), bool)
        parts.append(seen.ravel())
    return make_mask(np.concatenate(parts), np.array(qo_lens), np.array(kv_lens))


def configs() -> Iterator[tuple[str, DType, int, int, tuple[int, int]]]:
    """Pools of the tile kernel (fp8, odd pages, head_dim 80) and, last, of the wide one."""
    for kind in ("blocks", "last", "causal", "hidden"):
        yield kind, "fp8_e4m3", 128, 16, (8, 2)
        yield kind, "fp16", 64, 5, (4, 4)
        yield kind, "bf16", 80, 16, (8, 1)
        yield kind, "fp16", 192, 5, (4, 2)
        yield kind, "fp16", 256, 4, (4, 2)
        yield kind, "fp16", 128, 16, (8, 2)
        yield kind, "bf16", 64, 8, (7, 1)


@pytest.mark.parametrize("config", list(configs()), ids=str)
@pytest.mark.parametrize("rules", [(False, -1), (True, 150)])
def test_masks_that_hide_whole_tiles_equal_the_oracle(
    config: tuple[str, DType, int, int, tuple[int, int]], rules: tuple[bool, int]
) -> None:
    from device_cases import PagePool, Segment, assert_close, make_level, oracle, random_q

    from kernels.backend import Plan

    kind, dtype, dim, page_size, heads = config
    causal, window = rules
    qo_lens, kv_lens = [300, 40, 129], [2500, 33, 700]
    scale = (0.5, 2.0) if dtype.startswith("fp8") else (1.0, 1.0)
    pages = 3400 // page_size + 8
    backend = backend_of(PoolGeometry(1, pages, page_size, heads[1], dim, "NHD", dtype, *scale))
    bounds = np.cumsum([0, *qo_lens])
    segments = [Segment(int(bounds[i]), int(bounds[i + 1]), n, 0) for i, n in enumerate(kv_lens)]
    positions = np.concatenate(
        [np.arange(kv - qo, kv) for qo, kv in zip(qo_lens, kv_lens, strict=True)]
    ).astype(np.int32)
    rng = np.random.default_rng(dim)
    level = make_level(segments, PagePool(backend, rng), int(bounds[-1]), causal)
    plan = Plan((level,), positions)
    mask, scoring = mask_of(kind, qo_lens, kv_lens), Scoring(dim**-0.5, 0.0, window)
    compute: DType = "fp16" if dtype.startswith("fp8") else dtype
    q = random_q((int(bounds[-1]), heads[0], dim), compute, rng)
    (state,) = backend.attend([Attend(0, q, plan, scoring, mask)]).result()
    assert_close(state, oracle(backend, 0, q, plan, scoring, mask), compute)


BAR = {"fp16": 1e-3, "bf16": 1e-2}
LSE_BAR = 1e-3


def published_grid() -> Iterator[Case]:
    """Query and key counts of the usual prefill grids, the other choices taking turns."""
    choices = [
        {"page_size": page, "layout": layout, "causal": causal, "dtype": dtype, "shuffled_rows": s}
        for page, layout, causal, dtype, s in product(
            (16, 32, 64), ("NHD", "HND"), (True, False), ("fp16", "bf16"), (False, True)
        )
    ]
    shapes = product((1, 17, 37, 127, 577), (54, 97, 512, 2048))
    for number, (qo, kv) in enumerate(shapes):
        for turn in range(3):
            chosen = choices[(7 * number + 17 * turn) % len(choices)]
            yield Case(f"{qo} on {kv}", (qo, 1), (kv, kv), **chosen)


def states_are_right(case: Case) -> None:
    from tests.cuda.wide_device import launch_errors

    for error_o, error_lse in launch_errors(case, seed=1):
        assert error_o <= BAR[case.dtype], (error_o, case)
        assert error_lse <= LSE_BAR, (error_lse, case)


@pytest.mark.parametrize("case", list(published_grid()), ids=str)
def test_prefill_grid_equals_the_oracle(case: Case) -> None:
    states_are_right(case)


@pytest.mark.parametrize("case", [case for cases in groups().values() for case in cases], ids=str)
def test_layouts_dims_masks_windows_caps_and_splits_equal_the_oracle(case: Case) -> None:
    states_are_right(case)


def test_items_without_keys_give_the_empty_state() -> None:
    from tests.cuda.wide_device import Bench, load

    case = Case("no keys", (40,), (300,), causal=False)
    variant = case_variant(case)
    bench = Bench(case, variant, seed=1, poison=True)
    bench.items[:, 4] = 0
    bench.launch(load(variant))
    bench.torch.cuda.synchronize()
    bench.merge()
    assert bool((bench.o == 0).all())
    assert bool((bench.lse == -bench.torch.inf).all())
