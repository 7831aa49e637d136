"""Namespaces in the engine: visibility of sequences, and the order of turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from service.engine.loop import callers as callers_module
from service.engine.work import work
from service.road.engine_end.calls import Event
from service.road.engine_end.session import Session
from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import (
    Caller,
    NewCall,
    append,
    creation,
    decode,
    delete,
    fake_engine,
    no_turns,
    truncate,
    until,
    write_keys,
)
from tests.engine.long_calls import SLICE_MS, finish, long_prefill

KEYS = {
    "ours": ("ours", ["read", "append"]),
    "too": ("ours", ["read", "append"]),
    "theirs": ("theirs", ["read", "append"]),
    "reader": ("ours", ["read"]),
    "writer": ("ours", ["append"]),
    "operator": ("ops", ["read", "admin"]),
}
keyed = partial(fake_engine, keys=KEYS, key="ours")
"""A test by the key `ours`; its further parameters are sessions by keys of their names."""


@keyed()
async def test_lists_forks_and_answers_show_names_as_their_callers_gave_them(
    ours: Caller, theirs: Caller
) -> None:
    await theirs.create("0", "a", "m", "z")
    await ours.create(*(f"s-{number}" for number in range(5)))
    fork = {"sequences": [{"id": "fork", "parent": "s-1"}, {"parent": "s-2"}]}
    made = (await ours.call("create_sequences", fork)).fields["sequences"]
    assert [one["parent"] for one in made] == ["s-1", "s-2"]
    assert made[0]["id"] == "fork" and made[1]["id"].startswith("seq-")
    listed: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = (await ours.call("list_sequences", {"limit": 2} | after)).fields
        listed += [one["id"] for one in page["sequences"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    wanted = ["fork", *(f"s-{number}" for number in range(5)), made[1]["id"]]
    assert listed == sorted(wanted)


@keyed()
async def test_errors_name_sequences_as_their_callers_do(ours: Caller) -> None:
    cases: list[tuple[NewCall, dict[str, Any]]] = [
        (creation({"id": "a"}), {"sequences": ["a"]}),
        (append("a", 1, offsets=[7]), {"lengths": {"a": 5}}),
        (decode("a", "b"), {"sequences": ["b"]}),
        (truncate("a", 9), {"field": "length", "value": 9}),
        (creation({"parent": "a"}), {"field": "parent", "value": "a"}),
        (decode("a", "a"), {"field": "sequences", "value": "a"}),
    ]

    await ours.create("a")
    await ours.submit(append("a", 5))
    for call, numbers in cases:
        reply = await ours.refused(call)
        assert {name: reply.problem[name] for name in numbers} == numbers
        assert "ours" not in str(reply.problem), reply.problem


@keyed()
async def test_a_key_that_is_taken_back_ends_its_sessions_and_a_changed_one_changes_them(
    ours: Caller, theirs: Caller, too: Caller
) -> None:
    await ours.create("a")
    file = ours.engine._settings.auth.keys_file
    assert file is not None
    write_keys(file, {"ours": ("ours", ["read"]), "too": KEYS["too"], "fresh": ("fresh", ["read"])})
    ours.engine.read_keys_again()
    await until(lambda: theirs.road.lost != "")
    assert "was removed" in theirs.road.lost
    assert await ours.code(delete("a")) == "forbidden"
    assert await too.code(delete("a")) == "ok"
    async with ours.another("fresh") as fresh:
        assert (await fresh.call("list_sequences")).fields["sequences"] == []


# Turns.


async def one_each(ours: Caller, theirs: Caller) -> None:
    """`a` of five tokens and the empty `held`; in the other namespace `b` of nine."""
    await ours.create("a", "held")
    await theirs.create("b")
    await ours.submit(append("a", 5))
    await theirs.submit(append("b", 9, seed=5))


async def hold(caller: Caller, backend: FakeBackend) -> asyncio.Task[Any]:
    """Keep a launch in flight, behind which barriers wait."""
    count = len(backend.launches)
    backend.gate.clear()
    task = caller.start(decode("held"))
    await until(lambda: len(backend.launches) > count)
    return task


@keyed()
async def test_a_single_call_shares_its_launch_with_one_of_another_namespaces_many(
    ours: Caller, theirs: Caller, backend: FakeBackend
) -> None:
    await one_each(ours, theirs)
    del backend.launches[:]
    with no_turns(ours):
        many = [ours.start(decode("a", seed=number)) for number in range(100)]
        await until(lambda: ours.num_waiting == 100)
        single = theirs.start(decode("b"))
        await until(lambda: ours.num_waiting == 101)
    await asyncio.gather(single, *many)
    sizes = [len(launch) for launch in backend.launches]
    assert sizes[0] <= 2, f"the single call waited in a launch of {sizes[0]}"
    assert sum(sizes) == 101


@keyed()
async def test_a_session_is_read_in_its_turn_however_many_frames_another_one_sends(
    ours: Caller, theirs: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time for one session in a round, as where each of many frames is refused."""
    callers, order = ours.engine.callers, list[str]()
    read, free = callers.read, threading.Event()

    def held(session: Session, mask: int) -> Sequence[Event]:
        free.wait(5)
        order.append(session.tenants[0].namespace)
        return read(session, mask)

    monkeypatch.setattr(callers, "read", held)
    monkeypatch.setattr(callers_module, "RECEIVE_S", -1.0)
    absent = NewCall("get_sequence", {"id": "absent"})
    many = [ours.start(absent, room=2**10) for _ in range(1500)]
    await asyncio.sleep(0)
    single = theirs.attempt(absent)
    await asyncio.sleep(0.05)  # all frames are sent
    free.set()
    await single
    await asyncio.gather(*many, return_exceptions=True)
    assert len(order) > 5, "the many frames take several rounds"
    assert order.index("theirs") <= 2, order


