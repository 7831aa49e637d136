"""The line that waits: order within a namespace, turns between them."""

from __future__ import annotations

import random
from collections import deque

from service.engine.work.fair import FairQueue


def taken(queue: FairQueue[str], count: int) -> str:
    return "".join(queue.pop() for _ in range(count))


def test_a_newcomer_waits_for_one_turn_of_each_other() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.append("many", str(number))
    assert queue.pop() == "0"
    queue.append("few", "x")
    assert [queue.pop(), queue.pop()] == ["1", "x"]


def test_any_history_keeps_each_lines_order_and_serves_all_in_turn() -> None:
    rng = random.Random(5)
    queue: FairQueue[tuple[str, int]] = FairQueue()
    model: dict[str, deque[int]] = {name: deque() for name in "abcd"}
    waited = dict.fromkeys(model, 0)
    for number in range(3_000):
        name = rng.choice("aaaaabbc" if number % 97 else "d")
        match rng.randrange(5):
            case 0 | 1:
                queue.append(name, (name, number))
                model[name].append(number)
            case 2 if model[name]:
                removed = rng.choice(model[name])
                assert queue.remove(name, (name, removed))
                model[name].remove(removed)
            case 3:
                assert not queue.remove(name, (name, -1))
            case _ if queue.count:
                owner, got = queue.first()
                assert queue.pop() == (owner, got)
                assert model[owner].popleft() == got
                for other in model:
                    waited[other] = waited[other] + 1 if model[other] and other != owner else 0
                assert max(waited.values()) < 2 * len(model), "a namespace was starved"
        assert queue.count == sum(map(len, model.values()))
        assert sorted(queue) == sorted((n, i) for n, line in model.items() for i in line)


def test_a_turn_whose_only_item_is_taken_out_goes_to_who_has_used_least() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, seconds in (("a", 0.0), ("b", 5.0), ("c", 1.0)):
        queue.append(name, name)
        queue.charge(name, seconds)
    assert queue.first() == "a"
    assert queue.remove("a", "a")
    assert queue.first() == "c"


def test_a_namespace_that_used_much_time_waits_until_others_used_as_much() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "aaa":
        queue.append("expensive", item)
    for item in "123456":
        queue.append("cheap", item)
    order = ""
    while queue.count:
        item = queue.first()
        queue.charge("cheap" if item.isdigit() else "expensive", 1.0 if item.isdigit() else 3.0)
        assert queue.pop() == item, "charges within a turn do not change its owner"
        order += item
    assert order == "a123a456a"


def test_a_namespace_that_was_idle_has_no_time_saved_up() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.append("busy", "a")
    queue.charge("busy", 100.0)
    queue.append("busy", "b")
    queue.pop()
    for item in "123":
        queue.append("late", item)
    queue.charge("late", 1.0)
    assert taken(queue, 4) == "b123", "it begins where the others are"


def test_an_item_whose_turn_ends_stays_the_first_of_its_line() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "ab":
        queue.append("one", item)
    queue.append("two", "x")
    assert queue.first() == "a"
    queue.pass_on()
    assert [queue.pop(), queue.pop(), queue.pop()] == ["x", "a", "b"]
