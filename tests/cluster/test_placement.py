"""Placement: which engine a new sequence goes to, by numbers alone."""

from __future__ import annotations

import pytest

from service.cluster.placement import Load, choose, spread

IDLE = Load(free=1000)


def test_a_prompt_goes_where_its_longest_prefix_is() -> None:
    loads = {"a": IDLE, "b": IDLE, "c": IDLE}
    assert choose(loads, {"b": 10, "c": 7}, 20) == "b"


def test_without_a_prefix_it_goes_where_least_is_held() -> None:
    assert choose({"a": Load(free=500, held=500), "b": Load(free=800, held=200)}, {}, 20) == "b"


def test_equal_engines_are_taken_by_room_and_then_by_name() -> None:
    assert choose({"b": IDLE, "a": IDLE}, {}, 20) == "a"
    assert choose({"a": Load(free=900), "b": Load(free=900, cached=50)}, {}, 20) == "b"


def test_an_engine_that_is_too_full_is_passed_over_whatever_it_has_cached() -> None:
    loads = {"a": Load(free=10, held=990), "b": IDLE}
    assert choose(loads, {"a": 100}, 120) == "b"


def test_when_all_are_too_full_the_cheapest_is_asked_all_the_same() -> None:
    loads = {"a": Load(free=10, held=990), "b": Load(free=5, held=995)}
    assert choose(loads, {}, 120) == "a"


def test_a_busy_engine_loses_a_short_prefix_and_keeps_a_long_one() -> None:
    loads = {"a": Load(free=10_000, queue_s=1.0), "b": Load(free=10_000)}
    assert choose(loads, {"a": 100}, 1000) == "b"
    assert choose(loads, {"a": 900}, 1000) == "a"


def test_calls_under_way_and_their_rows_weigh_against_a_prefix() -> None:
    loads = {"a": Load(free=1000, calls=7), "b": Load(free=1000, calls=1)}
    assert choose(loads, {"a": 7}, 40) == "b"
    assert choose(loads, {"a": 9}, 40) == "a"
    loads["a"] = Load(free=1000, calls=7, bodies=300.0)
    assert choose(loads, {"a": 9}, 40) == "b"


def test_a_chat_stays_where_it_is_rather_than_being_held_twice() -> None:
    loads = {"a": Load(free=1000, held=150), "b": Load(free=1000)}
    assert choose(loads, {"a": 10}, 40) == "a"
    assert choose(loads, {"a": 10, "b": 8}, 40) == "b", "most of it is there as well"
    assert choose(loads, {}, 40) == "b"


def test_a_shared_beginning_does_not_draw_everything_to_one_engine() -> None:
    held = {"a": 0, "b": 0}
    for _ in range(100):
        loads = {name: Load(free=10_000 - some, held=some) for name, some in held.items()}
        held[choose(loads, {"a": 5}, 50)] += 50
    assert held["b"] > 0.8 * held["a"], held


def test_what_was_promised_since_the_last_numbers_counts() -> None:
    loads = {"a": Load(free=1000, promised=500), "b": Load(free=1000, held=20)}
    assert choose(loads, {}, 10) == "b"


def test_no_engine_is_a_bug() -> None:
    with pytest.raises(ValueError, match="bug"):
        choose({}, {}, 1)


@pytest.mark.parametrize(
    ("loads", "count"),
    [
        ([], 1),
        ([Load(free=10, held=90)], 2),
        ([Load(free=90, held=10, queue_s=1.0)], 2),
        ([Load(free=50, held=50)], 1),
        ([Load(free=100), Load(free=90, held=10)], 1),
        ([Load(free=40, held=60), Load(free=40, held=60)], 2),
        ([Load(free=100), Load(free=90, held=10, queue_s=0.4)], 2),
    ],
)
def test_engines_are_added_for_want_of_pages_or_time_and_taken_away_with_room_to_spare(
    loads: list[Load], count: int
) -> None:
    assert spread(loads, least_free=0.2, most_queue_s=0.5) == count
