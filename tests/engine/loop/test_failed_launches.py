"""Failed launches: other operations succeed, and failed ones leave no trace."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kernels.backend import DeviceLost, Unsupported
from kernels.errors import NoMemory
from service.engine.store.store import StoreLost
from service.engine.work.pace import DevicePace
from service.errors import NotReady
from tests.engine.fake_backend import GEOMETRY, FakeBackend, Later
from tests.engine.harness import (
    Caller,
    Refused,
    append,
    code,
    creation,
    decode,
    engine_test,
    fake_engine,
    gather,
    held_back,
    outcome,
    three_sequences,
    truncate,
    until,
    with_engine,
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Bugs are logged with their tracebacks; these are made on purpose."""
    with caplog.at_level(logging.CRITICAL, logger="attnd.engine"):
        yield


def codes(replies: list[Any]) -> list[str]:
    return [code(one) for one in replies]


@fake_engine()
async def test_sequences_that_were_made_stay_made_when_a_launch_behind_them_fails(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    backend.failures["attend"] = [RuntimeError("a bug"), RuntimeError("again")]
    new = creation({"id": "c"})
    replies = await held_back(caller, backend, new, decode("a", new=True), append("c", 1))
    assert codes(replies) == ["ok", "internal", "ok"]
    assert [await caller.length(name) for name in ("a", "c")] == [5, 1]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", ["attend", "result"])
@fake_engine()
async def test_a_launch_that_fails_takes_back_every_page_and_length(
    caller: Caller, backend: FakeBackend, stage: str, late: bool
) -> None:
    await three_sequences(caller)
    before = await caller.pool()
    backend.failures[stage] = [RuntimeError("a bug in the kernel")]
    reply = await caller.refused(decode("a", "b", "held", new=True), "internal", status=500)
    assert "kernel" not in str(reply), "a bug's own words are for the log"
    assert await caller.pool() == before
    assert [await caller.length(name) for name in ("a", "b", "held")] == [5, 9, 0]
    assert (await caller.submit(append("held", 1))).fields == {"lengths": [1]}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", ["attend", "result"])
@fake_engine()
async def test_an_operation_that_fails_in_a_shared_launch_fails_alone(
    caller: Caller, backend: FakeBackend, stage: str, late: bool
) -> None:
    await three_sequences(caller)
    bug = RuntimeError("a bug")
    # The shared launch fails; run one by one, the second of them fails again.
    backend.failures[stage] = [bug, None, bug, None]
    every = [
        decode("a", new=True),
        decode("b", new=True, seed=3),
        append("held", 2),
        decode("a", new=True, seed=4),
    ]
    replies = await held_back(caller, backend, *every)
    assert codes(replies) == ["ok", "internal", "ok", "ok"]
    assert replies[2].fields == {"lengths": [2]}
    assert [await caller.length(name) for name in ("a", "b", "held")] == [7, 9, 2]
    assert (await caller.pool())["integrity"] == "ok"


@fake_engine()
async def test_a_refusal_because_of_rows_that_a_failed_launch_takes_back_is_not_sent(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    bug = RuntimeError("a bug")
    backend.failures["result"] = [bug, bug]
    behind = append("a", 1, seed=5, offsets=[5])  # before the decode, "a" has 5 tokens
    replies = await held_back(caller, backend, decode("a", new=True), behind)
    assert codes(replies) == ["internal", "ok"]
    assert await caller.length("a") == 6


@fake_engine()
async def test_an_operation_that_cannot_begin_a_second_time_fails_alone(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    full = NoMemory("full")
    backend.failures = {"attend": [RuntimeError("a bug")], "append": [None, None, full]}
    every = [decode("a", new=True), decode("b", new=True, seed=3)]
    replies = await held_back(caller, backend, *every)
    assert codes(replies) == ["overloaded", "ok"]
    assert [await caller.length(name) for name in ("a", "b")] == [5, 10]
    assert (await caller.pool())["integrity"] == "ok"


class OpensGate(FakeBackend):
    """An append opens the gate of the launches in flight."""

    def append(self, *args: Any) -> Any:
        pending = super().append(*args)
        self.gate.set()
        return pending


@engine_test(lambda: OpensGate(late=True))
async def test_a_launch_that_fails_as_the_next_group_is_submitted_is_answered_once(
    caller: Caller, backend: OpensGate
) -> None:
    await three_sequences(caller)
    backend.gate.clear()
    backend.failures["result"] = [RuntimeError("a bug")]
    first = caller.start(decode("a"))
    await until(lambda: bool(caller.engine.scheduler.launches.in_flight))
    replies = [await outcome(one) for one in (caller.submit(append("b", 1)), first)]
    assert codes(replies) == ["ok", "ok"]
    assert await caller.length("b") == 10
    assert (await caller.pool())["integrity"] == "ok"


class ReadsLate(FakeBackend):
    """An append reads its rows when `has_read` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.has_read = threading.Event()

    def append(self, *args: Any) -> Any:
        super().append(*args)
        return Later(None, self.has_read)


@engine_test(ReadsLate)
async def test_an_append_that_runs_again_is_answered_once_its_rows_are_read(
    caller: Caller, backend: ReadsLate
) -> None:
    backend.has_read.set()
    await three_sequences(caller)
    backend.has_read.clear()
    backend.failures["attend"] = [RuntimeError("a bug")]
    threading.Timer(0.3, backend.has_read.set).start()
    replies = await held_back(caller, backend, append("held", 2), decode("a"))
    assert backend.has_read.is_set()
    assert codes(replies) == ["ok", "ok"]


def test_a_launch_that_fails_behind_another_in_flight_is_taken_back_with_what_came_on_top() -> None:
    every = [
        decode("a", new=True),
        decode("a", new=True, seed=4, sm_scale=0.5),
        append("a", 1, seed=8),
    ]

    async def expected(caller: Caller) -> Any:
        await three_sequences(caller)
        for each in every:
            await caller.submit(each)
        return await caller.submit(decode("a", seed=6))

    wanted = with_engine(FakeBackend(), expected)
    backend = FakeBackend(late=True)

    async def scenario(caller: Caller) -> None:
        await three_sequences(caller)
        backend.failures["result"] = [None, RuntimeError("a bug"), None]
        backend.gate.clear()
        del backend.calls[:]
        tasks = []
        for call, calls in zip(every, (2, 4, 5), strict=True):
            tasks.append(caller.attempt(call))
            await until(lambda calls=calls: len(backend.calls) == calls)
        backend.gate.set()
        replies = await asyncio.gather(*tasks)
        assert codes(replies) == ["ok"] * 3, replies
        assert backend.calls[5:8] == ["append", "attend", "append"]
        assert await caller.length("a") == 8
        kept = await caller.submit(decode("a", seed=6))
        np.testing.assert_array_equal(kept.o, wanted.o)

    with_engine(backend, scenario)


@fake_engine(late=True)
async def test_a_group_that_cannot_start_runs_alone_and_launches_before_it_once(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    backend.gate.clear()
    del backend.calls[:]
    first = caller.attempt(decode("a", new=True))
    await until(lambda: backend.calls == ["append", "attend"])
    threading.Timer(0.3, backend.gate.set).start()
    backend.failures["attend"] = [RuntimeError("a bug")]
    second = caller.attempt(decode("b", new=True, sm_scale=0.5))
    replies = await asyncio.gather(first, second)
    assert codes(replies) == ["ok", "ok"]
    assert [len(one) for one in backend.launches[-2:]] == [1, 1]
    assert backend.calls == ["append", "attend", *["append", "attend"] * 2], "only the second again"
    assert [await caller.length(name) for name in ("a", "b")] == [6, 10]
    assert (await caller.pool())["integrity"] == "ok"


@fake_engine(late=True)
async def test_a_launch_that_fails_before_a_group_that_cannot_start_is_taken_back_alone(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    backend.gate.clear()
    backend.failures = {"result": [RuntimeError("a bug")], "attend": [None, RuntimeError("a bug")]}
    first = caller.attempt(decode("a", new=True))
    await until(lambda: bool(caller.engine.scheduler.launches.in_flight))
    threading.Timer(0.3, backend.gate.set).start()
    second = caller.attempt(decode("a", new=True, seed=4, sm_scale=0.5))
    replies = await asyncio.gather(first, second)
    assert codes(replies) == ["internal", "ok"]
    assert await caller.length("a") == 6
    assert (await caller.pool())["integrity"] == "ok"


@fake_engine(late=True)
async def test_a_failed_launch_of_a_disconnected_caller_is_run_again_for_others(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    backend.gate.clear()
    count = len(backend.launches)
    backend.failures["result"] = [RuntimeError("a bug")]
    async with caller.another() as other:
        abandoned = other.attempt(decode("b", new=True))
        await until(lambda: len(backend.launches) > count)
    kept = caller.start(append("b", 1))
    await until(lambda: backend.calls[-1] == "append")
    assert isinstance(await abandoned, NotReady)
    backend.gate.set()
    # what ran is not taken back by its caller's death, and here it succeeds the second time
    assert (await kept).fields == {"lengths": [11]}
    assert (await caller.pool())["integrity"] == "ok"


@fake_engine()
async def test_an_unsupported_option_is_an_invalid_request_and_changes_nothing(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    before = await caller.pool()
    backend.failures["attend"] = [Unsupported("logits_soft_cap", 3.0, "is not built here")]
    reply = await caller.refused(decode("held", new=True), "invalid_request", status=422)
    found = tuple(reply.problem[key] for key in ("field", "value", "rule"))
    assert found == ("logits_soft_cap", 3.0, "is not built here")
    assert await caller.pool() == before


@fake_engine()
async def test_a_device_without_memory_for_a_call_is_overloaded_and_changes_nothing(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    before = await caller.pool()
    backend.failures["attend"] = [NoMemory("the device has no 100 bytes left: try again")]
    await caller.refused(decode("held", new=True), "overloaded", status=429, retry_after_s=1.0)
    assert await caller.pool() == before
    assert await caller.code(decode("held", new=True)) == "ok"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", ["append", "attend", "result"])
@fake_engine(ends=DeviceLost)
async def test_a_lost_device_refuses_everything_from_then_on_with_the_reason(
    caller: Caller, backend: FakeBackend, stage: str, late: bool
) -> None:
    await three_sequences(caller)
    backend.failures[stage] = [DeviceLost("xid 79")]
    every = [decode("a", new=True), append("b", 1), decode("b", sm_scale=0.5)]
    results = []
    caller.road.on_state = lambda state: results.append((state.state, "xid 79" in state.reason))
    replies = await held_back(caller, backend, *every)
    assert codes(replies) == ["not_ready"] * 3
    assert all(reply.status == 503 and "xid 79" in str(reply) for reply in replies)
    assert (caller.state, "xid 79" in caller.engine.state.reason) == ("lost", True)
    await until(lambda: bool(caller.road.lost))
    assert results == [("lost", True)]
    with pytest.raises(NotReady):
        await caller.call("pool")


@fake_engine()
async def test_a_failed_row_copy_takes_a_fork_back(caller: Caller, backend: FakeBackend) -> None:
    await caller.fill(a=6)
    before = await caller.pool()
    backend.failures["copy_rows"] = [RuntimeError("a bug")]
    assert code(await outcome(caller.create("b", parent="a"))) == "internal"
    assert await caller.pool() == before


@fake_engine(ends=DeviceLost)
async def test_a_device_that_is_lost_in_a_fork_ends_the_engine(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=6)
    backend.failures["copy_rows"] = [DeviceLost("xid 79")]
    assert code(await outcome(caller.create("b", parent="a"))) == "not_ready"


@fake_engine(ends=StoreLost)
async def test_a_failed_row_copy_of_a_truncate_cannot_be_taken_back_so_the_pool_is_lost(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=8)
    await caller.create("b", parent="a")
    backend.failures["copy_rows"] = [RuntimeError("a bug")]
    assert await caller.code(truncate("b", 6)) == "not_ready"
    assert caller.state == "lost"


@pytest.mark.parametrize("keep", [None, [7]])
@fake_engine()
async def test_a_truncate_within_a_shared_page_is_refused_while_there_is_no_memory(
    caller: Caller, backend: FakeBackend, keep: list[int] | None
) -> None:
    await caller.fill(a=8)
    await caller.create("b", parent="a")
    before = await caller.pool(), (await caller.submit(gather("b"))).tensors["k"]
    backend.failures["copy_rows"] = [NoMemory("open steps hold it")]
    cut = truncate("b", 6).but(**({"keep": keep} if keep else {}))
    await caller.refused(cut, "overloaded")
    assert await caller.pool() == before[0]
    assert np.array_equal((await caller.submit(gather("b"))).tensors["k"], before[1])
    kept = [0, 1, 2, 3, 4, 5, *(keep or [])]
    assert (await caller.submit(cut)).fields["length"] == len(kept)
    for layer in range(GEOMETRY.num_layers):
        whole, part = [await caller.submit(gather(name, layer=layer)) for name in ("a", "b")]
        assert np.array_equal(whole.tensors["v"][kept], part.tensors["v"])


@pytest.mark.parametrize("late", [False, True])
@fake_engine()
async def test_refusals_of_the_core_reach_the_caller_and_change_nothing(
    caller: Caller, backend: FakeBackend, late: bool
) -> None:
    await three_sequences(caller)
    before = await caller.pool()
    masked = decode("a").but("prefill", qo_indptr=[0, 1], mask=np.ones(6, bool))
    cases = [
        (decode("missing", new=True), "unknown_sequence"),
        (append("a", 1, offsets=[4]), "length_mismatch"),
        (append("a", 1000), "out_of_pages"),
        (decode("a", new=True, offsets=[4]), "length_mismatch"),
        (masked, "invalid_request"),
    ]
    for call, wanted in cases:
        reply = await outcome(caller.submit(call))
        assert code(reply) == wanted, (call.name, reply)
        if wanted == "length_mismatch":
            assert isinstance(reply, Refused)
            assert reply.problem["lengths"] == {"a": 5}
    together = await held_back(caller, backend, *(call for call, _ in cases))
    assert codes(together) == [wanted for _, wanted in cases]
    assert await caller.pool() == before
    await until(lambda: caller.metric("attnd_out_of_pages_total") == 2)


@fake_engine()
async def test_appended_rows_of_an_undone_operation_are_not_counted(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.create("a")
    backend.failures["attend"] = [RuntimeError("a bug")]
    assert await caller.code(decode("a", new=True)) == "internal"
    await caller.submit(append("a", 3))
    await until(lambda: caller.metric("attnd_tokens_appended_total") == 3)


class Slower(FakeBackend):
    """The first launch that it is reply to fail makes everything long from then on."""

    pace: DevicePace

    def _failure(self, name: str) -> Exception | None:
        error = super()._failure(name)
        if error is not None:
            self.pace.slice_s = 1e-12
        return error


@pytest.mark.parametrize("again", [None, RuntimeError("again")])
@engine_test(Slower)
async def test_short_work_that_is_long_by_the_time_it_runs_again_still_runs(
    caller: Caller, backend: Slower, again: Exception | None
) -> None:
    await three_sequences(caller)
    backend.pace = caller.engine.store.pace
    wanted = await caller.submit(decode("b"))
    # launched together; then alone: the first in one slice, or failing in it
    backend.failures["attend"] = [RuntimeError("a bug"), again]
    replies = await held_back(caller, backend, decode("a", new=True), decode("b"))
    assert codes(replies) == ["ok" if again is None else "internal", "ok"]
    np.testing.assert_array_equal(replies[1].o, wanted.o)
    assert await caller.length("a") == (6 if again is None else 5)
    assert (await caller.pool())["integrity"] == "ok"
