"""What one namespace may have of what all share, and no call that holds the engine for long."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from config.settings import AuthSettings, EngineSettings, ServerSettings, Settings
from service.engine.handlers import prefix, rows, sequences
from service.engine.loop import job as work
from service.errors import NotReady
from service.keys import line_of
from service.road.caller_end.caller import RoadCaller
from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import (
    ARENA_BYTES,
    Caller,
    NewCall,
    Refused,
    append,
    code,
    create,
    fake_engine,
    gather,
    outcome,
    pool,
    running_engine,
    with_engine,
)
from tests.engine.loop.test_namespaces import session

PAGE = FakeBackend().geometry.page_size
PROMPT = list(range(2 * PAGE))


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    keys = {"ours": "ours", "theirs": "theirs"}
    path.write_text("\n".join(line_of(key, name, ["read", "append"]) for key, name in keys.items()))
    return str(path)


def shared(keys_file: str, scenario: Any, **limits: Any) -> None:
    """A scenario with a caller of `ours`, where eight of everything is for all."""
    given = {"max_sequences": 8, "max_leases": 8, "namespace_share": 0.5} | limits
    settings = Settings(
        engine=EngineSettings(**given),
        server=ServerSettings(max_sessions=8),
        auth=AuthSettings(keys_file=keys_file),
    )

    async def run(running: Any) -> None:
        road = await RoadCaller.connect(running.path, ARENA_BYTES, key="ours")
        try:
            await scenario(Caller(running, road))
        finally:
            road.close()

    with running_engine(FakeBackend(), settings) as running:
        asyncio.run(run(running))


def test_a_namespace_has_at_most_its_share_of_sequences(keys_file: str) -> None:
    async def scenario(ours: Caller) -> None:
        await create(ours, "a", "b", "c")
        reply = await outcome(create(ours, "d", "e"))
        assert isinstance(reply, Refused) and reply.code == "out_of_sequences"
        numbers = {name: reply.problem[name] for name in ("needed", "free", "total")}
        assert numbers == {"needed": 2, "free": 1, "total": 4}
        assert reply.problem["retry_after_s"] > 0
        assert "for this namespace" in str(reply) and "engine.namespace_share" in str(reply)
        await create(ours, "d")
        async with session(ours, "theirs") as theirs:
            await create(theirs, "a", "b", "c", "d")
            full = await outcome(create(theirs, "e"))
            assert isinstance(full, Refused) and "retry_after_s" not in full.problem

    shared(keys_file, scenario)


def test_a_namespace_has_at_most_its_share_of_leases(keys_file: str) -> None:
    async def lease(caller: Caller) -> Any:
        fields = {"token_ids": PROMPT, "lease_s": 60.0}
        return await outcome(caller.call("match_prefix", fields))

    async def scenario(ours: Caller) -> None:
        async with session(ours, "theirs") as theirs:
            for caller in (ours, theirs):
                await create(caller, "a")
                await caller.submit(append("a", len(PROMPT)))
                await caller.submit(append("a", len(PROMPT), layer=1))
                await caller.call("commit", {"id": "a", "token_ids": PROMPT})
            held = [(await lease(ours)).fields["lease"]["id"] for _ in range(4)]
            reply = await lease(ours)
            assert code(reply) == "overloaded" and reply.problem["retry_after_s"] > 0
            assert "its share of engine.max_leases" in str(reply)
            key = (await ours.call("commit", {"id": "a", "token_ids": PROMPT})).fields["last_key"]
            again = {"id": "lease-mine", "page_key": key, "lease_s": 9.0}
            assert code(await outcome(ours.call("renew_lease", again))) == "overloaded"
            assert (await lease(theirs)).fields["lease"] is not None
            await ours.call("release_lease", {"id": held[0]})
            assert (await lease(ours)).fields["lease"] is not None

    shared(keys_file, scenario)


def test_the_same_lease_id_in_two_namespaces_is_two_leases(keys_file: str) -> None:
    """A namespace cannot see another's lease, nor take its id."""

    async def scenario(ours: Caller) -> None:
        async with session(ours, "theirs") as theirs:
            keys = []
            for caller in (ours, theirs):
                await create(caller, "a")
                await caller.submit(append("a", len(PROMPT)))
                await caller.submit(append("a", len(PROMPT), layer=1))
                reply = await caller.call("commit", {"id": "a", "token_ids": PROMPT})
                keys.append(reply.fields["last_key"])
            for caller, key in zip((ours, theirs), keys, strict=True):
                fields = {"id": "lease-1", "page_key": key, "lease_s": 60.0}
                assert code(await outcome(caller.call("renew_lease", fields))) == "ok"
            await ours.call("release_lease", {"id": "lease-1"})
            assert code(await outcome(ours.call("renew_lease", {"id": "lease-1"}))) == (
                "unknown_lease"
            )
            assert [one["lease"] for one in (await theirs.call("holds", {})).fields["holds"]] == [
                "lease-1"
            ]

    shared(keys_file, scenario)


