"""Long work that is stopped between two slices leaves no trace, whatever it was and stopped it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from attnd.wire.bounds import MAX_NEW

from service.engine.handlers import sequences
from service.errors import NotReady
from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import (
    Caller,
    NewCall,
    Refused,
    Reply,
    append,
    code,
    creation,
    decode,
    delete,
    engine_test,
    fake_engine,
    gather,
    outcome,
    truncate,
    until,
    with_engine,
)
from tests.engine.long_calls import ROWS, SLICE_MS, long_append, long_prefill


async def cancelled(caller: Caller, task: asyncio.Task[Reply]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await caller.call("info")  # frames keep their order: the engine has read the other, too


@pytest.mark.parametrize("end", ["cancel", "deadline", "death"])
@pytest.mark.parametrize("long", [long_prefill, long_append], ids=["prefill", "append"])
@pytest.mark.parametrize("done", [1, 3])
@fake_engine(slice_ms=SLICE_MS)
async def test_what_stops_between_two_slices_is_undone(
    caller: Caller, backend: FakeBackend, long: Callable[[str], NewCall], end: str, done: int
) -> None:
    await caller.fill(a=20, b=5)
    known, before = await caller.submit(decode("a", "b")), await caller.pool()
    steps = backend.step_by_step()
    async with caller.another() as other:
        deadline_s = 0.6 if end == "deadline" else 0.0
        task = asyncio.create_task(other.submit(long("a"), deadline_s=deadline_s))
        for at in range(done):
            await until(lambda at=at: len(steps) == at + 1)
            if at + 1 < done:
                steps[at].set()
        held = caller.attempt(append("a", 1))
        await until(lambda: caller.num_waiting == 1)
        if end == "cancel":
            await cancelled(other, task)
        elif end == "deadline":
            await asyncio.sleep(0.65)
        else:
            other.road.close()
            await until(lambda: len(caller.engine.callers.sessions) == 1)
        assert caller.num_waiting == 1, "its sequences were unlocked while the device used them"
        assert await caller.length("b") == 5
        backend.let_all()
        if end != "cancel":
            reply = await outcome(task)
            assert isinstance(reply, NotReady if end == "death" else Refused)
            if end == "deadline":
                assert (reply.status, "undone" in str(reply)) == (504, True)  # type: ignore[attr-defined]
    appended = await held
    assert isinstance(appended, Reply)
    assert appended.fields == {"lengths": [21]}, "it began from the length that the long one left"
    await caller.submit(truncate("a", 20))
    assert await caller.pool() == before
    again = await caller.submit(decode("a", "b"))
    np.testing.assert_array_equal(again.o, known.o)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), None])
def test_a_slice_that_fails_undoes_the_whole_and_no_other_operation(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FakeBackend()

    async def scenario(caller: Caller) -> None:
        await caller.fill(a=20, b=5)
        before = await caller.pool()
        backend.failures["attend"] = [None, None, RuntimeError("a bug")]
        if error is not None:
            backend.failures = {"result": [None, None, error]}
        tasks = [caller.start(long_prefill("a")), caller.start(append("b", 1))]
        replies = await asyncio.gather(*(outcome(task) for task in tasks))
        assert [code(one) for one in replies] == ["internal", "ok"]
        await caller.submit(truncate("b", 5))
        assert await caller.pool() == before
        backend.failures = {}
        assert (await caller.submit(long_prefill("a"))).status == 200

    with caplog.at_level("CRITICAL", logger="attnd.engine"):
        with_engine(backend, scenario, slice_ms=SLICE_MS)


@fake_engine(slice_ms=SLICE_MS)
async def test_a_long_append_that_does_not_fit_or_says_wrong_offsets_changes_nothing(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=20, b=5)
    before = await caller.pool()
    for call, wanted in (
        (append("a", 1000), "out_of_pages"),
        (append("a", ROWS, offsets=[19]), "length_mismatch"),
        (long_prefill("a", offsets=[19]), "length_mismatch"),
        (long_prefill("zz"), "unknown_sequence"),
    ):
        assert await caller.code(call) == wanted
    assert await caller.pool() == before


# Long creates: the engine itself makes some sequences in each slice.


class Interrupted(FakeBackend):
    """Stops in some of its copies of rows until it is reply to go on."""

    def __init__(self, *stops: int) -> None:
        super().__init__()
        self.at = {stop: threading.Event() for stop in stops}
        self.go_on = {stop: threading.Event() for stop in stops}

    def copy_rows(self, *args: Any) -> None:
        super().copy_rows(*args)
        number = self.calls.count("copy_rows")
        if number in self.at:
            self.at[number].set()
            assert self.go_on[number].wait(20), "the copy was not released"


async def stopped_create(
    caller: Caller,
    backend: Interrupted,
    stop: Callable[[Caller, asyncio.Task[Reply]], Awaitable[None]],
) -> None:
    """A create of many forks that is stopped while its second slice runs, as if it never were."""
    await caller.fill(a=20, b=5)
    before = await caller.pool()
    new = [{"parent": "b"} if at % 2 else {"id": f"n{at}", "parent": "b"} for at in range(16)]
    async with caller.another() as other:
        task = asyncio.create_task(other.submit(creation(*new), deadline_s=0.6))
        await until(backend.at[2].is_set)
        await stop(other, task)
        backend.go_on[2].set()
        await asyncio.gather(task, return_exceptions=True)
        while await caller.pool() != before:  # or the test is ended for its time
            await asyncio.sleep(0.001)
        listed = (await caller.call("list_sequences")).fields["sequences"]
        assert [view["id"] for view in listed] == ["a", "b"]


@pytest.mark.parametrize("end", ["cancel", "deadline", "death"])
@engine_test(lambda: Interrupted(2))
async def test_a_long_create_that_is_stopped_made_nothing(
    caller: Caller, backend: Interrupted, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "MADE_AT_ONCE", 4)

    async def stop(other: Caller, task: asyncio.Task[Reply]) -> None:
        if end == "deadline":
            await asyncio.sleep(0.65)
        elif end == "cancel":
            task.cancel()
            await asyncio.sleep(0.05)
        else:
            other.road.close()
            await asyncio.sleep(0.05)

    await stopped_create(caller, backend, stop)


@pytest.mark.parametrize("stopped", [False, True])
@engine_test(lambda: Interrupted(2, 4))
async def test_a_sequence_of_a_long_create_cannot_be_changed_before_all_are_made(
    caller: Caller, backend: Interrupted, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "MADE_AT_ONCE", 4)
    await caller.fill(a=20, b=5)
    async with caller.another() as other:
        new: list[dict[str, str]] = [{"parent": "b"} for _ in range(20)]
        task = other.attempt(creation(*new))
        await until(backend.at[2].is_set)
        listing = asyncio.create_task(caller.call("list_sequences"))
        await asyncio.sleep(0.05)
        backend.go_on[2].set()
        names = [view["id"] for view in (await listing).fields["sequences"]]
        fresh = next(name for name in names if name.startswith("seq-"))
        await until(backend.at[4].is_set)
        deleting = caller.attempt(delete(fresh))
        await asyncio.sleep(0.05)
        if stopped:
            other.road.close()
            await asyncio.sleep(0.05)
        backend.go_on[4].set()
        assert code(await deleting) == ("unknown_sequence" if stopped else "ok")
        assert isinstance(await task, NotReady if stopped else Reply)
    info = await caller.pool()
    assert (info["sequences"], info["integrity"]) == (2 if stopped else 21, "ok")


@pytest.mark.parametrize("bad", [{"id": "b"}, {"parent": "zz"}])
@fake_engine()
async def test_a_long_create_of_which_a_late_one_is_refused_made_nothing(
    caller: Caller, bad: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "MADE_AT_ONCE", 4)

    await caller.fill(a=20, b=5)
    before = await caller.pool()
    new: list[dict[str, str]] = [{"parent": "b"} for _ in range(11)]
    reply = await outcome(caller.submit(creation(*new, bad)))
    assert code(reply) in ("sequence_exists", "unknown_sequence")
    assert await caller.pool() == before


@fake_engine()
async def test_a_thousand_sequences_are_made_in_slices_and_in_order(caller: Caller) -> None:
    new = [{"id": f"s{at}"} for at in range(MAX_NEW)]
    reply = await caller.submit(creation(*new), room=MAX_NEW * 1400)
    assert [view["id"] for view in reply.fields["sequences"]] == [one["id"] for one in new]
    await until(lambda: caller.metric("attnd_slices_total") >= 3)
    info = await caller.pool()
    assert (info["sequences"], info["integrity"]) == (MAX_NEW, "ok")
    reply = await caller.submit(decode(*[f"s{at}" for at in range(0, MAX_NEW, 100)], new=True))
    assert np.isfinite(reply.lse).all()
    assert (await caller.submit(gather("s100"))).fields == {"kv_indptr": [0, 1]}
