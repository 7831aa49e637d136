"""Custom masks that hide whole tiles of keys: both kernels' states on a device against float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

from kernels.backend import Attend, DType, Mask, PoolGeometry, Scoring  # noqa: E402
from kernels.masks import make_mask  # noqa: E402


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
