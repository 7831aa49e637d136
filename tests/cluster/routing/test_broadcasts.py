"""Calls that every engine has a part in: which they ask, and what their replies become."""

from __future__ import annotations

from typing import Any

import pytest

from service.errors import InvalidRequest, NotReady, UnknownLease, UnknownPage
from tests.cluster.fake_engines import fake_cluster
from tests.cluster.harness import PAGE

REFUSED = InvalidRequest("id", "it", "is refused")


async def test_pins_of_several_engines_are_listed_once_and_leases_name_their_engine() -> None:
    def hold(key: str, salt: str = "", lease: str | None = None) -> dict[str, Any]:
        return {"page_key": key, "cache_salt": salt, "lease": lease}

    async with fake_cluster("ab") as cluster:
        both, second, third = hold("0"), hold("0", "salt"), hold("1")
        cluster.links["a"].replies["holds"] = {"holds": [both, third, hold("2", lease="l")]}
        cluster.links["b"].replies["holds"] = {"holds": [both, second, hold("2", lease="l")]}
        leases = [hold("2", lease=f"l.{8 * name}") for name in "ab"]
        found = (await cluster.fields("holds"))["holds"]
        assert found == [both, third, second, *leases]


@pytest.mark.parametrize(
    ("name", "failing", "status"),
    [("clear", "", 200), ("clear", "b", 422), ("pin", "b", 200), ("pin", "ab", 422)],
)
async def test_a_call_for_all_engines_fails_with_one_of_them_but_a_pin_with_all(
    name: str, failing: str, status: int
) -> None:
    async with fake_cluster("ab") as cluster:
        for at, (letter, link) in enumerate(cluster.links.items(), 1):
            link.replies[name], link.stages = {"num_pages": at}, (0.1 * at, 0.4 / at, 0.0, 0.0, 0.0)
            link.do_next(name, *[REFUSED] * (letter in failing))
        pin = {"page_key": 32 * "0", "hard": True}
        answer = await cluster.call(name, pin if name == "pin" else {})
        assert answer.status == status
        if not failing:
            assert answer.fields == {"num_pages": 3}
            assert answer.stages == (0.2, 0.4, 0.0, 0.0, 0.0), "the longest of each"


async def test_a_match_leases_where_it_is_longest_and_a_prefetch_loads_there() -> None:
    prompt = {"token_ids": list(range(PAGE))}
    async with fake_cluster("abc") as cluster:
        links = cluster.links.values()
        for pages, link in zip((1, 3, 5), links, strict=True):
            link.replies["match_prefix"] = {"num_pages": pages, "lease": {"id": "l"}}
            link.replies["prefetch"] = {"num_pages": pages}
        cluster.engine_of("c").is_draining = True
        matched = await cluster.fields("match_prefix", prompt | {"lease_s": 2.0})
        assert matched == {"num_pages": 3, "lease": {"id": f"l.{8 * 'b'}"}}
        asked = [[one["lease_s"] for one in link.calls("match_prefix")] for link in links]
        assert asked == [[0.0], [0.0, 2.0], [0.0]]
        assert await cluster.fields("prefetch", prompt) == {"num_pages": 3}
        assert [len(link.calls("prefetch")) for link in links] == [0, 1, 0]
        for link in links:
            for name, _, arrays in link.served:
                assert arrays["token_ids"].tolist() == prompt["token_ids"], name


async def test_an_eviction_goes_on_at_the_next_engine_until_enough_pages_are_free() -> None:
    async with fake_cluster("abc") as cluster:
        for pages, link in zip((2, 3, 9), cluster.links.values(), strict=True):
            link.replies["evict"] = {"num_pages": pages}
        assert await cluster.fields("evict", {"num_pages": 5}) == {"num_pages": 5}
        asked = [link.calls("evict") for link in cluster.links.values()]
        assert asked == [[{"num_pages": 5}], [{"num_pages": 3}], []]


async def test_engines_are_shown_and_drained_by_their_names_in_the_cluster() -> None:
    async with fake_cluster("ba") as cluster:
        for link in cluster.links.values():
            link.replies["engines"] = {"engines": [{"name": "engine", "state": "ready"}]}
        shown = (await cluster.fields("engines"))["engines"]
        assert shown == [{"name": name, "state": "ready"} for name in "ab"]
        stopped = await cluster.fields("drain_engine", {"name": "b", "stop": True})
        assert stopped["name"] == "b"
        assert cluster.links["b"].calls("drain_engine") == [{"name": "engine", "stop": True}]


