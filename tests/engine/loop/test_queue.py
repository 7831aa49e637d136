"""The queue in front of the turns: order, bounds, deadlines, cancellation, drain."""

from __future__ import annotations

import asyncio
import socket

import pytest
from attnd.wire.frames import HELLO, VERSION

from service import __version__
from service.engine.loop.engine import UNSENT_SHARE
from service.errors import NotReady
from service.road.engine_end.session import Session
from service.road.messages import Hello, message
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
    fake_engine,
    get,
    no_turns,
    outcome,
    truncate,
    until,
)


async def blocked(caller: Caller, backend: FakeBackend) -> list[asyncio.Task[Reply]]:
    """A launch that is not done until the gate opens, and a barrier: what comes now waits."""
    backend.gate.clear()
    count = len(backend.launches)
    first = caller.start(decode("a"))
    await until(lambda: len(backend.launches) > count)
    barrier = caller.start(truncate("empty", 0))
    await until(lambda: caller.num_waiting == 1)
    return [first, barrier]


def reply_to(caller: Caller, data: bytes) -> bytes:
    """The engine's reply to a new connection that sends `data`, until it closes it."""
    reply = b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(caller.running.path)
        if data:
            sock.sendall(data)
        while part := sock.recv(4096):
            reply += part
    return reply


@fake_engine(late=True, queue_depth=3)
async def test_a_full_queue_refuses_with_a_time_to_retry_and_admitted_work_finishes(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=3, empty=0)
    first = await blocked(caller, backend)
    waiting = [caller.start(decode("a")) for _ in range(2)]
    await until(lambda: caller.num_waiting == 3)
    refused = await caller.refused(decode("a"), "overloaded", status=429)
    assert 0.05 <= refused.problem["retry_after_s"] <= 30
    assert caller.metric('attnd_rejected_total{reason="overloaded"}') == 1
    of_namespace = 'attnd_namespace_rejected_total{namespace="default",reason="overloaded"}'
    assert caller.metric(of_namespace) == 1
    assert caller.metric("attnd_inflight") == 4
    backend.gate.set()
    for reply in await asyncio.gather(*first, *waiting):
        assert reply.status == 200
    await until(lambda: caller.metric("attnd_inflight") == 0)


@fake_engine(late=True, queue_depth=2)
async def test_a_full_queue_still_takes_what_frees_pages(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=3, empty=0)
    await caller.create("deleted")
    first = await blocked(caller, backend)
    waiting = [caller.start(decode("a"))]
    await until(lambda: caller.num_waiting == 2)
    refused: list[NewCall] = [decode("a"), append("a", 1), creation({}), get("a"), NewCall("pool")]
    for call in refused:
        assert await caller.code(call) == "overloaded", call.name
    freeing = [caller.start(truncate("a", 2)), caller.start(delete("deleted"))]
    await until(lambda: caller.num_waiting == 4)
    backend.gate.set()
    replies = await asyncio.gather(*first, *waiting, *freeing)
    assert [reply.status for reply in replies] == [200, 200, 200, 200, 204]
    assert await caller.length("a") == 2
    assert await caller.code(delete("deleted")) == "unknown_sequence"


@fake_engine(late=True)
async def test_an_operation_cancelled_before_its_turn_leaves_no_trace(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=3, empty=0)
    first = await blocked(caller, backend)
    before = list(backend.calls)
    task = caller.start(append("a", 5))
    await until(lambda: caller.num_waiting == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: caller.num_waiting == 1)  # it takes no room in the queue any more
    backend.gate.set()
    await asyncio.gather(*first)
    assert await caller.length("a") == 3
    assert backend.calls == before
    assert caller.metric('attnd_rejected_total{reason="cancelled"}') == 1


