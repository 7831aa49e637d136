"""The history of events: numbered, cut into short ones, bounded, each namespace's its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from config.sections import CacheSettings
from service.core.pool.named_pages import Change, Cleared, Removed, Stored
from service.engine.store.event_history import PAGES_AN_EVENT, EventHistory, Page
from tests.engine.harness import Caller, NewCall, fake_engine
from tests.harness.router import read_page

PAGE = 4


def keys(first: int, count: int) -> bytes:
    return b"".join(number.to_bytes(16) for number in range(first, first + count))


def stored(first: int, count: int, namespace: str = "a") -> Stored:
    ids = np.arange(count * PAGE, dtype=np.uint32)
    return Stored(namespace, keys(first, count), bytes(16), ids.tobytes())


def history(*changes: Change, most: int = 1000) -> EventHistory:
    made = EventHistory(PAGE, most)
    for change in changes:
        made.hear(change)
    return made


def page_of(kept: EventHistory, namespace: str, after: int, limit: int) -> Page:
    """A page of events, without their times."""
    events, following, too_old = read_page(kept, namespace, after, limit)
    for event in events:
        assert abs(event.pop("time") - time.time()) < 60
    return events, following, too_old


def test_a_long_change_becomes_several_consecutive_events() -> None:
    count = 2 * PAGES_AN_EVENT + 1
    kept = history(stored(1, count), Removed("a", keys(1, count)))
    begin = page_of(kept, "b", -1, 1)[1]
    events, at = [], 0
    while reply := page_of(kept, "a", at, 1000)[0]:
        events += reply
        at = reply[-1]["id"]
    assert [event["id"] - begin for event in events] == list(range(1, 7))
    assert [event["type"] for event in events] == 3 * ["stored"] + 3 * ["removed"]
    for half in (events[:3], events[3:]):
        assert [len(event["page_keys"]) for event in half] == [PAGES_AN_EVENT, PAGES_AN_EVENT, 1]
    for before, event in pairwise(events[:3]):
        assert event["parent_key"] == before["page_keys"][-1]
    ids = [one for event in events[:3] for one in event["token_ids"]]
    assert ids == list(range(count * PAGE))


def test_the_oldest_events_are_dropped_by_their_number_of_pages() -> None:
    kept = history(stored(1, 3), Cleared("a"), most=5)
    first = page_of(kept, "a", -1, 1)[1] - 1
    assert [one["type"] for one in page_of(kept, "a", 0, 9)[0]] == ["stored", "cleared"]
    kept.hear(stored(9, 2))
    reply, following, too_old = page_of(kept, "a", first, 9)
    assert ([one["id"] - first for one in reply], following, too_old) == ([1, 2], first + 2, False)
    assert page_of(kept, "a", first - 1, 9)[2] and page_of(kept, "a", 0, 9)[2]
    kept.hear(stored(20, 99))
    assert page_of(kept, "a", first, 9) == ([], first + 3, True)


def test_a_page_of_events_takes_no_walk_through_earlier_ones() -> None:
    class Walked(deque[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("all events are looked at")

    kept = history(*[Cleared("a") for _ in range(9)])
    past = kept._pasts["a"]
    past.events = Walked(past.events)
    found, following, too_old = page_of(kept, "a", past.newest - 2, 9)
    assert [one["id"] for one in found] == [past.newest - 1, past.newest]
    assert (following, too_old) == (past.newest, False)


def test_after_a_clear_the_pages_that_are_left_are_reported_again() -> None:
    kept = history(stored(1, 3), most=2)
    kept.inventories.append(lambda namespace: iter([None, stored(3, 1, namespace)]))
    begin = page_of(kept, "a", -1, 1)[1]
    kept.hear(Cleared("a", has_left=True))
    reply, following, too_old = page_of(kept, "a", begin, 9)
    assert ([one["type"] for one in reply], too_old) == (["cleared", "stored"], False)
    assert page_of(kept, "a", begin - 1, 9) == (reply, following, True)
    kept.hear(Cleared("a", has_left=False))
    (cleared,), last, _ = page_of(kept, "a", following, 9)
    assert (cleared["type"], page_of(kept, "a", last, 9)) == ("cleared", ([], last, False))


def test_a_reader_that_is_slower_than_the_changes_begins_again() -> None:
    """And knows all pages once they pause."""
    kept = history(stored(1, 4), most=4)
    here = [stored(number, 1) for number in range(5, 25)]
    kept.inventories.append(lambda _: iter(here))
    at, known, resets = 1, set[str](), 0
    for number in range(100):
        reply, at, too_old = page_of(kept, "a", at, 3)
        if too_old:
            known, resets = set(), resets + 1
        known |= {key for event in reply for key in event["page_keys"]}
        if number < 10:
            here.append(stored(100 + number, 1))
            for _ in range(4):
                kept.hear(here[-1])
        elif not reply:
            break
    assert resets > 5 and len(known) == 30


def test_namespaces_have_numbers_of_their_own() -> None:
    kept = history(stored(1, 1, "a"), stored(1, 1, "b"), Cleared("b"))
    (mine,), following, _ = page_of(kept, "a", 0, 9)
    assert (mine["namespace"], following) == ("a", mine["id"])
    assert page_of(kept, "b", 0, 9)[0][0]["id"] == mine["id"]
    assert page_of(kept, "missing", 0, 9) == ([], mine["id"] - 1, False)


def test_without_a_history_there_are_no_events() -> None:
    kept = history(most=0)
    kept.press(True, {"a": 1})
    assert kept.is_high and not kept.is_kept and page_of(kept, "a", 0, 9)[0] == []


@fake_engine(cache=CacheSettings(events_history=0))
async def test_events_are_refused_where_there_is_no_history(caller: Caller) -> None:
    call = NewCall("events", {"after": 0})
    await caller.refused(call, "invalid_request", field="cache.events_history")


def test_a_page_without_events_means_that_the_reader_knows_all_pages() -> None:
    """Also where all that is kept is dropped while the first of them is being made."""
    kept = history(stored(1, 3), most=2)
    kept.inventories.append(lambda namespace: iter([None, None, stored(7, 1, namespace)]))
    reading = kept.read("a", 0, 9)
    next(reading)
    kept.hear(stored(5, 2))
    kept.hear(stored(10, 2))
    page: Page | None = None
    while page is None:
        try:
            next(reading)
        except StopIteration as end:
            page = end.value
    known = [key for one in page[0] for key in one["page_keys"]]
    assert page[2] and known == [key.hex() for key in (keys(10, 1), keys(11, 1), keys(7, 1))]
