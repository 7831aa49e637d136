"""Calls for sequences, all engines or any engine, where some refuse, fail or lose their session."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from service.cluster.placement.cost import EngineLoad
from service.cluster.routing import router
from service.errors import (
    InvalidRequest,
    NotReady,
    OutOfPages,
)
from service.road.caller_end.caller import AnswerLost
from service.tenants import SCOPES, tenant_of
from tests.cluster.fake_engines import FakeCluster, fake_cluster
from tests.cluster.harness import DIM, HEADS, PAGE

REFUSED = InvalidRequest("id", "it", "is refused")
TRUNCATE: dict[str, Any] = {"id": "here", "length": 0}


async def known(cluster: FakeCluster, **homes: str) -> None:
    for name, engine in homes.items():
        cluster.links[engine].ids.add(name)
        await cluster.ok("get_sequence", {"id": name})


@pytest.mark.parametrize(
    ("is_dead", "error", "operation", "expected"),
    [
        (None, NotReady("not now"), "truncate", (503, "not_ready")),
        (True, NotReady("not sent"), "truncate", (410, "lost_sequence")),
        (True, AnswerLost("sent"), "truncate", (410, "lost_sequence")),
        (False, NotReady("not sent"), "truncate", (503, "not_ready")),
        (False, AnswerLost("sent"), "truncate", (504, "deadline_exceeded")),
        (False, AnswerLost("sent"), "get_sequence", (503, "not_ready")),
        (False, AnswerLost("sent"), "decode", (503, "not_ready")),
        (False, AnswerLost("sent"), "decode with k", (504, "deadline_exceeded")),
    ],
)
async def test_what_a_call_says_whose_session_ends(
    is_dead: bool | None, error: NotReady, operation: str, expected: tuple[int, str]
) -> None:
    async with fake_cluster("ab") as cluster:
        await known(cluster, here="a", other="b")

        async def end() -> None:
            if is_dead is not None:
                cluster.lose("a", is_dead=is_dead)
            raise error

        name, *appends = operation.split(" with ")
        row = np.zeros((1, HEADS, DIM), np.float32)
        fields, arrays = (TRUNCATE if name == "truncate" else {"id": "here"}), {}
        if name == "decode":
            fields, arrays = {"layer": 0, "sequences": ["here"]}, {"q": row}
            arrays |= {"k": row, "v": row} if appends else {}
        cluster.links["a"].do_next(name, end)
        answer = await cluster.call(name, fields, **arrays)
        assert (answer.status, answer.fields["code"]) == expected
        if is_dead:
            assert answer.fields["sequences"] == ["here"]
        await cluster.ok("truncate", TRUNCATE | {"id": "other"})


async def test_a_refusal_is_raised_as_the_engine_wrote_it() -> None:
    async with fake_cluster("ab") as cluster:
        await known(cluster, here="a")
        cluster.links["a"].do_next("truncate", REFUSED)
        answer = await cluster.call("truncate", TRUNCATE)
        assert (answer.status, answer.fields["rule"]) == (422, "is refused")


@pytest.mark.parametrize(
    ("failing", "error", "status", "tried"),
    [
        ("", NotReady("lost"), 200, [1, 0, 0]),
        ("a", NotReady("lost"), 200, [1, 1, 0]),
        ("abc", NotReady("lost"), 503, [1, 1, 1]),
        ("a", REFUSED, 422, [1, 0, 0]),
    ],
)
async def test_a_call_for_any_engine_goes_to_the_next_one_after_a_loss_only(
    failing: str, error: Exception, status: int, tried: list[int]
) -> None:
    async with fake_cluster("abc") as cluster:
        for name in failing:
            cluster.links[name].do_next("merge", error)
        o, lse = np.zeros((2, 1, HEADS, DIM), np.float32), np.zeros((2, 1, HEADS), np.float32)
        answer = await cluster.call("merge", {}, o=o, lse=lse)
        assert answer.status == status
        assert [len(link.calls("merge")) for link in cluster.links.values()] == tried


async def test_a_full_engine_is_named_with_those_that_have_room() -> None:
    async with fake_cluster("abcde") as cluster:
        await known(cluster, here="a")
        for name, free in zip("abcde", (9, 5, 4, 9, 9), strict=True):
            cluster.engine_of(name).load = EngineLoad(free=free)
        cluster.engine_of("d").is_draining = True
        cluster.links["a"].do_next("truncate", OutOfPages(5, 0, 9, {}))
        problem = (await cluster.call("truncate", TRUNCATE)).fields
        assert (problem["engine"], problem["engines_with_room"]) == ("a", ["b", "e"])
        assert "engine a is full; b and e have room: " in problem["detail"]


@pytest.mark.parametrize("ending", ["commit", "delete_sequence", "truncate"])
async def test_the_wait_for_a_prompt_ends_with_its_commit_or_its_sequence(ending: str) -> None:
    ids = list(range(PAGE))
    async with fake_cluster("a") as cluster:
        new = {"id": "here", "prefix": {"token_ids": ids}}
        await cluster.ok("create_sequences", {"sequences": [new]})
        (prompt,) = cluster.router.prompts.by_name.values()
        more = {"commit": {"token_ids": ids}, "truncate": {"length": 0}}.get(ending, {})
        await cluster.ok(ending, {"id": "here"} | more)
        assert prompt.ended.is_set() == (ending != "truncate")


async def test_parts_of_a_batch_go_to_their_engines_and_come_back_in_order() -> None:
    async with fake_cluster("ab") as cluster:
        await known(cluster, one="b", two="a", three="b")
        for name, pages in (("a", [2]), ("b", [1, 3])):
            cluster.links[name].replies["commit_sequences"] = {"num_pages": pages}
        keys = ["0" * 31 + str(number) for number in range(3)]
        fields = {
            "sequences": ["one", "two", "three"],
            "page_keys": keys,
            "names_indptr": [0, 1, 2, 3],
        }
        answer = await cluster.call("commit_sequences", fields)
        assert answer.fields.get("num_pages") == [1, 2, 3], answer


async def test_an_unknown_sequence_is_looked_for_once_at_all_engines() -> None:
    async with fake_cluster("ab") as cluster:
        answer = await cluster.call("truncate", TRUNCATE)
        assert (answer.status, answer.fields["sequences"]) == (404, ["here"])
        assert [len(link.calls("gather")) for link in cluster.links.values()] == [1, 1]
        refused = await cluster.call("page_table", {"sequences": ["a", "b"]})
        assert (refused.status, refused.fields["sequences"]) == (404, ["a", "b"])


async def test_a_sequence_of_a_dead_engine_is_lost_and_one_that_no_engine_had_is_unknown() -> None:
    async with fake_cluster("ab") as cluster:
        await known(cluster, here="a")
        cluster.lose("a", is_dead=True)
        status, code, answer = await cluster.error("truncate", TRUNCATE)
        assert (status, code, answer.fields["sequences"]) == (410, "lost_sequence", ["here"])
        assert (await cluster.call("truncate", TRUNCATE | {"id": "never"})).status == 404


async def test_a_call_that_no_engine_answers_times_out_and_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "GRACE_S", 0.0)
    async with fake_cluster("ab") as cluster:
        await known(cluster, here="a", other="b")
        cluster.links["a"].do_next("truncate", asyncio.Event().wait)
        silent = asyncio.create_task(cluster.error("truncate", TRUNCATE, deadline_s=0.05))
        await cluster.ok("truncate", {"id": "other", "length": 0})
        assert not silent.done()
        assert (await asyncio.wait_for(silent, 5))[:2] == (504, "deadline_exceeded")
        assert not silent.cancelling()


@pytest.mark.parametrize("appends", [False, True])
async def test_a_decode_that_one_engine_refuses_lists_the_rows_of_the_other(appends: bool) -> None:
    async with fake_cluster("ab") as cluster:
        await known(cluster, here="a", there="b")
        cluster.links["b"].do_next("decode", REFUSED)
        q = np.zeros((2, HEADS, DIM), np.float32)
        new = {"k": q, "v": q} if appends else {}
        fields = {"layer": 0, "sequences": ["here", "there"]}
        answer = await cluster.call("decode", fields, q=q, **new)
        assert (answer.status, answer.fields.get("done")) == (422, ["here"] if appends else None)


async def test_a_router_asks_in_its_callers_namespace_with_all_scopes() -> None:
    async with fake_cluster("ab", has_keys=True) as cluster:
        cluster.links["a"].ids.add("here")
        reader = tenant_of("red", ["read"])
        assert (await cluster.call("get_sequence", {"id": "here"}, reader)).status == 200
        every = tenant_of("red", SCOPES)
        assert cluster.links["a"].tenants == [every, reader]
        assert cluster.links["b"].tenants == [every]