@fake_engine(late=True)
async def test_a_running_operation_that_is_cancelled_finishes_without_a_reply(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.create("a")
    backend.gate.clear()
    task = caller.start(decode("a", new=True))
    await until(lambda: backend.calls[-2:] == ["append", "attend"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    backend.gate.set()
    assert await caller.length("a") == 1


@fake_engine(late=True)
async def test_an_operation_whose_deadline_passed_before_its_turn_does_not_run(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=3, empty=0)
    first = await blocked(caller, backend)
    late = caller.attempt(append("a", 5), deadline_s=0.01)
    in_time = caller.start(append("a", 1), deadline_s=60.0)
    await until(lambda: caller.num_waiting == 3)
    await asyncio.sleep(0.03)
    backend.gate.set()
    await asyncio.gather(*first)
    refused = await late
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (504, "deadline_exceeded")
    assert (await in_time).fields == {"lengths": [4]}
    await until(lambda: caller.metric('attnd_rejected_total{reason="deadline_exceeded"}') == 1)


@fake_engine(late=True)
async def test_a_drain_answers_all_that_was_admitted_and_refuses_the_rest(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=3, empty=0)
    first = await blocked(caller, backend)
    waiting = [caller.start(decode("a", new=True)) for _ in range(5)]
    await until(lambda: caller.num_waiting == 6)
    caller.engine.drain()
    await until(lambda: caller.road.state.state == "draining")
    with pytest.raises(Refused, match="draining") as caught:
        await caller.submit(decode("a"))
    assert (caught.value.status, caught.value.code) == (503, "not_ready")
    backend.gate.set()
    replies = await asyncio.gather(*first, *waiting)
    assert len(replies) == 7
    await until(lambda: not caller.running.thread.is_alive())
    await until(lambda: bool(caller.road.lost))
    with pytest.raises(NotReady):
        await caller.submit(decode("a"))


@fake_engine(late=True, drain_timeout_s=0.05)
async def test_a_drain_that_takes_too_long_refuses_unfinished_operations(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=3, empty=0)
    first, barrier = await blocked(caller, backend)
    waiting = caller.attempt(append("a", 1))
    await until(lambda: caller.num_waiting == 2)
    caller.engine.drain()
    replies = await asyncio.gather(waiting, outcome(barrier), outcome(first))
    assert [code(one) for one in replies] == ["not_ready"] * 3
    assert "before the operation was done; nothing was changed" in str(replies[0])
    assert "mid-operation" in str(replies[2])


@fake_engine(late=True)
async def test_the_death_of_a_caller_takes_its_waiting_calls_out(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=3, empty=0)
    first = await blocked(caller, backend)
    async with caller.another() as other:
        doomed = [other.attempt(append("a", 2)) for _ in range(3)]
        await until(lambda: caller.num_waiting == 4)
    assert all(isinstance(reply, NotReady) for reply in await asyncio.gather(*doomed))
    await until(lambda: caller.num_waiting == 1)
    kept = caller.start(append("a", 1))
    await until(lambda: caller.num_waiting == 2)
    backend.gate.set()
    await asyncio.gather(*first)
    assert (await kept).fields == {"lengths": [4]}
    assert caller.metric('attnd_rejected_total{reason="cancelled"}') == 3


@fake_engine(max_sessions=2)
async def test_one_session_too_many_is_refused_with_a_reason_until_another_ends(
    caller: Caller,
) -> None:
    async with caller.another():
        hello = message(HELLO, Hello(VERSION, 4096, "third"))
        assert b"server.max_sessions" in reply_to(caller, hello)
    await until(lambda: len(caller.engine.callers.sessions) == 1)
    async with caller.another() as again:
        await again.pool()


@fake_engine(queue_depth=7)
async def test_info_has_the_geometry_and_the_backend(caller: Caller) -> None:
    info = (await caller.call("info")).fields
    replies = [info[name] for name in ("num_layers", "num_pages", "page_size", "backend")]
    assert replies == [2, 32, 4, "fake"]
    assert info["unsupported"] == ["nothing"]
    assert info["limits"]["queue_depth"] == 7
    line = f'attnd_build_info{{backend="fake",version="{__version__}"}}'
    assert caller.metric(line) == 1


@fake_engine(slice_ms=0.01)
async def test_a_session_that_does_not_read_its_answers_stalls_no_other(caller: Caller) -> None:
    await caller.create("a")
    async with caller.another() as silent:
        silent.road.loop.remove_reader(silent.road.sock)
        unknown = [f"{number:050d}" for number in range(4096)]  # the error lists them all
        ask = NewCall("gather", {"layer": 0, "sequences": unknown})
        asked = [silent.attempt(ask) for _ in range(16)]
        sessions = caller.engine.callers.sessions
        await until(lambda: any(must_wait_for(one) for one in sessions))
        async with asyncio.timeout(5):
            await asyncio.gather(*[caller.view("a") for _ in range(8)])
        assert caller.num_waiting > 0
        silent.road.loop.add_reader(silent.road.sock, silent.road.on_readable)
        assert [code(one) for one in await asyncio.gather(*asked)] == ["unknown_sequence"] * 16


def must_wait_for(session: Session) -> bool:
    return len(session.output.waiting) > session.output.limit * UNSENT_SHARE


@fake_engine(slice_ms=1.0, queue_depth=4096)
async def test_the_engine_does_not_rest_while_calls_wait_for_their_turns_alone(
    caller: Caller,
) -> None:
    await caller.create("a")
    engine, wait_s, rests = caller.engine, caller.engine.wait_s, []

    def watched() -> float:
        seconds = wait_s()
        if engine.scheduler.queue.count:
            rests.append(seconds)
        return seconds

    with no_turns(caller):
        tasks = [caller.attempt(get("a"), room=4096) for _ in range(1500)]
        await until(lambda: caller.num_waiting == len(tasks))
        setattr(engine, "wait_s", watched)  # noqa: B010
    assert {code(one) for one in await asyncio.gather(*tasks)} == {"ok"}
    assert rests.count(0.0) >= len(rests) - 1  # the first may be of the round without turns
    assert len(rests) > 1
