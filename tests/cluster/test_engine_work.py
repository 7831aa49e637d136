"""What a door thinks that an engine has yet to do: what it was given, until that should be done."""

from __future__ import annotations

from typing import Any

import pytest

from service.cluster.engine import Engine
from service.cluster.placement import MOST_WORK_S, Load, Pace

NOBODY: Any = None
"""Neither link nor arena is asked for anything."""


def engine() -> Engine:
    made = Engine("a", NOBODY, NOBODY)
    made.load = Load(free=100, pace=Pace(page_s=1.0, pair_s=0.5))
    return made


def test_a_prompt_is_work_at_the_pace_that_the_engine_told() -> None:
    one = engine()
    one.give(0, 4)
    assert one.load_now.work_s == pytest.approx(8.0, abs=0.5)
    one.give(4, 6)
    assert one.load_now.work_s == pytest.approx(15.0, abs=0.5), "late pages take longer"
    one.give(6, 6)
    assert one.load_now.work_s == pytest.approx(15.0, abs=0.5), "all of it was cached"


def test_a_prompt_that_is_announced_and_never_comes_keeps_nobody_away_for_ever() -> None:
    one = engine()
    one.give(0, 10**9)
    assert one.load_now.work_s <= MOST_WORK_S
    for _ in range(12):
        one.rest()
    assert one.load_now.work_s < 0.1


def test_calls_under_way_count_by_what_calls_take_lately() -> None:
    one = engine()
    one.num_waiting, one.call_s = 3, 0.5
    assert one.load_now.work_s == 1.5
