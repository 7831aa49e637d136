"""Merge lists made from tile cuts equal the lists of the runs themselves."""

from __future__ import annotations

import numpy as np
import pytest
from flat_plans import decode_plan

from kernels.cuda.plan.merges import merge_lists
from kernels.cuda.plan.planner import make_work
from kernels.cuda.plan.tiles import FINAL, PARTIAL, PlannerConfig, TileShape

NARROW = TileShape("narrow", 16, 16, 132 * 8, 16, True, 128, teams=(1, 2, 4, 8))
WIDE = TileShape("wide", 128, 2**30, 132, 64, False, 256, key_seconds=0.25)
CONFIG = PlannerConfig(4, 16, 8, -1, (NARROW, WIDE))


@pytest.mark.parametrize(
    "kv_lens",
    [
        pytest.param([100, 100], id="whole"),
        pytest.param([1000], id="one sequence"),
        pytest.param([9000] * 3, id="cut alike"),
        pytest.param([4000, 17, 900], id="few"),
        pytest.param([40_000, 3000, 40_000, 17], id="skewed"),
        pytest.param(list(range(100, 3000, 10)), id="many"),
    ],
)
def test_lists_of_cuts_are_those_gathered_from_the_runs(kv_lens: list[int]) -> None:
    work = make_work([(0, decode_plan(kv_lens))], CONFIG)
    (launch,) = work.kernels
    runs = launch.items.copy()
    runs[:, PARTIAL] = FINAL
    gathered = merge_lists(runs, len(kv_lens) * CONFIG.group_size, CONFIG.chunk)
    assert runs.tolist() == launch.items.tolist()
    for name in ("chunks", "indptr", "members"):
        assert getattr(work.merges, name).tolist() == getattr(gathered, name).tolist(), name
    assert gathered.longest == max([0, *np.diff(gathered.indptr).tolist()])
    assert not len(gathered.chunks) or work.merges.longest == gathered.longest
