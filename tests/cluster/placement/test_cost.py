"""Placement: which engine a new sequence goes to, by numbers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.cluster.placement.cost import (
    MOST_WORK_S,
    EngineLoad,
    Pace,
    busy_until_s,
    choose,
    spread,
)

PACE = Pace(page_s=1e-3, read_s=1e-6)
IDLE = EngineLoad(free=1000, pace=PACE)


def test_a_prompt_goes_where_its_longest_prefix_is() -> None:
    loads = {"a": IDLE, "b": IDLE, "c": IDLE}
    assert choose(loads, {"b": 10, "c": 7}, 20) == "b"


def test_without_a_prefix_it_goes_where_least_is_held() -> None:
    assert (
        choose({"a": EngineLoad(free=500, held=500), "b": EngineLoad(free=800, held=200)}, {}, 20)
        == "b"
    )


def test_equal_engines_are_taken_by_room_and_then_by_name() -> None:
    assert choose({"b": IDLE, "a": IDLE}, {}, 20) == "a"
    assert choose({"a": EngineLoad(free=900), "b": EngineLoad(free=900, cached=50)}, {}, 20) == "b"


def test_an_engine_that_is_too_full_is_passed_over_whatever_it_has_cached() -> None:
    loads = {"a": EngineLoad(free=10, held=990), "b": IDLE}
    assert choose(loads, {"a": 100}, 120) == "b"


def test_when_all_are_too_full_the_cheapest_is_asked_all_the_same() -> None:
    loads = {"a": EngineLoad(free=10, held=990), "b": EngineLoad(free=5, held=995)}
    assert choose(loads, {}, 120) == "a"


def test_a_prompt_waits_for_its_pages_no_longer_than_they_are_worth() -> None:
    for queue_s, work_s in ((0.0, 30.0), (30.0, 0.0)):
        busy = EngineLoad(free=10_000, queue_s=queue_s, work_s=work_s, pace=PACE)
        loads = {"a": busy, "b": replace(IDLE, free=10_000)}
        assert choose(loads, {"a": 100}, 1000) == "b", "100 ms of work are saved there"
        assert choose(loads, {"a": 2000}, 2000) == "a", "2 s are"
        loads["a"] = replace(busy, queue_s=0.0, work_s=1.5)
        assert choose(loads, {"a": 100}, 1000) == "a"


def test_the_pages_to_compute_cost_time_at_the_engines_own_pace() -> None:
    slow = replace(IDLE, pace=Pace(page_s=1e-2, read_s=0.0))
    assert choose({"a": slow, "b": IDLE}, {}, 50) == "b"
    behind = replace(IDLE, work_s=0.3)
    assert choose({"a": slow, "b": behind}, {}, 50) == "b", "it is done sooner all the same"
    assert choose({"a": slow, "b": behind}, {}, 20) == "a"


@pytest.mark.parametrize(
    ("cached", "needed", "wins"), [(10, 100, "b"), (50, 200, "b"), (98, 100, "a")]
)
def test_a_slow_engine_needs_more_than_a_few_pages_of_a_prompt(
    cached: int, needed: int, wins: str
) -> None:
    """What another engine computes again costs time only at that engine's own pace."""
    slow = replace(IDLE, pace=Pace(page_s=1e-2, read_s=0.0))
    assert choose({"a": slow, "b": IDLE}, {"a": cached}, needed) == wins


def test_a_pace_measured_in_a_busy_moment_keeps_no_engine_from_prompts() -> None:
    usual, spoiled = Pace(1e-3, 1e-5, 1e-6), Pace(1e-3, 2e-4, 3e-5)
    others = [usual, Pace(9e-4, 9e-6, 9e-7), spoiled, usual]
    assert spoiled.near(others) == Pace(1e-3, 2e-5, 2e-6)
    assert usual.near(others) == usual
    assert spoiled.near([spoiled, usual]) == Pace(1e-3, 2e-5, 2e-6), "of two, the faster counts"
    unasked = Pace(1e-7, 1e-9, 1e-10)
    assert unasked.near([*others, unasked]) == Pace(5e-4, 5e-6, 5e-7)
    assert usual.near([usual]) == usual


