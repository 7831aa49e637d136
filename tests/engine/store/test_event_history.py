"""The history of events: numbered, cut into short ones, bounded, each namespace's its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from config.sections import CacheSettings
from service.core.prefix.named_pages import Change, Cleared, Removed, Stored
from service.engine.store.event_history import PAGES_AN_EVENT, EventHistory
from tests.engine.harness import Caller, NewCall, fake_engine

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


def test_a_long_change_becomes_several_consecutive_events() -> None:
    count = 2 * PAGES_AN_EVENT + 1
    kept = history(stored(1, count), Removed("a", keys(1, count)))
    begin = kept.page("b", -1, 1)[1]
    events, at = [], 0
    while reply := kept.page("a", at, 1000)[0]:
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
    first = kept.page("a", -1, 1)[1] - 1
    assert [one["type"] for one in kept.page("a", 0, 9)[0]] == ["stored", "cleared"]
    kept.hear(stored(9, 2))
    reply, following, too_old = kept.page("a", first, 9)
    assert ([one["id"] - first for one in reply], following, too_old) == ([1, 2], first + 2, False)
    assert kept.page("a", first - 1, 9)[2] and kept.page("a", 0, 9)[2]
    kept.hear(stored(20, 99))
    assert kept.page("a", first, 9) == ([], first + 3, True)


def test_a_page_of_events_takes_no_walk_through_earlier_ones() -> None:
    class Walked(deque[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("all events are looked at")

    kept = history(*[Cleared("a") for _ in range(9)])
    past = kept._pasts["a"]
    past.events = Walked(past.events)
    found, following, too_old = kept.page("a", past.newest - 2, 9)
    assert [one["id"] for one in found] == [past.newest - 1, past.newest]
    assert (following, too_old) == (past.newest, False)


def test_namespaces_have_numbers_of_their_own() -> None:
    kept = history(stored(1, 1, "a"), stored(1, 1, "b"), Cleared("b"))
    (mine,), following, _ = kept.page("a", 0, 9)
    assert (mine["namespace"], following) == ("a", mine["id"])
    assert kept.page("b", 0, 9)[0][0]["id"] == mine["id"]
    assert kept.page("missing", 0, 9) == ([], mine["id"] - 1, False)


def test_without_a_history_there_are_no_events() -> None:
    kept = history(most=0)
    kept.press(True, {"a": 1})
    assert kept.is_high and not kept.is_kept and kept.page("a", 0, 9)[0] == []


@fake_engine(cache=CacheSettings(events_history=0))
async def test_events_are_refused_where_there_is_no_history(caller: Caller) -> None:
    call = NewCall("events", {"after": 0})
    await caller.refused(call, "invalid_request", field="cache.events_history")
