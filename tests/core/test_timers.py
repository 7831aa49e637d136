"""Due times against a dict: each item has one at most, however often it was set."""

from __future__ import annotations

import math
import random

import pytest

from service.core.timers import LEAST_STALE, Timers


def test_an_item_set_twice_is_due_once_and_at_the_later_setting() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 3.0)
    timers.set("b", 2.0)
    assert (timers.next_due, len(timers)) == (2.0, 2)
    assert list(timers.take_due(2.5, 9)) == ["b"]
    assert list(timers.take_due(3.0, 9)) == ["a"]
    assert (timers.next_due, bool(timers)) == (math.inf, False)


@pytest.mark.parametrize("how", ["cancel", "never"])
def test_a_cancelled_item_is_never_due(how: str) -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    if how == "cancel":
        timers.cancel("a")
    else:
        timers.set("a", math.inf)
    timers.cancel("none")
    assert (timers.next_due, list(timers.take_due(9.0, 9))) == (math.inf, [])


def test_an_item_set_again_at_the_same_time_is_due_once() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.cancel("a")
    timers.set("a", 1.0)
    assert list(timers.take_due(1.0, 9)) == ["a"]
    assert list(timers.take_due(1.0, 9)) == []


def test_any_history_is_that_of_a_dict_and_takes_no_more_memory() -> None:
    chance, timers, expected = random.Random(7), Timers[int](), dict[int, float]()
    now = 0.0
    for _ in range(20_000):
        item, kind = chance.randrange(50), chance.random()
        if kind < 0.7:
            expected[item] = now + chance.random() * 10
            timers.set(item, expected[item])
        elif kind < 0.8:
            expected.pop(item, None)
            timers.cancel(item)
        else:
            now += 0.05
            most = chance.randrange(5)
            due = sorted((when, one) for one, when in expected.items() if when <= now)[:most]
            assert list(timers.take_due(now, most)) == [one for _, one in due]
            for _, one in due:
                del expected[one]
        assert timers.next_due == min(expected.values(), default=math.inf)
    assert len(timers._heap) <= LEAST_STALE + 2 * len(expected) + 1
