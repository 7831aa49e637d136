"""Due times against a dict: each item has one at most, however often it was set."""

from __future__ import annotations

import math
import random

from service.core.timers import LEAST_STALE, Timers


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