async def test_events_of_engines_that_keep_none_are_refused_each_time() -> None:
    none = InvalidRequest("cache.events_history", 0, "keeps no events")
    async with fake_cluster("ab") as cluster:
        cluster.links["a"].replies["events"] = {"events": [], "next": 1, "too_old": False}
        cluster.links["b"].do_next("events", none)
        for _ in range(2):
            assert (await cluster.error("events", {"after": 0}))[:2] == (422, "invalid_request")
        cluster.lose("b", is_dead=True)
        assert (await cluster.call("events", {"after": 0})).status == 200


SILENT = NotReady("the engine does not respond")
PAGE_KEY = {"page_key": 32 * "0"}
HARD = PAGE_KEY | {"hard": True}


@pytest.mark.parametrize(
    ("name", "of_a", "of_b", "status"),
    [
        ("pin", SILENT, None, 200),
        ("pin", UnknownPage("0"), UnknownPage("0"), 404),
        ("pin", UnknownPage("0"), SILENT, 503),
        ("unpin", UnknownPage("0"), None, 200),
        ("unpin", UnknownPage("0"), SILENT, 503),
        ("unpin", SILENT, None, 503),
        ("unpin", None, SILENT, 503),
    ],
)
async def test_a_page_is_unknown_or_free_of_pins_only_if_no_engine_is_silent(
    name: str, of_a: Exception | None, of_b: Exception | None, status: int
) -> None:
    async with fake_cluster("ab") as cluster:
        for link, error in zip(cluster.links.values(), (of_a, of_b), strict=True):
            link.replies |= {"pin": {"num_pages": 1}, "unpin": {}}
            link.do_next(name, *[] if error is None else [error])
        assert (
            await cluster.call(name, HARD if name == "pin" else PAGE_KEY)
        ).status // 100 == status // 100


@pytest.mark.parametrize("name", ["pin", "unpin", "clear", "holds"])
async def test_an_engine_without_a_session_may_have_pages_and_pins(name: str) -> None:
    fields = {"pin": HARD, "unpin": PAGE_KEY}.get(name, {})
    async with fake_cluster("ab") as cluster:
        cluster.links["a"].replies |= {
            "unpin": {},
            "clear": {"num_pages": 1},
            "holds": {"holds": []},
        }
        cluster.links["a"].do_next("pin", UnknownPage("0"))
        cluster.lose("b", is_dead=False)
        assert (await cluster.call(name, fields)).status == 503
        cluster.router.members.mark_dead(cluster.router.members.by_name["b"])
        cluster.links["a"].do_next("pin", UnknownPage("0"))
        assert (await cluster.call(name, fields)).status in (200, 204, 404)


@pytest.mark.parametrize("name", ["renew_lease", "release_lease"])
async def test_a_lease_is_unknown_only_if_no_engine_is_away(name: str) -> None:
    fields = {"id": "l.bbbbbbbb"} | ({"lease_s": 1.0} if name == "renew_lease" else {})
    async with fake_cluster("ab") as cluster:
        cluster.lose("b", is_dead=False)
        for is_away in (True, False):
            cluster.links["a"].do_next(name, UnknownLease("l"))
            status, code, _ = await cluster.error(name, fields)
            assert (status, code) == ((503, "not_ready") if is_away else (404, "unknown_lease"))
            cluster.router.members.mark_dead(cluster.router.members.by_name["b"])


async def test_an_unknown_id_is_deleted_at_an_engine_that_comes_while_others_are_asked() -> None:
    async with fake_cluster("ab") as cluster:
        cluster.links["b"].ids.add("mine")
        engine = cluster.engine_of("b")
        cluster.lose("b", is_dead=False)
        assert (await cluster.call("delete_sequences", {"ids": ["mine"]})).status == 503

        async def comes() -> None:
            members = cluster.router.members
            members.by_name["b"].engine = members.by_tag[engine.tag] = engine
            members.changes += 1

        cluster.links["a"].do_next("delete_sequences", comes)
        assert await cluster.fields("delete_sequences", {"ids": ["mine"]}) == {"num_deleted": 1}