def test_a_namespace_has_at_most_its_share_of_sessions(keys_file: str) -> None:
    async def scenario(ours: Caller) -> None:
        path = ours.running.path
        more = [await RoadCaller.connect(path, ARENA_BYTES, key="ours") for _ in range(3)]
        with pytest.raises(NotReady, match=r"its share of server\.max_sessions"):
            await RoadCaller.connect(path, ARENA_BYTES, key="ours")
        async with session(ours, "theirs") as theirs:
            assert (await pool(theirs))["sequences"] == 0
        more.pop().close()
        await asyncio.sleep(0.1)
        more.append(await RoadCaller.connect(path, ARENA_BYTES, key="ours"))
        for road in more:
            road.close()

    shared(keys_file, scenario)


@fake_engine(max_sequences=4)
async def test_without_keys_the_one_namespace_has_everything(caller: Caller) -> None:
    await create(caller, *"abcd")
    assert code(await outcome(create(caller, "e"))) == "out_of_sequences"


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
            outcome(caller.submit(NewCall("create_sequences", {"sequences": new}, {}), room=room)),
            outcome(other.submit(NewCall("create_sequences", {"sequences": more}, {}), room=room)),
        )
    codes = sorted(map(code, replies))
    assert codes in (["ok", "out_of_sequences"], ["out_of_sequences", "out_of_sequences"])
    numbers = await pool(caller)
    assert (numbers["sequences"], numbers["integrity"]) == (60 * codes.count("ok"), "ok")


@pytest.mark.parametrize("what", ["create", "delete", "undo"])
def test_many_sequences_are_made_and_deleted_between_the_turns_of_others(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's calls are answered all the while."""
    monkeypatch.setattr(work, "TURN_S", 0.0)
    new: list[dict[str, Any]] = [{"id": f"s{number}"} for number in range(3000)]
    if what == "undo":
        new.append({"parent": "missing"})

    async def scenario(caller: Caller) -> None:
        await create(caller, "n")
        make = NewCall("create_sequences", {"sequences": new}, {})
        if what == "delete":
            await caller.submit(make, room=2**22)
            make = NewCall("delete_sequences", {"prefix": "s"}, {})
        before = caller.metric("attnd_slices_total")
        async with caller.another() as neighbour:
            task = asyncio.create_task(outcome(caller.submit(make, room=2**22)))
            answered = 0
            while not task.done():
                await neighbour.submit(gather("n"))
                answered += 1
        reply = await task
        assert code(reply) == ("unknown_sequence" if what == "undo" else "ok")
        assert caller.metric("attnd_slices_total") - before >= (36 if what == "undo" else 18)
        assert answered > 3
        numbers = await pool(caller)
        assert (numbers["sequences"], numbers["integrity"]) == (
            3001 if what == "create" else 1,
            "ok",
        )

    with_engine(FakeBackend(), scenario)


@fake_engine()
async def test_page_tables_of_too_many_pages_are_refused_before_they_are_planned(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_TABLE", 4)

    await create(caller, "a", "b")
    for name in "ab":
        await caller.submit(append(name, 2 * PAGE))
    fields: dict[str, Any] = {"layer": 0, "sequences": ["a", "b"]}
    assert len((await caller.call("page_table", fields)).fields["kv_indices"]) == 4
    await caller.submit(append("a", 1))
    planned = len(caller.engine.store.plans)
    reply = await outcome(caller.call("page_table", fields))
    assert isinstance(reply, Refused) and reply.code == "answer_too_large"
    assert reply.problem["size"] > reply.problem["limit"] and "fewer sequences" in str(reply)
    assert len(caller.engine.store.plans) == planned


@pytest.mark.parametrize("skipped", [0, 4, 5])
@fake_engine()
async def test_a_long_commit_is_hashed_between_the_turns_of_others(
    caller: Caller, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the pages that a commit at once names; an invalid one changes nothing."""
    monkeypatch.setattr(prefix, "HASHED_AT_ONCE", PAGE)
    monkeypatch.setattr(work, "TURN_S", 0.0)
    tokens = list(range(12 * PAGE))

    for name in "ab":
        await create(caller, name)
        for layer in range(caller.engine.info.num_layers):
            await caller.submit(append(name, len(tokens), layer=layer))
    cut = {"token_ids": tokens[: skipped * PAGE]}
    if skipped:
        await caller.call("commit", {"id": "a"} | cut)
    before = caller.metric("attnd_slices_total")
    fields = {"token_ids": tokens[skipped * PAGE :], "offset": skipped * PAGE}
    last = (await caller.call("commit", {"id": "a"} | fields)).fields
    assert last["num_pages"] == 12
    assert caller.metric("attnd_slices_total") >= before + 12 - skipped
    monkeypatch.setattr(prefix, "HASHED_AT_ONCE", 2**15)
    assert (await caller.call("commit", {"id": "b", "token_ids": tokens})).fields == last
    monkeypatch.setattr(prefix, "HASHED_AT_ONCE", PAGE)
    numbers = await pool(caller)
    wrong = {"id": "b", "token_ids": [7, *tokens[1:]]}
    assert code(await outcome(caller.call("commit", wrong))) == "key_mismatch"
    assert await pool(caller) == numbers
