"""A router over two real engines: the whole API as if they were one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

import numpy as np
import pytest

from service.cluster.routing import broadcast
from service.cluster.routing.ids import Ids
from service.cluster.routing.router import Router
from service.errors import NotReady
from service.metrics import Metrics
from service.tenants import OPEN
from tests.cluster.harness import (
    DIM,
    FLOAT,
    HEADS,
    LAYERS,
    ON_GPU,
    PAGE,
    PAGES,
    SETTINGS,
    Cluster,
    num_pages,
    rows,
)
from tests.cluster.local_engines import LocalEngines
from tests.harness.router import BlockIndex

SCALE = DIM**-0.5


async def test_new_sequences_are_spread_and_their_ids_name_their_engine(cluster: Cluster) -> None:
    ids = await cluster.create(8)
    if not ON_GPU:  # there they wait for each other, and who has waited less gets more
        assert {cluster.home(name) for name in ids} == {"engine-0", "engine-1"}
    listed = await cluster.fields("list_sequences", {"limit": 5})
    rest = await cluster.fields("list_sequences", {"after": listed["next"]})
    assert [one["id"] for one in listed["sequences"] + rest["sequences"]] == sorted(ids)
    assert len(listed["sequences"]) == 5 and rest["next"] is None


async def test_a_call_makes_at_most_1024_sequences(
    cluster: Cluster,
) -> None:
    many = [{"id": f"many-{number}"} for number in range(1025)]
    refused = await cluster.call("create_sequences", {"sequences": many})
    assert (refused.status, refused.fields["field"]) == (422, "sequences")
    made = await cluster.ok("create_sequences", {"sequences": many[:-1]})
    assert [one["id"] for one in made.fields["sequences"]] == [one["id"] for one in many[:-1]]
    deleted = await cluster.ok("delete_sequences", {"prefix": "many-"})
    assert deleted.fields["num_deleted"] == 1024


async def test_ids_that_callers_choose_are_found_by_a_router_that_has_never_met_them(
    cluster: Cluster, rng: np.random.Generator
) -> None:
    ids = [f"chat-{n}" for n in range(6)]
    await cluster.ok("create_sequences", {"sequences": [{"id": name} for name in ids]})
    homes = {name: cluster.home(name) for name in ids}
    cluster.router.ids.entries.clear()
    k = rows(rng, 6)
    await cluster.ok("append", {"layer": 1, "sequences": ids}, k=k, v=k)
    assert {name: cluster.home(name) for name in ids} == homes
    for name in ids:  # the memory may be wrong
        tags = [one.tag for one in cluster.router.members.engines]
        wrong = [tag for tag in tags if cluster.router.members.by_tag[tag].name != homes[name]]
        cluster.router.ids.learn(OPEN, [name], wrong[0])
    gathered = await cluster.ok("gather", {"layer": 1, "sequences": ids})
    np.testing.assert_array_equal(gathered.arrays["v"], k)
    await cluster.ok("delete_sequence", {"id": ids[0]})
    for name in (ids[0], "unknown"):
        missing = await cluster.call("get_sequence", {"id": name})
        assert (missing.status, missing.fields["code"]) == (404, "unknown_sequence")
        assert missing.fields["sequences"] == [name]


async def test_an_engine_that_leaves_while_sequences_are_looked_for_is_asked_for_again(
    cluster: Cluster, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out of the batch: the reply was that of the other sequences."""
    ids = ["first", "second", "third"]
    await cluster.ok("create_sequences", {"sequences": [{"id": name} for name in ids]})
    cluster.router.ids.entries.clear()
    find, home, is_away = Ids.find, Ids.home, False

    async def found(self: Ids, *args: Any) -> None:
        nonlocal is_away
        is_away = not self.entries  # once
        await find(self, *args)

    def absent(self: Ids, *given: Any) -> Any:
        nonlocal is_away
        found = home(self, *given)
        if found and is_away:
            is_away = False
            return None
        return found

    monkeypatch.setattr(Ids, "find", found)
    monkeypatch.setattr(Ids, "home", absent)
    k = rows(rng, 3)
    reply = await cluster.ok("append", {"layer": 0, "sequences": ids}, k=k, v=k)
    assert reply.fields["lengths"] == [1, 1, 1]
    gathered = await cluster.ok("gather", {"layer": 0, "sequences": ids})
    np.testing.assert_array_equal(gathered.arrays["k"], k)


