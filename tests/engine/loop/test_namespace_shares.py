"""What one namespace may have of what all share, and no call that holds the engine for long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.engine.handlers import rows, sequences
from service.engine.work import work
from service.errors import NotReady, UnknownSequence
from service.road.caller_end.caller import RoadCaller
from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import (
    ARENA_BYTES,
    Caller,
    NewCall,
    append,
    code,
    creation,
    fake_engine,
    gather,
    outcome,
    until,
)
from tests.engine.rounds import Rounds

PAGE = FakeBackend().geometry.page_size
PROMPT = list(range(2 * PAGE))

shared = fake_engine(
    keys={name: (name, ["read", "append"]) for name in ("ours", "theirs", "third")},
    key="ours",
    max_sequences=8,
    max_leases=8,
    max_sessions=8,
    namespace_share=0.5,
)
"""A test of two namespaces where eight of everything is for all."""


@shared
async def test_a_namespace_has_at_most_its_share_of_sequences(ours: Caller, theirs: Caller) -> None:
    await ours.create("a", "b", "c")
    pool = await ours.pool()
    assert (pool["sequences"], pool["max_sequences"], pool["max_leases"]) == (3, 4, 4)
    reply = await ours.refused(creation({"id": "d"}, {"id": "e"}), "out_of_sequences")
    numbers = {name: reply.problem[name] for name in ("needed", "free", "total")}
    assert numbers == {"needed": 2, "free": 1, "total": 4}
    assert reply.problem["retry_after_s"] > 0
    assert "for this namespace" in str(reply) and "engine.namespace_share" in str(reply)
    await ours.create("d")
    await theirs.create("a", "b", "c", "d")
    full = await theirs.refused(creation({"id": "e"}))
    assert "retry_after_s" not in full.problem


async def lease(caller: Caller) -> Any:
    return await outcome(caller.call("match_prefix", {"token_ids": PROMPT, "lease_s": 60.0}))


async def cache_prompt(caller: Caller) -> str:
    """Cache `PROMPT`; the key of its last page."""
    await caller.create("a")
    for layer in range(2):
        await caller.submit(append("a", len(PROMPT), layer=layer))
    reply = await caller.call("commit", {"id": "a", "token_ids": PROMPT})
    key: str = reply.fields["last_key"]
    return key


@shared
async def test_a_namespace_has_at_most_its_share_of_leases(ours: Caller, theirs: Caller) -> None:
    for caller in (ours, theirs):
        await cache_prompt(caller)
    held = [(await lease(ours)).fields["lease"]["id"] for _ in range(4)]
    reply = await lease(ours)
    assert code(reply) == "overloaded" and reply.problem["retry_after_s"] > 0
    assert "engine.max_leases" in str(reply)
    assert (await lease(theirs)).fields["lease"] is not None
    await ours.call("release_lease", {"id": held[0]})
    assert (await lease(ours)).fields["lease"] is not None


@shared
async def test_hard_pins_count_in_the_leases_of_all_namespaces(
    ours: Caller, theirs: Caller, third: Caller
) -> None:
    for caller in (ours, theirs):
        await caller.call("pin", {"page_key": await cache_prompt(caller), "hard": True})
        for _ in range(3):
            assert (await lease(caller)).fields["lease"] is not None
    key = await cache_prompt(third)
    for reply in (
        await lease(third),
        await outcome(third.call("pin", {"page_key": key, "hard": True})),
    ):
        assert code(reply) == "overloaded" and "8 leases and pins of all namespaces" in str(reply)
    await theirs.call("unpin", {"page_key": (await pinned(theirs))})
    assert (await lease(third)).fields["lease"] is not None


async def pinned(caller: Caller) -> str:
    holds = (await caller.call("holds", {})).fields["holds"]
    (key,) = (one["page_key"] for one in holds if one["lease"] is None)
    return str(key)


@shared
async def test_a_namespace_has_at_most_its_share_of_sessions(ours: Caller, theirs: Caller) -> None:
    path = ours.running.path
    more = [await RoadCaller.connect(path, ARENA_BYTES, key="ours") for _ in range(3)]
    with pytest.raises(NotReady, match=r"its share of server\.max_sessions"):
        await RoadCaller.connect(path, ARENA_BYTES, key="ours")
    assert (await theirs.pool())["sequences"] == 0
    count = len(ours.engine.callers.sessions)
    more.pop().close()
    await until(lambda: len(ours.engine.callers.sessions) < count)
    more.append(await RoadCaller.connect(path, ARENA_BYTES, key="ours"))
    for road in more:
        road.close()


@fake_engine(max_sequences=4)
async def test_without_keys_the_one_namespace_has_everything(caller: Caller) -> None:
    await caller.create(*"abcd")
    assert await caller.code(creation({"id": "e"})) == "out_of_sequences"


@fake_engine(max_sequences=100)
async def test_a_long_create_never_passes_the_limit_beside_another(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both begin while there is room for either, and one of them is undone."""
    monkeypatch.setattr(sequences, "MADE_AT_ONCE", 4)
    monkeypatch.setattr(work, "TURN_S", 0.0)

    async with caller.another() as other:
        new = [{"id": f"{who}{number}"} for number in range(60) for who in "a"]
        more = [{"id": f"b{number}"} for number in range(60)]
        room = 2**18
        replies = await asyncio.gather(
            outcome(caller.submit(creation(*new), room=room)),
            outcome(other.submit(creation(*more), room=room)),
        )
    codes = sorted(map(code, replies))
    assert codes in (["ok", "out_of_sequences"], ["out_of_sequences", "out_of_sequences"])
    numbers = await caller.pool()
    assert (numbers["sequences"], numbers["integrity"]) == (60 * codes.count("ok"), "ok")