def test_late_pages_of_a_long_prompt_take_longer() -> None:
    pace = Pace(page_s=1e-3, pair_s=1e-5)
    assert pace.span_s(0.0, 100) == pytest.approx(0.1 + 1e-5 * 100 * 100 / 2)
    whole = pace.span_s(0.0, 300)
    assert pace.span_s(0.0, 200) + pace.span_s(200.0, 300) == pytest.approx(whole)
    assert pace.span_s(200.0, 300) > pace.span_s(0.0, 100)


def test_held_pages_cost_the_time_to_read_them_for_an_answer() -> None:
    busy = replace(IDLE, free=500, held=500)
    assert choose({"a": busy, "b": IDLE}, {"a": 20}, 40) == "a", "40 ms of 20 pages, 40 of reading"
    slow = replace(busy, pace=replace(PACE, read_s=1e-3))
    assert choose({"a": slow, "b": IDLE}, {"a": 20}, 40) == "b"


def test_of_two_engines_with_a_beginning_the_longer_one_wins_unless_most_is_there_as_well() -> None:
    loads = {"a": replace(IDLE, work_s=0.3), "b": IDLE}
    assert choose(loads, {"a": 10}, 40) == "a"
    assert choose(loads, {"a": 10, "b": 8}, 40) == "b"


def test_the_assumed_work_of_an_engine_is_bounded() -> None:
    assert busy_until_s(5.0, 10.0, 2.0) == 12.0
    assert busy_until_s(15.0, 10.0, 2.0) == 17.0
    assert busy_until_s(15.0, 10.0, 1e9) == 10.0 + MOST_WORK_S


def test_a_shared_beginning_does_not_draw_everything_to_one_engine() -> None:
    work_s = {"a": 0.0, "b": 0.0}
    for _ in range(400):
        loads = {
            name: EngineLoad(free=10_000, work_s=some, pace=PACE) for name, some in work_s.items()
        }
        chosen = choose(loads, {"a": 5}, 50)
        work_s[chosen] += PACE.span_s(5.0 if chosen == "a" else 0.0, 50)
    assert work_s["b"] > 0.9 * work_s["a"], work_s


def test_pages_promised_since_the_latest_poll_count() -> None:
    loads = {"a": EngineLoad(free=1000, promised=500), "b": EngineLoad(free=1000, held=20)}
    assert choose(loads, {}, 10) == "b"


def test_no_engine_is_a_bug() -> None:
    with pytest.raises(ValueError, match="bug"):
        choose({}, {}, 1)


@pytest.mark.parametrize(
    ("loads", "count"),
    [
        ([], 1),
        ([EngineLoad(free=10, held=90)], 2),
        ([EngineLoad(free=90, held=10, queue_s=1.0)], 2),
        ([EngineLoad(free=50, held=50)], 1),
        ([EngineLoad(free=100), EngineLoad(free=90, held=10)], 1),
        ([EngineLoad(free=40, held=60), EngineLoad(free=40, held=60)], 2),
        ([EngineLoad(free=100), EngineLoad(free=90, held=10, queue_s=0.4)], 2),
    ],
)
def test_engines_are_added_for_want_of_pages_or_time_and_taken_away_with_room_to_spare(
    loads: list[EngineLoad], count: int
) -> None:
    assert spread(loads, least_free=0.2, most_queue_s=0.5) == count


def test_pages_in_lower_tiers_are_cheaper_than_computing_and_dearer_than_the_pool() -> None:
    loads = {"a": IDLE, "b": IDLE}
    assert choose(loads, {"a": 20, "b": 20}, 40, {"a": 20}) == "b"
    assert choose(loads, {"a": 20, "b": 20}, 40, {"a": 1}) == "b"
    assert choose(loads, {"a": 20}, 40, {"a": 20}) == "a"
    assert choose(loads, {"a": 20, "b": 12}, 40, {"a": 20}) == "a", "8 are computed there"
    full = replace(IDLE, free=0, cached=60, held=940)
    assert choose({"a": full, "b": IDLE}, {"a": 20}, 20, {"a": 20}) == "b", "loads need room"
    assert choose({"a": full, "b": IDLE}, {"a": 20}, 20) == "a"