@pytest.mark.parametrize("name", ["match_prefix", "pool", "info"])
async def test_a_call_to_all_engines_is_503_where_none_replies(
    cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they can be called again by then."""

    async def none(asking: Collection[Coroutine[Any, Any, Any]]) -> list[BaseException]:
        for one in asking:
            one.close()
        return [NotReady("engine has not replied for 3 s") for _ in asking]

    fields = {"token_ids": list(range(PAGE))} if name == "match_prefix" else {}
    with monkeypatch.context() as patched:
        patched.setattr(broadcast, "results_of", none)
        answer = await cluster.call(name, fields)
    assert (answer.status, answer.fields["code"]) == (503, "not_ready")


async def test_prompts_that_begin_alike_go_to_the_same_engine(cluster: Cluster) -> None:
    prompts = [[seed] * (5 * PAGE) for seed in range(4)]
    k = np.zeros((5 * PAGE, HEADS, DIM), FLOAT)
    homes = ["engine-0", "engine-1"] * 2
    seen = (await cluster.fields("events", {"after": 0}))["next"]
    for ids, home in zip(prompts, homes, strict=True):
        cluster.only_on(home)
        (name,) = await cluster.create(1, prefix={"token_ids": ids})
        for layer in range(LAYERS):
            fields = {"layer": layer, "sequences": [name], "append_indptr": [0, len(k)]}
            await cluster.ok("append", fields, k=k, v=k)
        await cluster.ok("commit", {"id": name, "token_ids": ids})
        assert cluster.home(name) == home
        await cluster.ok("delete_sequence", {"id": name})
    cluster.only_on()
    known = cluster.router.members.prefixes["default"]
    await cluster.until(lambda: num_pages(known, "GPU") == 20, "the events of all commits")
    for ids, home in zip(prompts, homes, strict=True):
        new = {"prefix": {"token_ids": [*ids, 9, 9, 9, 9]}}
        made = await cluster.fields("create_sequences", {"sequences": [new]})
        assert made["sequences"][0]["cached_len"] == len(ids)
        assert cluster.home(made["sequences"][0]["id"]) == home
    matched = await cluster.fields("match_prefix", {"token_ids": prompts[0]})
    assert matched["num_pages"] == 5
    renewed = await cluster.ok("renew_lease", {"id": matched["lease"]["id"], "lease_s": 2.0})
    assert renewed.fields["id"] == matched["lease"]["id"]
    await cluster.ok("release_lease", {"id": matched["lease"]["id"]})
    ended = await cluster.call("release_lease", {"id": matched["lease"]["id"]})
    assert (ended.status, ended.fields["lease"]) == (404, matched["lease"]["id"])
    events = (await cluster.fields("events", {"after": seen}))["events"]
    assert sum(len(one["page_keys"]) for one in events if one["type"] == "stored") == 20


async def test_a_reader_that_missed_events_of_the_cluster_learns_of_all_pages(
    cluster: Cluster,
) -> None:
    index = BlockIndex()
    index.last = (await cluster.fields("events", {"after": 0}))["next"]
    known = cluster.router.members.prefixes["default"]
    known.log.most_pages = 2
    k = np.zeros((2 * PAGE, HEADS, DIM), FLOAT)
    for seed, home in enumerate(["engine-0", "engine-1"] * 3):
        cluster.only_on(home)
        (name,) = await cluster.create(1)
        for layer in range(LAYERS):
            fields = {"layer": layer, "sequences": [name], "append_indptr": [0, len(k)]}
            await cluster.ok("append", fields, k=k, v=k)
        await cluster.ok("commit", {"id": name, "token_ids": [50 + seed // 2] * len(k)})
        await cluster.ok("delete_sequence", {"id": name})
        if seed == 3:
            await cluster.until(lambda: num_pages(known, "GPU") == 4, "events of four commits")
            await cluster.ok("clear", {})
            await cluster.until(lambda: num_pages(known, "GPU") == 0, "events of the clear")
    cluster.only_on()
    await cluster.until(lambda: num_pages(known, "GPU") == 2, "the events of all commits")
    for limit in (1, 1000):
        page: dict[str, Any] = {"events": True}
        while page["events"]:
            page = await cluster.fields("events", {"after": index.last, "limit": limit})
            index.take_page(page)
        pools = [set(map(bytes.fromhex, pages)) for pages in known.pages["GPU"].values()]
        assert index.blocks == set[bytes]().union(*pools) and len(index.blocks) == 2
        assert index.resets > 0
        index = BlockIndex()


async def test_sequences_of_two_engines_have_no_page_table_together(cluster: Cluster) -> None:
    ids = await cluster.create_apart()
    refused = await cluster.call("page_table", {"sequences": ids})
    assert (refused.status, refused.fields["field"]) == (422, "sequences")
    assert ids[1] in refused.fields["value"] and ids[0] in refused.fields["rule"]
    alone = [name for name in ids if cluster.home(name) == cluster.home(ids[0])]
    await cluster.ok("page_table", {"sequences": alone})


@pytest.mark.parametrize("name", ["append", "decode", "get_sequence", "create_sequences"])
async def test_invalid_requests_are_rejected_by_the_router(cluster: Cluster, name: str) -> None:
    refused = await cluster.call(name, {"layer": 0, "sequences": ["a b"], "id": "a b"})
    assert (refused.status, refused.fields["code"]) == (422, "invalid_request")


async def test_the_memory_of_checked_requests_is_bounded(cluster: Cluster) -> None:
    """Short objects take two hundred times their text."""
    remembered = cluster.router.remembered
    before = remembered.cache_info().currsize
    for count, more in ((2, 1), (400, 0)):
        new: list[dict[str, Any]] = [{"parent": "no"}, *[{}] * count]
        assert (await cluster.call("create_sequences", {"sequences": new})).status == 404
        assert remembered.cache_info().currsize == before + more
        before += more


async def test_the_pool_is_the_sum_of_all_engines(cluster: Cluster) -> None:
    await cluster.create(4)
    pool = await cluster.fields("pool")
    assert (pool["total"], pool["sequences"]) == (2 * PAGES, 4)
    each = (await cluster.fields("engines"))["engines"]
    assert [one["name"] for one in each] == ["engine-0", "engine-1"]
    assert sum(one["sequences"] for one in each) == 4
    snapshot = await cluster.ok("snapshot")
    assert snapshot.arrays["page_states"].size * snapshot.fields["page_step"] == 2 * PAGES
    shown = snapshot.fields["engines"]
    assert [(one["name"], one["total"]) for one in shown] == [
        ("engine-0", PAGES),
        ("engine-1", PAGES),
    ]
    info = await cluster.fields("info")
    assert info["num_pages"] == 2 * PAGES
    assert (await cluster.fields("evict", {"num_pages": 3}))["num_pages"] == 0
    deleted = await cluster.ok("delete_sequences", {"prefix": "seq-"})
    assert deleted.fields["num_deleted"] == 4


def test_a_door_reports_the_counts_of_engines_of_other_services(
    two_engines: LocalEngines,
) -> None:
    metrics = Metrics("http-0")

    def counted(name: str) -> float:
        return sum(block[0] for block in metrics.totals((name,)).values())

    async def main() -> None:
        router = Router(SETTINGS.server, metrics=metrics)
        try:
            await router.connect(str(two_engines.roster), "test", two_engines.secret)
            cluster = Cluster(router, two_engines)
            await cluster.until(lambda: counted("sessions") == 2, "one with each engine")
            before = counted("tokens_appended"), counted("kv_bytes_read")
            (name,) = await cluster.create(1)
            k = np.ones((1, HEADS, DIM), FLOAT)
            q = np.ones((1, 2 * HEADS, DIM), FLOAT)
            fields = {"layer": 0, "sequences": [name]}
            await cluster.ok("decode", fields, q=q, k=k, v=k)
            await cluster.until(lambda: counted("tokens_appended") == before[0] + 1, "its token")
            await cluster.until(lambda: counted("kv_bytes_read") > before[1], "and its bytes")
            await cluster.ok("delete_sequences", {"ids": [name]})
            each = (await cluster.fields("engines", {"counts": True}))["engines"]
            assert sum(one["counts"]["tokens_appended"][0] for one in each) == before[0] + 1
        finally:
            router.close()

    asyncio.run(main())
    assert counted("tokens_appended"), "counters stay"
    assert not counted("sessions"), "gauges go"


async def test_truncations_commits_and_appends_of_many_run_on_both_engines(
    cluster: Cluster,
) -> None:
    rng = np.random.default_rng(5)
    one, other = await cluster.create_apart()
    names = [one, other]
    k, v = (np.stack([rows(rng, 2 * 20) for _ in range(LAYERS)]) for _ in "kv")
    fields = {"layers": [*range(LAYERS)], "sequences": names, "append_indptr": [0, 20, 40]}
    reply = await cluster.ok("append", fields, k=k, v=v)
    assert reply.fields == {"lengths": [20, 20]}
    names_of = {"sequences": names, "names_indptr": [0, 20, 40], "token_ids": [*range(40)]}
    reply = await cluster.ok("commit_sequences", names_of)
    committed = reply.fields["committed_lens"]
    assert committed[0] == committed[1] > 0
    cut = {"sequences": names, "lengths": [3, 4], "keep": [7, 9, 12], "keep_indptr": [0, 1, 3]}
    reply = await cluster.ok("truncate_sequences", cut)
    views = reply.fields["sequences"]
    assert [(view["id"], view["length"]) for view in views] == [(one, 4), (other, 6)]
    for layer in range(LAYERS):
        gathered = await cluster.ok("gather", {"layer": layer, "sequences": names})
        chosen = [0, 1, 2, 7, *(20 + at for at in (0, 1, 2, 3, 9, 12))]
        np.testing.assert_array_equal(gathered.arrays["k"], k[layer][chosen])