@pytest.mark.parametrize("what", ["create", "delete", "undo"])
def test_many_sequences_are_made_and_deleted_between_the_turns_of_others(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's calls are answered all the while, each in a round or two."""
    monkeypatch.setattr(work, "TURN_S", 0.0)
    rounds = Rounds()
    rounds.ask(creation({"id": "n"}))
    new: list[dict[str, Any]] = [{"id": f"s{number}"} for number in range(1000)]
    if what == "undo":
        new.append({"parent": "missing"})
    make = rounds.ask(creation(*new))
    if what == "delete":
        for part in "abc":
            rounds.ask(creation(*({"id": f"s{part}{number}"} for number in range(1000))))
        rounds.finish()
        make = rounds.ask(NewCall("delete_sequences", {"prefix": "s"}))
    answered = 0
    while make not in rounds.answered:
        neighbours = rounds.ask(gather("n"))
        rounds.run(2)
        assert neighbours in rounds.answered and neighbours.error is None
        answered += 1
    assert answered >= {"create": 12, "delete": 7, "undo": 30}[what], answered
    assert isinstance(make.error, UnknownSequence) == (what == "undo")
    assert rounds.store.tree.num_sequences == (1001 if what == "create" else 1)
    rounds.store.tree.check_integrity()


@fake_engine()
async def test_page_tables_of_too_many_pages_are_refused_before_they_are_planned(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_TABLE", 4)

    await caller.create("a", "b")
    for name in "ab":
        await caller.submit(append(name, 2 * PAGE))
    fields: dict[str, Any] = {"layer": 0, "sequences": ["a", "b"]}
    assert len((await caller.call("page_table", fields)).fields["kv_indices"]) == 4
    await caller.submit(append("a", 1))
    planned = len(caller.engine.store.plans)
    reply = await caller.refused(NewCall("page_table", fields), "answer_too_large")
    assert reply.problem["size"] > reply.problem["limit"] and "fewer sequences" in str(reply)
    assert len(caller.engine.store.plans) == planned
