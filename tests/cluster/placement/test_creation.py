"""New sequences and imports, where engines refuse, fail, move sequences or fall silent."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from service.cluster.membership.engine import Call
from service.cluster.migration.ownership import roll_back, settle
from service.cluster.migration.transfer import Family
from service.cluster.placement import unique_ids
from service.cluster.placement.cost import Load
from service.cluster.placement.inflight_prompts import InflightPrompts
from service.cluster.routing.tags import new_anchor
from service.errors import (
    InvalidRequest,
    NotReady,
    OutOfPages,
    Overloaded,
    SequenceChanged,
    SequenceMoving,
    UnknownSequence,
)
from service.road.caller_end.caller import AnswerLost
from service.tenants import OPEN
from tests.cluster.fake_engines import FakeCluster, FakeLink, fake_cluster
from tests.cluster.harness import PAGE, SETTINGS

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
        assert len(cluster.links["a"].calls("gather")) == 2, "ids are looked for before and after"


@pytest.mark.parametrize("fate", [[], [LOST], [InvalidRequest("state", "gone", "is refused")]])
async def test_a_failed_call_deletes_what_it_made_or_lets_it_expire(fate: list[Exception]) -> None:
    async with fake_cluster("ab") as cluster:
        new = await parents(cluster)
        cluster.links["b"].do_next("create_sequences", REFUSED)
        cluster.links["a"].do_next("hand_over", *fate)
        failed, problem = await create(cluster, *new)
        assert (failed, problem.get("done")) == (422, None)
        (asked,) = cluster.links["b"].calls("create_sequences")
        assert asked == {"sequences": new[1:], "confirm_s": SETTINGS.server.deadline_s + 10.0}
        assert cluster.links["a"].calls("hand_over") == [{"id": "new-a", "state": "gone"}]
        assert left(cluster) == (["new-a"] if fate else [])


@pytest.mark.parametrize("error", [LOST, InvalidRequest("state", "back", "it has expired")])
async def test_a_new_sequence_that_is_perhaps_not_confirmed_is_a_504(error: Exception) -> None:
    async with fake_cluster("ab") as cluster:
        cluster.only_on("a")
        cluster.links["a"].do_next("hand_over", error)
        failed, problem = await create(cluster, {"id": "new"})
        assert (failed, problem["code"]) == (504, "deadline_exceeded")
        assert "may have been made" in problem["detail"]
        assert cluster.links["a"].calls("hand_over") == [{"id": "new", "state": "back"}]


@pytest.mark.parametrize(("is_kept", "status"), [(True, 409), (False, 201)])
async def test_a_new_sequence_waits_until_others_have_made_one_of_its_id_or_not(
    is_kept: bool, status: int
) -> None:
    async with fake_cluster("ab") as cluster:
        link = cluster.links["a"]
        link.ids.add("new")

        async def end() -> None:
            if not is_kept:
                link.ids.remove("new")

        link.do_next("get_sequence", SequenceMoving(["new"]), end)
        assert (await create(cluster, {"id": "new"}))[0] == status


async def test_a_confirmation_is_sent_again_where_the_queue_of_an_engine_is_full() -> None:
    async with fake_cluster("ab") as cluster:
        cluster.only_on("a")
        cluster.links["a"].do_next("hand_over", Overloaded("busy", retry_after_s=1.0))
        assert await create(cluster, {"id": "new"}) == (201, ["new"])
        assert len(cluster.links["a"].calls("hand_over")) == 2


async def test_what_a_dead_engine_had_made_needs_no_undoing() -> None:
    async with fake_cluster("ab") as cluster:
        new = await parents(cluster)

        async def die() -> None:
            cluster.lose("a", is_dead=True)
            raise LOST

        cluster.links["b"].do_next("create_sequences", REFUSED)
        cluster.links["a"].do_next("hand_over", die)
        status, problem = await create(cluster, *new)
        assert (status, problem.get("done")) == (422, None)


async def test_a_chosen_id_is_refused_before_anything_is_made() -> None:
    async with fake_cluster("abc") as cluster:
        cluster.links["b"].ids = {"here"}
        status, problem = await create(cluster, {"id": "new"}, {"id": "here"}, {})
        assert (status, problem["code"], problem["sequences"]) == (409, "sequence_exists", ["here"])
        assert not any(link.calls("create_sequences") for link in cluster.links.values())
        cluster.engine_of("c").is_silent = True
        status, problem = await create(cluster, {"id": "new"})
        assert (status, problem["code"]) == (503, "not_ready"), "it may have the id"
        assert (await create(cluster, {}))[0] == 201, "without an id no engine is asked"


@pytest.mark.parametrize("with_another", [False, True])
async def test_an_id_that_another_door_makes_meanwhile_is_made_by_neither(
    with_another: bool,
) -> None:
    async with fake_cluster("ab") as cluster:
        cluster.only_on("a")

        async def rival() -> None:
            cluster.links["b"].ids.add("same")

        cluster.links["a"].do_next("create_sequences", rival)
        new = [{"id": "same"}, {"id": "mine"}, {}] if with_another else [{"id": "same"}]
        status, problem = await create(cluster, *new)
        assert (status, problem["sequences"], problem.get("done")) == (409, ["same"], None)
        assert cluster.ids_at() == {"a": set(), "b": {"same"}}
        cluster.router.locator.tags.known.clear()
        await cluster.ok("get_sequence", {"id": "same"})


async def test_an_id_that_its_own_call_may_have_made_already_is_a_503_and_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.cluster.membership.engine.RETRY_BUDGET_S", 0.1)
    async with fake_cluster("ab") as cluster:
        cluster.engine_of("a").load, cluster.engine_of("b").load = Load(free=1000), Load(free=900)
        link = cluster.links["a"]

        async def makes_and_breaks() -> None:
            link.create(link.calls("create_sequences")[-1]["sequences"])
            link.do_next("get_sequence", *[SequenceMoving(["one"])] * 1000)  # not confirmed
            raise AnswerLost("the session ended")

        link.do_next("create_sequences", makes_and_breaks)
        status, problem = await create(cluster, {"id": "one"})
        assert (status, problem["code"]) == (503, "sequence_moving")
        assert cluster.ids_at() == {"a": {"one"}, "b": set()}, "it expires at a"


async def test_while_an_engine_drains_ids_are_looked_for_twice() -> None:
    async with fake_cluster("abc") as cluster:
        cluster.engine_of("b").is_draining = True
        cluster.links["a"].do_next("create_sequences", FULL)

        async def move() -> None:  # from c, which is asked last, to b, which was asked before
            cluster.links["b"].ids.add("same")

        async def nothing() -> None:
            pass

        cluster.engine_of("a").load = Load(free=10)
        cluster.links["c"].do_next("gather", nothing)
        cluster.links["b"].do_next("gather", nothing, nothing)
        cluster.links["a"].do_next("gather", nothing, move)
        status, problem = await create(cluster, {"id": "same"})
        assert (status, problem["code"]) == (409, "sequence_exists")
        assert cluster.ids_at() == {"a": set(), "b": {"same"}, "c": set()}


async def test_an_only_engine_is_asked_once_for_a_chosen_id() -> None:
    async with fake_cluster("a") as cluster:
        assert await create(cluster, {"id": "new"}) == (201, ["new"])
        status, problem = await create(cluster, {"id": "new"}, {"id": "other"})
        assert (status, problem["code"], problem["sequences"]) == (409, "sequence_exists", ["new"])
        assert [name for name, *_ in cluster.links["a"].served] == ["create_sequences"] * 2
        assert cluster.ids_at() == {"a": {"new"}}


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


async def test_an_import_is_cancelled_at_an_engine_that_has_fallen_silent_amid_a_move() -> None:
    async with fake_cluster("ab") as cluster:
        source, target = cluster.engine_of("a"), cluster.engine_of("b")
        cluster.links["a"].ids.add("moving")
        cluster.links["b"].imports.add("moving")
        target.is_silent = True
        family = Family(OPEN, ["moving"], target=target)
        await roll_back(cluster.router.members, source, family, "moving", is_handed=False)
        assert cluster.links["b"].calls("cancel_import") == [{"id": "moving"}]
        assert [one["state"] for one in cluster.links["a"].calls("hand_over")] == ["back"]


@pytest.mark.parametrize(("arrived", "state"), [(True, "gone"), (False, "back")])
async def test_a_sequence_that_was_deleted_after_its_move_does_not_come_back(
    arrived: bool, state: str
) -> None:
    """The door that moved it has died before its old engine deleted it."""
    async with fake_cluster("ab") as cluster:
        source, target = cluster.links.values()
        source.ids.add("moved")
        source.do_next("get_sequence", SequenceMoving(["moved"], ["moved"]))
        source.do_next("hand_over", SequenceChanged("moved", "5" * 32))
        if arrived:
            target.arrived.add("5" * 32)
        await settle(cluster.router.members, "moved", OPEN)
        asked = {"id": "moved", "state": "arrived", "generation": "5" * 32}
        assert target.calls("hand_over") == [asked]
        assert source.calls("hand_over")[-1] == {"id": "moved", "state": state}


async def test_a_deleted_id_is_unknown_when_its_engine_dies() -> None:
    async with fake_cluster("ab") as cluster:
        assert await create(cluster, {"id": "one"}) == (201, ["one"])
        home = cluster.home("one")
        for link in cluster.links.values():
            link.replies["delete_sequences"] = {"num_deleted": 0, "skipped": []}
        cluster.links[home].replies["delete_sequences"] = {"num_deleted": 1, "skipped": []}
        assert await cluster.fields("delete_sequences", {"ids": ["one"]}) == {"num_deleted": 1}
        cluster.links[home].ids.remove("one")
        cluster.lose(home, is_dead=True)
        status, code, _ = await cluster.error("get_sequence", {"id": "one"})
        assert (status, code) == (404, "unknown_sequence")


async def test_a_prompt_that_has_waited_leaves_its_engine_the_rest_of_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def waits(self: Any, call: Call, _: Any) -> None:
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


async def test_what_an_engine_has_made_without_a_reply_is_deleted_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unique_ids, "LOOK_S", 0.01)
    async with fake_cluster("ab") as cluster:
        members, link = cluster.router.members, cluster.links["a"]
        engine, member = cluster.engine_of("a"), members.by_name["a"]
        engine.load, cluster.engine_of("b").load = Load(free=1000), Load(free=900)

        async def makes_and_leaves() -> None:
            link.create(link.calls("create_sequences")[-1]["sequences"])
            cluster.lose("a", is_dead=False)
            raise AnswerLost("the session ended")

        link.do_next("create_sequences", makes_and_leaves)
        status, made = await create(cluster, {})
        assert status == 201 and cluster.ids_at()["b"] == set(made)
        (orphan,) = link.ids
        await asyncio.sleep(0.05)
        assert not link.calls("delete_sequences")
        member.engine = members.by_tag[engine.tag] = engine
        async with asyncio.timeout(10):
            while not link.calls("delete_sequences"):
                await asyncio.sleep(0.01)
        assert link.calls("delete_sequences") == [{"ids": [orphan]}]


async def test_ids_of_copies_that_drains_make_cannot_be_chosen() -> None:
    async with fake_cluster("ab") as cluster:
        for _ in range(20):
            status, problem = await create(cluster, {"id": new_anchor(), "ttl_s": 30.0})
            assert (status, problem["field"]) == (422, "sequences.0.id")
        assert (await create(cluster, {"id": "moving.0123456789abcdefg"}))[0] == 201
