"""A door's estimate of an engine's remaining work."""

from __future__ import annotations

from typing import Any

import pytest

from service.cluster.membership.engine import EngineSession
from service.cluster.placement.cost import MOST_WORK_S, EngineLoad, Pace
from service.operations.attention import PREFILL
from service.operations.rows import APPEND
from service.operations.sequences import CREATE_SEQUENCES, DELETE_SEQUENCES

UNUSED: Any = None
"""Neither link nor arena is asked for anything."""


def engine() -> EngineSession:
    made = EngineSession("a", UNUSED, UNUSED)
    made.load = EngineLoad(free=100, pace=Pace(page_s=1.0, pair_s=0.5))
    return made


def test_a_prompt_is_work_at_the_engines_pace() -> None:
    one = engine()
    one.add_work(0, 4)
    assert one.load_now.work_s == pytest.approx(8.0, abs=0.5)
    one.add_work(4, 6)
    assert one.load_now.work_s == pytest.approx(15.0, abs=0.5), "late pages take longer"
    one.add_work(6, 6)
    assert one.load_now.work_s == pytest.approx(15.0, abs=0.5), "all of it was cached"


def test_an_announced_prompt_that_never_comes_does_not_block_an_engine_forever() -> None:
    one = engine()
    one.add_work(0, 10**9)
    assert one.load_now.work_s <= MOST_WORK_S
    for _ in range(12):
        one.halve_work()
    assert one.load_now.work_s < 0.1


def test_pages_that_were_promised_are_held_once_their_rows_are_written() -> None:
    one = engine()
    one.promised = 10
    one.set_held(30, CREATE_SEQUENCES)  # a prefix that was cached
    assert (one.load_now.held, one.load_now.promised) == (30, 10)
    one.set_held(36, PREFILL)
    assert (one.load_now.held, one.load_now.promised) == (36, 4)
    one.set_held(50, APPEND)
    assert (one.load_now.held, one.load_now.promised) == (50, 0), "more than was promised"
    one.set_held(20, DELETE_SEQUENCES)
    one.set_held(None, APPEND)  # not reported
    assert (one.load_now.held, one.load_now.room, one.load_now.total) == (20, 80, 100)


def test_calls_under_way_count_by_what_calls_take_lately() -> None:
    one = engine()
    one.num_waiting, one.call_s = 3, 0.5
    assert one.load_now.work_s == 1.5
