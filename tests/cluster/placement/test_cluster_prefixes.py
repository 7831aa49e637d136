"""Which engine has which pages, by events; and the cluster's own events."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from service.cluster.membership.polling import follow
from service.cluster.placement import prefixes
from service.cluster.placement.cost import EngineLoad, Pace
from service.cluster.placement.inflight_prompts import InflightPrompt, Wait
from service.cluster.placement.prefixes import (
    EXPECTED_PAGES,
    EXPECTED_S,
    MAX_EXPECTED,
    MAX_LOGGED,
    PAGES_PER_EVENT,
    EventLog,
    Prefixes,
    chained_keys,
    prefix_of,
)
from service.core.keys import Prefix, root_key
from service.operations.schema.page_names import ExtraKey, PromptNames
from tests.cluster.fake_engines import fake_cluster
from tests.cluster.harness import PAGE, Cluster

KEYS = [bytes([n]) * 16 for n in range(8)]


def stored(*pages: int) -> dict[str, Any]:
    keys = [KEYS[page].hex() for page in pages]
    return {"id": 1, "type": "stored", "namespace": "default", "page_keys": keys}


def removed(*pages: int) -> dict[str, Any]:
    return stored(*pages) | {"type": "removed"}


def test_expected_pages_are_awaited_from_the_prompt_that_brings_them() -> None:
    known, first, second = Prefixes(), InflightPrompt(), InflightPrompt()
    known.add("a", stored(0, 1))
    assert known.awaited("a", KEYS[:2]) == (2, None)
    known.expect("a", KEYS[2:4], 10.0, first)
    known.expect("a", KEYS[4:6], 10.0, second)
    assert known.awaited("a", KEYS[:2]) == (2, None)
    assert known.awaited("a", KEYS[:6]) == (2, first)
    known.add("a", stored(2, 3))
    assert known.awaited("a", KEYS[:6]) == (4, second)
    assert known.awaited("a", []) == (0, None)
    assert known.awaited("a", [*KEYS[:2], KEYS[7]]) == (2, None), "evicted since it was matched"
    assert list(known.expected) == [key.hex() for key in KEYS[4:6]], "what is there is not expected"


async def test_a_prompt_waits_twice_as_long_as_its_engine_needs_for_the_pages() -> None:
    prefix = Prefix(np.arange(4 * PAGE, dtype=np.uint32))
    async with fake_cluster("a") as cluster:
        engine = cluster.engine_of("a")
        engine.load, engine.queue_s = EngineLoad(free=100, pace=Pace(page_s=0.1)), 0.5
        placer, prompts = cluster.router.placer, [InflightPrompt(), InflightPrompt()]
        first, second = [await placer.place_sequence("default", prefix, (), one) for one in prompts]
        assert (first.matched, first.wait) == (0, None)
        assert (second.matched, second.wait) == (4, Wait(prompts[0], 2 * (0.5 + 4 * 0.1)))


def matched(known: Prefixes, keys: Any, now: float = 0.0) -> Any:
    """The match of a prompt, whose pieces are run at once."""
    try:
        matching = known.matched(keys, now).__await__()
        while True:
            next(matching)
    except StopIteration as end:
        return end.value


async def freed() -> None:
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)


def logged(known: Prefixes) -> list[tuple[str, list[int]]]:
    page = known.log.page(0, 100)
    return [
        (one["type"], [bytes.fromhex(key)[0] for key in one["page_keys"]]) for one in page["events"]
    ]


def test_the_match_is_how_far_each_engine_has_the_chain_from_its_beginning() -> None:
    known = Prefixes()
    known.add("a", stored(0, 1, 2, 3))
    known.add("b", stored(0, 1))
    known.add("c", stored(1, 2))
    assert matched(known, iter(KEYS))[0] == {"a": 4, "b": 2}
    known.add("a", removed(2))
    assert matched(known, iter(KEYS))[0] == {"a": 2, "b": 2}
    assert matched(known, iter(())) == ({}, {})


async def test_pages_in_lower_tiers_count_and_are_counted_apart() -> None:
    known = Prefixes()
    known.add("a", stored(0, 1, 2, 3))
    known.add("b", stored(0))
    for medium, pages in (("CPU", (0, 1, 2)), ("DISK", (1, 2, 3, 4))):
        known.add("b", stored(*pages) | {"medium": medium})
    assert matched(known, KEYS) == ({"a": 4, "b": 5}, {"b": 4})
    assert known.awaited("b", KEYS[:5]) == (5, None)
    assert logged(known) == [("stored", [0, 1, 2, 3])], "the cluster's events are of the pools"
    for _ in range(2):
        known.add("b", removed(1, 2) | {"medium": "CPU"})
    assert matched(known, KEYS) == ({"a": 4, "b": 5}, {"b": 4}), "they are on disk, too"
    known.add("b", removed(2) | {"medium": "DISK"})
    assert matched(known, KEYS) == ({"a": 4, "b": 2}, {"b": 1})
    known.add("b", {"type": "cleared", "namespace": "default"})
    assert matched(known, KEYS) == ({"a": 4}, {})


async def test_new_sequences_with_long_prompts_share_the_loop_with_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls at once look up 20 prompts of 500 pages each, which took one pass."""
    monkeypatch.setattr(prefixes, "KEYS_PER_PIECE", 100, raising=False)
    ids, number, looked_up = list(range(500 * PAGE)), 0, Counter[int]()
    await follow(cluster.router.members, "default")  # events of the tests before come first
    known = cluster.router.members.prefixes_of("default")
    chain = chained_keys(Prefix(np.array(ids, np.uint32)), "default", PAGE)
    event = {"type": "stored", "namespace": "default", "page_keys": [key.hex() for key in chain]}
    known.add(cluster.router.members.engines[0].tag, event)
    tags = Prefixes.tags

    def counted(self: Prefixes, key: str, *more: Any) -> Any:
        looked_up[number] += 1
        return tags(self, key, *more)

    monkeypatch.setattr(Prefixes, "tags", counted)
    new = {"sequences": [{"prefix": {"token_ids": ids}}] * 10}
    calls = [asyncio.ensure_future(cluster.ok("create_sequences", new)) for _ in range(2)]
    while not all(call.done() for call in calls):
        number += 1
        await asyncio.sleep(0)
    await asyncio.gather(*calls)
    assert looked_up.total() == 20 * 500
    assert max(looked_up.values()) <= 500, "each call alone looks up 5,000"