@keyed()
async def test_a_session_whose_frames_took_long_is_read_after_the_others(
    ours: Caller, theirs: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers, order = ours.engine.callers, list[str]()
    read, free, second = callers.read, threading.Event(), threading.Event()

    def held(session: Session, mask: int) -> Sequence[Event]:
        if len(order) == 1:
            second.set()
            free.wait(5)
        order.append(session.tenants[0].namespace)
        return read(session, mask)

    monkeypatch.setattr(callers, "read", held)
    monkeypatch.setattr(callers_module, "SLOW_S", -1.0)
    absent = NewCall("get_sequence", {"id": "absent"})
    many = [ours.start(absent, room=2**10) for _ in range(1500)]
    await until(second.is_set)  # the others come while these are being read
    single = theirs.attempt(absent)
    await asyncio.sleep(0.05)
    free.set()
    await single
    await asyncio.gather(*many, return_exceptions=True)
    assert order[:3] == ["ours", "ours", "theirs"], order


@keyed(late=True, queue_depth=8)
async def test_a_full_queue_of_one_namespace_refuses_only_its_own(
    ours: Caller, theirs: Caller, backend: FakeBackend
) -> None:
    await one_each(ours, theirs)
    first = await hold(ours, backend)
    waiting = [ours.start(truncate("held", 0)) for _ in range(8)]
    await until(lambda: ours.num_waiting == 8)
    await ours.refused(decode("a"), "overloaded")
    single = theirs.start(truncate("b", 0))
    await until(lambda: ours.num_waiting == 9)
    backend.gate.set()
    assert (await single).fields["length"] == 0
    await asyncio.gather(first, *waiting)


@keyed(slice_ms=SLICE_MS)
async def test_slices_of_long_work_come_from_each_namespace_in_turn(
    ours: Caller, theirs: Caller, backend: FakeBackend
) -> None:
    await theirs.create("b")
    await ours.create("1", "2", "3", "4")
    for caller, names in ((ours, "1234"), (theirs, "b")):
        for name in names:
            await caller.submit(append(name, 4))
    steps = backend.step_by_step()
    alone = await finish(backend, theirs.start(long_prefill("b", new=False)))
    steps = backend.step_by_step()
    many = [ours.start(long_prefill(name, new=False)) for name in "1234"]
    await until(lambda: len(steps) == 1)
    single = theirs.start(long_prefill("b", new=False))
    await until(lambda: len(ours.engine.jobs) == 5)
    beside = await finish(backend, single)
    assert alone >= 5
    assert beside <= 2 * alone + 3, f"{beside} slices went by for {alone}"
    backend.let_all()
    await asyncio.gather(*many)


@keyed()
async def test_a_broken_invariant_is_logged_and_names_no_namespace_to_others(
    ours: Caller, theirs: Caller, operator: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    await theirs.create("secret")
    await theirs.submit(append("secret", 5))
    theirs.engine.store.tree.books.leaf("theirs/secret").start = 1
    verdicts = [(await one.pool())["integrity"] for one in (ours, theirs, operator)]
    broken = "broken: the service's log has the numbers"
    assert verdicts == ["ok", broken, broken]
    theirs.engine.store.tree.books.leaf("theirs/secret").start = 0
    assert caplog.text.count("theirs/secret with") == 2


@fake_engine()
async def test_a_pool_is_looked_at_between_the_turns_of_others(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a chain of forks runs some milliseconds at a time."""
    monkeypatch.setattr(work, "TURN_S", 0.0)

    await caller.create("n0")
    for number in range(1, 50):
        await caller.create(f"n{number}", parent=f"n{number - 1}")
    before = caller.metric("attnd_slices_total")
    numbers = (await caller.call("pool")).fields
    assert (numbers["sequences"], numbers["integrity"]) == (50, "ok")
    assert caller.metric("attnd_slices_total") >= before + 100
