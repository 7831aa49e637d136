"""New sequences, where engines refuse, fail or fall silent, and ids are taken."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from service.cluster.membership.engine import DoorCall
from service.cluster.placement.cost import EngineLoad
from service.cluster.placement.inflight_prompts import InflightPrompts
from service.errors import (
    InvalidRequest,
    NotReady,
    OutOfPages,
    Overloaded,
    UnknownSequence,
)
from service.road.caller_end.caller import AnswerLost
from tests.cluster.fake_engines import FakeCluster, FakeLink, fake_cluster
from tests.cluster.harness import PAGE

LOST = NotReady("the session ended")
FULL = OutOfPages(1, 0, 1000, {})
REFUSED = InvalidRequest("sequences", "one", "is refused")


async def create(cluster: FakeCluster, *new: dict[str, Any], **arrays: Any) -> Any:
    """Status, and the ids or the problem."""
    answer = await cluster.call("create_sequences", {"sequences": list(new)}, **arrays)
    made = answer.fields.get("sequences")
    if answer.status != 201:
        return answer.status, answer.fields
    return answer.status, [one["id"] for one in made]


async def parents(cluster: FakeCluster) -> list[dict[str, Any]]:
    """Forks of a parent at each engine: a call whose parts go to all of them."""
    for name, link in cluster.links.items():
        link.ids.add(f"of-{name}")
    return [{"id": f"new-{name}", "parent": f"of-{name}"} for name in cluster.links]


def left(cluster: FakeCluster) -> list[str]:
    """The new sequences that engines have."""
    every = [one for link in cluster.links.values() for one in link.ids]
    return sorted(one for one in every if not one.startswith("of-"))


@pytest.mark.parametrize(
    ("error", "status"), [(LOST, 503), (FULL, 507), (REFUSED, 422), (UnknownSequence(["x"]), 404)]
)
async def test_a_call_for_several_engines_makes_all_or_none(error: Exception, status: int) -> None:
    async with fake_cluster("abc") as cluster:
        new = await parents(cluster)
        assert await create(cluster, *new) == (201, ["new-a", "new-b", "new-c"])
        assert [cluster.home(f"new-{name}") for name in "abc"] == ["a", "b", "c"]
        assert [
            link.calls("create_sequences")[0]["sequences"][0]["id"]
            for link in cluster.links.values()
        ] == ["new-a", "new-b", "new-c"]
        again = [one | {"id": f"again-{one['id']}"} for one in new]
        cluster.links["b"].do_next("create_sequences", error)
        failed, problem = await create(cluster, *again)
        assert (failed, "done" in problem) == (status, False)
        assert left(cluster) == ["new-a", "new-b", "new-c"]


@pytest.mark.parametrize("error", [LOST, FULL, Overloaded("busy", retry_after_s=1.0)])
async def test_another_engine_makes_what_one_has_no_room_or_no_session_for(
    error: Exception,
) -> None:
    async with fake_cluster("ab") as cluster:
        for link in cluster.links.values():
            link.do_next("create_sequences", error)
        status, _ = await create(cluster, {})
        assert status == {LOST: 503, FULL: 507}.get(error, 429), "each is tried once"
        assert [len(link.served) for link in cluster.links.values()] == [1, 1]
        cluster.links["a"].do_next("create_sequences", error)
        assert await create(cluster, {"id": "one"}, {"id": "two"}) == (201, ["one", "two"])
        assert not cluster.links["a"].ids and cluster.home("one") == "b"
        assert not any(link.calls("gather") for link in cluster.links.values())


@pytest.mark.parametrize("fate", [None, LOST])
async def test_a_failed_call_deletes_what_it_made(fate: Exception | None) -> None:
    async with fake_cluster("ab") as cluster:
        new = await parents(cluster)
        cluster.links["b"].do_next("create_sequences", REFUSED)
        cluster.links["a"].do_next("delete_sequences", *filter(None, [fate]))
        failed, problem = await create(cluster, *new)
        assert (failed, problem.get("done")) == (504 if fate else 422, None)
        assert cluster.links["a"].calls("delete_sequences") == [{"ids": ["new-a"]}]
        assert left(cluster) == (["new-a"] if fate else [])


async def test_what_a_call_makes_at_several_engines_is_unknown_until_all_have_made_theirs() -> None:
    """Rows that others append meanwhile would be lost where one of the engines refuses."""
    async with fake_cluster("ab") as cluster:
        new, seen = await parents(cluster), []

        async def look() -> None:
            seen.append((await cluster.error("truncate", {"id": "new-a", "length": 0}))[:2])
            seen.append(await cluster.fields("delete_sequences", {"ids": ["new-a"]}))

        async def look_and_refuse() -> None:
            await look()
            raise REFUSED

        for doing, status in ((look_and_refuse, 422), (look, 201)):
            cluster.links["b"].do_next("create_sequences", doing)
            assert (await create(cluster, *new))[0] == status
            assert seen == [(404, "unknown_sequence"), {"num_deleted": 0}]
            seen.clear()
        await cluster.ok("truncate", {"id": "new-a", "length": 0})
        assert not cluster.router.ids.held


async def test_a_chosen_id_is_one_call_to_one_engine() -> None:
    async with fake_cluster("abc") as cluster:
        assert await create(cluster, {"id": "new"}) == (201, ["new"])
        status, problem = await create(cluster, {"id": "new"}, {"id": "other"})
        assert (status, problem["code"], problem["sequences"]) == (409, "sequence_exists", ["new"])
        assert left(cluster) == ["new"]
        served = [name for link in cluster.links.values() for name, *_ in link.served]
        assert served.count("create_sequences") <= 3
        assert set(served) <= {"create_sequences", "delete_sequences"}
        for name in "abc":
            cluster.engine_of(name).is_silent = name != cluster.home("new")
        assert (await create(cluster, {"id": "new"}))[0] == 409
        assert (await create(cluster, {"id": "more"}))[0] == 201, "the silent ones do not have it"


async def test_a_chosen_id_waits_for_the_ids_of_every_engine_that_may_be_alive() -> None:
    async with fake_cluster("ab") as cluster:
        member = cluster.router.members.by_name["b"]
        member.is_known = False
        status, problem = await create(cluster, {"id": "new"})
        assert (status, problem["code"]) == (503, "not_ready")
        status, code, _ = await cluster.error("get_sequence", {"id": "unknown"})
        assert (status, code) == (404, "unknown_sequence"), "all were asked"
        assert (await create(cluster, {}))[0] == 201, "without an id no engine is asked"
        cluster.lose("b", is_dead=True)
        assert (await create(cluster, {"id": "new"}))[0] == 201


async def test_of_calls_that_make_one_id_at_once_one_succeeds() -> None:
    async with fake_cluster("ab") as cluster:
        answers = await asyncio.gather(*(create(cluster, {"id": "same"}) for _ in range(8)))
        assert sorted(status for status, _ in answers) == [201] + [409] * 7
        assert [len(ids) for ids in cluster.ids_at().values()] in ([1, 0], [0, 1])


async def test_an_id_is_made_by_one_call_at_a_time() -> None:
    async with fake_cluster("ab") as cluster:
        cluster.only_on("a")
        asked, may_end = asyncio.Event(), asyncio.Event()

        async def full() -> None:
            asked.set()
            await may_end.wait()
            raise FULL

        cluster.links["a"].do_next("create_sequences", full)
        first = asyncio.create_task(create(cluster, {"id": "same"}))
        await asked.wait()
        second = asyncio.create_task(create(cluster, {"id": "same"}, {"id": "other"}))
        assert await create(cluster, {"id": "another"}) == (201, ["another"])
        cluster.only_on("b")
        may_end.set()
        answers = await asyncio.gather(first, second)
        assert sorted(status for status, _ in answers) == [201, 409]
        assert cluster.ids_at()["b"] >= {"same"} and "same" not in cluster.ids_at()["a"]


async def test_a_call_that_is_cancelled_may_have_made_its_ids_at_their_engine() -> None:
    async with fake_cluster("ab") as cluster:
        cluster.only_on("a")
        asked = asyncio.Event()

        async def never() -> None:
            asked.set()
            await asyncio.Event().wait()

        cluster.links["a"].do_next("create_sequences", never)
        first = asyncio.create_task(create(cluster, {"id": "same"}))
        await asked.wait()
        first.cancel()
        await asyncio.wait([first])
        cluster.only_on("b")
        assert await create(cluster, {"id": "same"}) == (201, ["same"])
        assert cluster.ids_at() == {"a": {"same"}, "b": set()}


@pytest.mark.parametrize("is_there", [False, True])
async def test_an_entry_of_a_sequence_that_has_expired_does_not_keep_its_id_from_being_made(
    is_there: bool,
) -> None:
    async with fake_cluster("ab") as cluster:
        cluster.only_on("a")
        await create(cluster, {"id": "one"})
        cluster.only_on()
        if not is_there:
            cluster.links["a"].ids.clear()
        cluster.links["a"].do_next("create_sequences", FULL)
        assert (await create(cluster, {"id": "one"}))[0] == (507 if is_there else 201)
        assert cluster.home("one") == ("a" if is_there else "b")


async def test_an_id_that_an_engine_may_have_made_without_a_reply_stays_its_own() -> None:
    async with fake_cluster("ab") as cluster:
        cluster.engine_of("a").load, cluster.engine_of("b").load = (
            EngineLoad(free=1000),
            EngineLoad(free=900),
        )
        link = cluster.links["a"]

        async def makes_and_breaks() -> None:
            link.create(link.calls("create_sequences")[-1]["sequences"])
            raise AnswerLost("the session ended")

        link.do_next("create_sequences", makes_and_breaks)
        assert (await create(cluster, {"id": "one"}))[0] == 504
        assert (await create(cluster, {"id": "one"}))[0] == 409
        assert cluster.ids_at() == {"a": {"one"}, "b": set()}


async def test_a_fork_cannot_have_an_id_that_another_engine_has() -> None:
    async with fake_cluster("ab") as cluster:
        await parents(cluster)
        cluster.only_on("b")
        await create(cluster, {"id": "taken"}, {"id": "expired"})
        cluster.links["b"].ids.remove("expired")
        cluster.only_on()
        fork = {"parent": "of-a"}
        status, problem = await create(cluster, fork | {"id": "taken"})
        assert (status, problem["sequences"]) == (409, ["taken"])
        assert await create(cluster, fork | {"id": "expired"}) == (201, ["expired"])
        assert cluster.home("expired") == "a"


async def test_forks_follow_a_parent_that_has_moved() -> None:
    async with fake_cluster("ab") as cluster:
        new = await parents(cluster)
        assert (await create(cluster, *new))[0] == 201
        cluster.links["b"].ids, cluster.links["a"].ids = {"of-a", "new-b"}, {"of-b", "new-a"}
        more = [{"id": "x", "parent": "of-a"}, {"id": "y", "parent": "x"}, {"parent": "of-b"}]
        status, ids = await create(cluster, *more)
        assert (status, ids[:2]) == (201, ["x", "y"])
        assert {"x", "y"} < cluster.links["b"].ids and ids[2] in cluster.links["a"].ids
        assert [cluster.home(one) for one in ids] == ["b", "b", "a"]


async def test_a_fork_of_a_parent_that_comes_later_in_the_call_is_an_engines_to_refuse() -> None:
    async with fake_cluster("ab") as cluster:
        for link in cluster.links.values():
            link.do_next("create_sequences", REFUSED, REFUSED)
        for new in ([{"parent": "later"}, {"id": "later"}], [{"id": "own", "parent": "own"}]):
            status, problem = await create(cluster, *new)
            assert (status, problem["rule"]) == (422, "is refused")


@pytest.mark.parametrize(("is_dead", "status"), [(True, 410), (False, 503)])
async def test_a_fork_of_a_parent_that_is_lost_with_its_engine(is_dead: bool, status: int) -> None:
    async with fake_cluster("ab") as cluster:
        new = await parents(cluster)
        await cluster.ok("get_sequence", {"id": "of-a"})

        async def end() -> None:
            cluster.lose("a", is_dead=is_dead)
            raise LOST

        cluster.links["a"].do_next("create_sequences", end)
        failed, problem = await create(cluster, new[0], {})
        assert failed == status
        if is_dead:
            assert (problem["code"], problem["sequences"]) == ("lost_sequence", ["of-a"])
        assert not cluster.links["b"].ids - {"of-b"}


async def test_tensors_of_a_call_are_divided_among_its_engines() -> None:
    ids = np.arange(11 * PAGE, dtype=np.uint32)
    counts = (2 * PAGE, 0, 4 * PAGE, 5 * PAGE)
    async with fake_cluster("ab") as cluster:
        known = cluster.router.members.prefixes_of("default")
        sums = np.concatenate([[0], np.cumsum(counts)])
        from service.cluster.placement.prefixes import POOL, chained_keys, prefix_of
        from service.operations.schema.page_names import PromptNames

        for index, tag in ((0, 8 * "b"), (2, 8 * "b"), (3, 8 * "a")):
            part = ids[sums[index] : sums[index + 1]]
            prefix = prefix_of(PromptNames(cache_salt=""), {"token_ids": part}, 4)
            assert prefix is not None
            keys = {key.hex() for key in chained_keys(prefix, "default", PAGE)}
            known.pages[POOL].setdefault(tag, set()).update(keys)
        new = [{"prefix": {}}, {"id": "x", "parent": "of-b"}, {"prefix": {}}, {"prefix": {}}]
        cluster.links["b"].ids.add("of-b")
        fields = {"sequences": new, "prefix_indptr": sums.tolist()}
        answer = await cluster.ok("create_sequences", fields, token_ids=ids)
        homes = [cluster.home(one["id"]) for one in answer.fields["sequences"]]
        assert homes == ["b", "b", "b", "a"]
        for name, indptr, expected in (
            ("b", [0, 2 * PAGE, 2 * PAGE, 6 * PAGE], ids[: 6 * PAGE]),
            ("a", None, ids[6 * PAGE :]),
        ):
            (served,) = [one for one in cluster.links[name].served if one[0] == "create_sequences"]
            assert served[1].get("prefix_indptr") == indptr
            np.testing.assert_array_equal(served[2]["token_ids"], expected)


async def test_a_deleted_id_is_unknown_when_its_engine_dies() -> None:
    async with fake_cluster("ab") as cluster:
        assert await create(cluster, {"id": "one"}) == (201, ["one"])
        home = cluster.home("one")
        assert await cluster.fields("delete_sequences", {"ids": ["one"]}) == {"num_deleted": 1}
        cluster.lose(home, is_dead=True)
        status, code, _ = await cluster.error("get_sequence", {"id": "one"})
        assert (status, code) == (404, "unknown_sequence")


async def test_a_prompt_that_has_waited_leaves_its_engine_the_rest_of_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def waits(self: Any, call: DoorCall, _: Any) -> None:
        call.deadline_us //= 2

    deadlines, ask = [], FakeLink.call

    async def note(self: Any, operation: Any, request: Any, length: int, *more: Any) -> Any:
        deadlines.append(more[1])
        return await ask(self, operation, request, length, *more)

    monkeypatch.setattr(InflightPrompts, "wait", waits)
    monkeypatch.setattr(FakeLink, "call", note)
    async with fake_cluster("a") as cluster:
        new = {"sequences": [{"prefix": {"token_ids": list(range(PAGE))}}]}
        assert (await cluster.call("create_sequences", new, deadline_s=2.0)).status == 201
    assert deadlines == [1_000_000]