def test_no_more_keys_are_computed_than_some_engine_has() -> None:
    known = Prefixes()
    known.add("a", stored(0))
    made = []

    def keys() -> Any:
        for key in KEYS:
            made.append(key)
            yield key

    matched(known, keys())
    assert len(made) == 2


def test_pages_are_expected_for_a_while_where_their_prompt_was_placed() -> None:
    known = Prefixes()
    known.add("a", stored(0, 1))
    known.expect("a", KEYS[2:5], now=10.0)
    assert matched(known, KEYS, 10.0 + EXPECTED_S / 2)[0] == {"a": 5}
    assert matched(known, KEYS, 10.0 + EXPECTED_S)[0] == {"a": 2}
    known.expect("b", KEYS[:3], now=12.0)
    assert matched(known, KEYS, 12.0)[0] == {"a": 2, "b": 3}, "the prompt placed last"
    known.add("b", removed(2))
    assert matched(known, KEYS, 12.0)[0] == {"a": 2, "b": 2}, "the engine knows better"
    known.add("b", stored(0, 1))
    assert matched(known, KEYS, 100.0)[0] == {"a": 2, "b": 2}
    known.expect("b", (), now=100.0)
    assert not known.expected, "expired entries are removed"


def test_the_number_of_expected_pages_is_bounded() -> None:
    known = Prefixes()
    for prompt in range(2 * MAX_EXPECTED // EXPECTED_PAGES):
        names = [(prompt * EXPECTED_PAGES + n).to_bytes(16) for n in range(EXPECTED_PAGES)]
        known.expect("a", iter(names * 2), now=0.0)
    assert len(known.expected) == MAX_EXPECTED
    assert matched(known, names, 1.0)[0] == {"a": EXPECTED_PAGES}, "the oldest go first"


def test_a_long_prompt_is_expected_by_its_beginning() -> None:
    known, names = Prefixes(), [n.to_bytes(16) for n in range(EXPECTED_PAGES + 5)]
    known.expect("a", iter(names), now=0.0)
    assert matched(known, names, 1.0)[0] == {"a": EXPECTED_PAGES}


def test_pages_are_named_by_fields_or_by_tensors() -> None:
    rows = np.frombuffer(b"".join(KEYS[:3]), np.uint8).reshape(3, 16)
    by_tensor = prefix_of(PromptNames(cache_salt="s"), {"page_keys": rows[::-1]}, 4)
    by_field = prefix_of(PromptNames(page_keys=[key.hex() for key in KEYS[2::-1]]), {}, 4)
    for prefix in (by_tensor, by_field):
        assert prefix is not None
        assert list(prefix.chain(b"", 4)) == KEYS[2::-1]
    assert by_tensor is not None and by_tensor.cache_salt == "s"
    by_ids = prefix_of(PromptNames(token_ids=[5, 6]), {}, 4)
    assert by_ids is not None and by_ids.token_ids is not None
    assert by_ids.token_ids.tolist() == [5, 6]
    assert prefix_of(None, {}, 4) is None
    image = [ExtraKey(first_token=5, key="0c")]
    by_both = prefix_of(PromptNames(extra=image), {"token_ids": np.arange(8, dtype=np.uint32)}, 4)
    assert by_both is not None and by_both.extra == {1: b"\x01\x00\x01\x0c"}


async def test_a_lost_engines_pages_are_forgotten_at_once_and_freed_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefixes, "KEYS_PER_PIECE", 2)
    known = Prefixes()
    known.add("a", stored(0, 1, 2, 3, 4, 5, 6, 7))
    known.add("b", stored(0, 1, 2))
    known.forget("a", "default")
    assert matched(known, KEYS)[0] == {"b": 3}
    num_freed: list[int] = []
    while num_freed == [] or len(asyncio.all_tasks()) > 1:
        num_freed.append(sum(len(pages) for kind, pages in logged(known) if kind == "removed"))
        known.add("a", stored(3) | {"type": "stored"})  # it is back, with one of them
        await asyncio.sleep(0)
    assert num_freed[0] <= 2 and num_freed == sorted(num_freed) and len(num_freed) >= 3
    assert {one["namespace"] for one in known.log.events} == {"default"}
    gone = [page for kind, pages in logged(known) if kind == "removed" for page in pages]
    assert sorted({*gone} - {3}) == [4, 5, 6, 7] and len(gone) <= 5
    assert matched(known, KEYS[3:])[0] == {"a": 1}


