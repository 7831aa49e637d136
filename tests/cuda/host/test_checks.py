"""Plans that would make a kernel read where it must not are refused, and the numbers are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.backend import Level, PoolGeometry, Unsupported
from kernels.cuda.checks import check_level, check_pool

GEOMETRY = PoolGeometry(1, 8, 16, 2, 64)


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


GOOD = Level(
    qo_indptr=int32(0, 1, 1, 3),
    kv_indptr=int32(0, 2, 2, 3),
    kv_indices=int32(7, 0, 3),
    kv_last_page_len=int32(16, 0, 1),
    kv_start=int32(0, 0, 5),
    causal=False,
)


def test_a_level_within_the_pool_passes() -> None:
    check_level(GOOD, 3, GEOMETRY)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("qo_indptr", int32(0, 2, 1, 3), "qo_indptr"),
        ("qo_indptr", int32(1, 1, 1, 3), "qo_indptr"),
        ("kv_indptr", int32(0, 2, 2, 4), "kv_indptr"),
        ("kv_indptr", int32(0, 2, 3), "kv_indptr"),
        ("kv_indices", int32(7, 0, 8), r"kv_indices = \(0, 8\): pages are 0..7"),
        ("kv_indices", int32(7, -1, 3), r"kv_indices = \(-1, 7\): pages are 0..7"),
        ("kv_last_page_len", int32(17, 0, 1), r"\[17\]"),
        ("kv_last_page_len", int32(16, 0, 0), r"\[0\]"),
        ("kv_last_page_len", int32(16, 3, 1), r"\[3\]"),
        ("kv_last_page_len", int32(16, 0, -2), r"\[-2\]"),
        ("kv_last_page_len", int32(16, 0), "kv_last_page_len"),
        ("kv_start", int32(0, 0), "kv_start"),
    ],
)
def test_a_level_that_is_not_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_level(replace(GOOD, **{field: value}), 3, GEOMETRY)


@pytest.mark.parametrize(("num_pages", "fits"), [(2**20 - 1, True), (2**20, False)])
def test_a_pool_beyond_32_bits_of_rows_is_refused(num_pages: int, fits: bool) -> None:
    """2 (K and V) x 8 layers x 16 slots x 16 heads are 2^12 rows a page: 275 GB of fp8 in all."""
    geometry = PoolGeometry(8, num_pages, 16, 16, 64, "NHD", "fp8_e4m3")
    if fits:
        check_pool(geometry)
        return
    with pytest.raises(Unsupported, match=f"at most {2**20 - 1} pages"):
        check_pool(geometry)
