"""Workloads drawn at random are complete rows, the same for a seed, within bounds."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from bench.cases.kernel_plans import pool_plan
from bench.cases.random_rows import MOST_BYTES, MOST_FLOPS, random_rows


def test_random_rows_are_workloads_within_bounds() -> None:
    rows = random_rows(60, np.random.default_rng(3))
    assert rows == random_rows(60, np.random.default_rng(3))
    assert {row["kind"] for row in rows} == {"decode", "prefill", "cascade"}
    for row in rows:
        geometry, plan = pool_plan(row)
        read = sum(
            int(np.sum((np.diff(level.kv_indptr) - 1) * row["page_size"] + level.kv_last_page_len))
            for level in plan.levels
        )
        token_bytes = geometry.page_bytes // row["page_size"]
        q_bytes = 4 * len(plan.positions) * row["num_qo_heads"] * row["head_dim"]
        assert row["bytes"] == read * token_bytes + q_bytes
        assert read * token_bytes < 1.5 * MOST_BYTES
        assert row["flops"] <= 1.5 * MOST_FLOPS