async def test_the_cluster_stores_with_the_first_engine_and_removes_with_the_last() -> None:
    known = Prefixes()
    known.add("a", stored(0, 1))
    known.add("b", stored(0, 1))
    known.add("a", removed(0))
    known.add("b", removed(0))
    known.forget("a", "default")
    await freed()
    known.add("b", stored(1) | {"type": "cleared"})
    await freed()
    assert logged(known) == [("stored", [0, 1]), ("removed", [0]), ("removed", [1])]
    assert {one["namespace"] for one in known.log.events} == {"default"}


def test_numbers_of_another_door_are_too_old() -> None:
    log = EventLog(most_pages=3)
    begin = log.newest
    assert log.page(-1, 10) == {"events": [], "next": begin, "too_old": False}
    for page in range(4):
        log.add(stored(page))
    assert log.page(begin + 3, 10)["events"] == [stored(3) | {"id": begin + 4}]
    first = log.page(begin + 1, 1)
    assert (len(first["events"]), first["next"], first["too_old"]) == (1, begin + 2, False)
    for after in (0, begin, begin + 5, 7):
        page = log.page(after, 10)
        assert page["too_old"] and len(page["events"]) == 3 and page["next"] == begin + 4


def test_a_door_keeps_the_events_of_a_bounded_number_of_pages() -> None:
    known, pages = Prefixes(), PAGES_PER_EVENT
    for first in range(0, 3 * MAX_LOGGED, pages):
        keys = [f"{page:032x}" for page in range(first, first + pages)]
        known.add("a", stored() | {"page_keys": keys})
    assert sum(len(one["page_keys"]) for one in known.log.events) == MAX_LOGGED
    assert known.log.page(0, 1)["too_old"]


def test_keys_are_chained_as_the_engine_chains_them() -> None:
    prefix = Prefix(token_ids=np.arange(10, dtype=np.uint32), cache_salt="s")
    expected = prefix.keys_from(0, prefix.key_at(0, root_key("red", "s"), 4), 2, 4)
    assert b"".join(chained_keys(prefix, "red", 4)) == expected
