"""The asyncio caller: answers, problems, slots, cancelling, growth, the engine's states, and every
way in which a session ends."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from pathlib import Path

import pytest
from attnd.wire import frames as f
from caller_play import ARENA, Loops, ask, road_test, settled, until
from scripted_engine_end import ScriptedEnd, config, echo, listen_in

from service.errors import InvalidRequest, NotReady, Overloaded
from service.road.arena import Pinning
from service.road.caller_end import caller as caller_module
from service.road.caller_end.caller import RoadCaller
from service.road.caller_end.slots import ArenaFull
from service.road.engine_end.calls import Call, Cancel
from service.road.engine_end.listening import turn_away
from service.road.messages import State
from service.tenants import tenant_of


@road_test()
async def test_an_answer_comes_back_in_its_slot(caller: RoadCaller, engine: ScriptedEnd) -> None:
    assert caller.welcome.instance_id == "scripted"
    assert caller.state == State("ready")
    assert caller.slots.size == ARENA
    answered = await ask(caller, b"hello")
    assert (answered.status, bytes(answered.image), answered.needed) == (200, b"hello", 0)
    assert answered.stages == f.NO_STAGES


@road_test()
async def test_numbers_of_tenants_are_used_again_when_none_is_left(
    caller: RoadCaller, engine: ScriptedEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, most = list[bytes](), 9
    monkeypatch.setattr(caller, "send", sent.append)
    monkeypatch.setattr(caller_module, "MOST_TENANTS", most)
    tenants = [tenant_of(f"space-{number}", ["read"]) for number in range(most + 2)]
    numbers = [caller.number_of(tenant) for tenant in tenants]
    assert numbers == [*range(1, most + 1), 1, 2]
    assert [caller.number_of(tenants[number]) for number in (-1, 2, 0)] == [2, 3, 3]
    assert len(sent) == len(tenants) + 1


@road_test()
async def test_the_engine_learns_deadline_and_request_id(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    seen: list[tuple[float, bytes]] = []

    def note(event: Call | Cancel) -> None:
        assert isinstance(event, Call)
        seen.append((event.deadline_s, event.request_id))
        echo(event)

    engine.behave = note
    slot = caller.take(64)
    name = bytes(range(16))
    await caller.call(9, slot, 64, caller.take(64), deadline_us=2_000_000, request_id=name)
    await caller.call(9, slot, 64, caller.take(64), deadline_us=2**40)
    assert seen == [(2.0, name), (pytest.approx(4294.967295), bytes(16))]


@road_test(echo, config(max_calls=4096))
async def test_hundreds_of_calls_at_once_get_their_own_answers(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    waiting: list[Call] = []

    def shuffle(event: Call | Cancel) -> None:
        assert isinstance(event, Call)
        waiting.append(event)
        if len(waiting) == 250:
            random.Random(1).shuffle(waiting)
            while waiting:
                echo(waiting.pop())

    engine.behave = shuffle
    texts = [b"call %d" % i for i in range(500)]
    answers = await asyncio.gather(*(ask(caller, text) for text in texts))
    assert [bytes(answer.image) for answer in answers] == texts
    del answers
    assert await settled(caller) == ARENA and not caller.pending


@road_test()
async def test_a_problem_comes_inside_the_frame(caller: RoadCaller, engine: ScriptedEnd) -> None:
    def refuse(event: Call | Cancel) -> None:
        assert isinstance(event, Call)
        event.session.fail(event, InvalidRequest("layer", 9, "at most 3"), needed=4096)

    engine.behave = refuse
    answered = await ask(caller, b"hello")
    assert (answered.status, answered.needed) == (422, 4096)
    assert b"at most 3" in bytes(answered.image)


@road_test()
async def test_a_problem_larger_than_the_buffer_comes_whole(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    def refuse(event: Call | Cancel) -> None:
        assert isinstance(event, Call)
        event.session.fail(event, Overloaded("long", ids=["x" * 100] * 5000))

    engine.behave = refuse
    for _ in range(3):
        answered = await ask(caller, b"hello")
        assert answered.status == 429 and len(answered.image) > 500_000


@road_test(None)
async def test_slots_of_a_cancelled_call_stay_taken_until_its_answer(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    task = asyncio.create_task(ask(caller, b"x" * 1024))
    await until(lambda: len(engine.calls) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await until(lambda: len(engine.cancels) == 1)
    assert engine.cancels[0].call is engine.calls[0] and engine.calls[0].cancelled
    assert await settled(caller) == ARENA - 2048, "the engine may still write there"
    engine.do(lambda: echo(engine.calls.pop()))
    await until(lambda: not caller.pending)
    assert await settled(caller) == ARENA


@road_test(None)
async def test_freeing_a_slot_while_its_call_waits_frees_it_with_the_answer(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    request, answer = caller.take(64), caller.take(64)
    task = asyncio.create_task(caller.call(9, request, 64, answer))
    await until(lambda: len(engine.calls) == 1)
    request.free()
    answer.free()
    assert caller.slots.free() == ARENA - 128
    engine.do(lambda: echo(engine.calls.pop()))
    await task
    assert caller.slots.free() == ARENA


@road_test()
async def test_an_answer_that_is_still_read_keeps_its_slot(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    image: memoryview | None = (await ask(caller, b"keep me")).image
    assert await settled(caller) == ARENA - 64
    for _ in range(100):
        await ask(caller, b"another")
    assert image is not None and bytes(image) == b"keep me"
    image = None
    assert await settled(caller) == ARENA


@road_test()
async def test_a_full_arena_says_so_and_grows(caller: RoadCaller, engine: ScriptedEnd) -> None:
    first = caller.take(ARENA)
    first.array[:] = 7
    with pytest.raises(ArenaFull):
        caller.take(1)
    sizes = await asyncio.gather(caller.grow(2 * ARENA), caller.grow(4 * ARENA))
    assert list(sizes) == [2 * ARENA, 4 * ARENA]
    assert bytes((await ask(caller, b"x" * ARENA)).image) == b"x" * ARENA
    assert (first.array == 7).all()
    assert await caller.grow(2**30) == 2**20


@road_test(None, config(pinning=Pinning(lambda _: True, lambda _: None)))
async def test_who_gives_up_on_growing_leaves_the_session_sound(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    assert caller.pinned_bytes == ARENA
    task = asyncio.create_task(ask(caller, b"in the way"))
    await until(lambda: len(engine.calls) == 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(caller.grow(2 * ARENA), 0.01)
    engine.do(lambda: echo(engine.calls.pop()))
    assert await caller.grow(3 * ARENA) == 3 * ARENA
    assert caller.slots.size == 3 * ARENA and caller.pinned_bytes == 3 * ARENA
    assert bytes((await task).image) == b"in the way"


@road_test(echo, config(max_calls=4096))
async def test_more_frames_than_the_socket_takes_are_sent_as_it_empties(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    caller.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    slot, place = caller.take(64), caller.take(64)
    answers = await asyncio.gather(*(caller.call(9, slot, 8, place) for _ in range(3000)))
    assert {answer.status for answer in answers} == {200}
    assert not caller.is_writing


@road_test(None)
async def test_when_the_engine_ends_all_pending_calls_fail_and_the_loss_is_reported(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    reply: list[str] = []
    caller.on_lost = reply.append
    tasks = [asyncio.create_task(ask(caller, b"lost")) for _ in range(3)]
    await until(lambda: len(engine.calls) == 3)
    engine.do(lambda: setattr(engine, "stopping", True))
    for task in tasks:
        with pytest.raises(NotReady, match="the engine closed the connection"):
            await task
    assert reply == ["the engine closed the connection"]
    assert caller.state == State("lost", reply[0])
    for action in (lambda: caller.take(1), lambda: caller.send(b"")):
        with pytest.raises(NotReady):
            action()
    with pytest.raises(NotReady):
        await caller.grow(2**17)


@road_test()
async def test_states_are_reported_as_they_arrive(caller: RoadCaller, engine: ScriptedEnd) -> None:
    reply: list[State] = []
    caller.on_state = reply.append
    (session,) = engine.sessions.values()
    engine.do(lambda: session.send_state(State("draining", "SIGTERM")))
    await until(lambda: bool(reply))
    assert reply == [State("draining", "SIGTERM")] and caller.state == reply[0]


@pytest.mark.parametrize(
    "frame",
    [
        f.frame(99, b""),
        f.frame(f.ANSWER, f.ANSWER_PAYLOAD.pack(999, 200, 0, 0, 0, 0, *f.NO_STAGES)),
        f.frame(f.ANSWER, f.ANSWER_PAYLOAD.pack(1, 200, 0, 0, 65, 0, *f.NO_STAGES)),
        f.frame(f.STATE, b"[]"),
        f.frame(f.WELCOME, b"{}"),
    ],
    ids=["kind", "unknown call", "too long", "no object", "second welcome"],
)
@road_test()
async def test_an_engine_that_breaks_the_protocol_is_left(
    caller: RoadCaller, engine: ScriptedEnd, frame: bytes
) -> None:
    def break_it(event: Call | Cancel) -> None:
        if isinstance(event, Call):
            event.session.send(frame)

    engine.behave = break_it
    with pytest.raises(NotReady, match="the engine sent an invalid frame"):
        await ask(caller, b"hello")


def test_who_is_refused_learns_why_and_keeps_nothing_open(loops: Loops, tmp_path: Path) -> None:
    async def main(path: Path, listener: socket.socket) -> None:
        before = len(os.listdir("/proc/self/fd"))
        connecting = asyncio.create_task(RoadCaller.connect(str(path), ARENA))
        listener.setblocking(False)
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        turn_away(sock, Overloaded("256 sessions are open", retry_after_s=1.0))
        with pytest.raises(NotReady, match="refused the session: 256 sessions are open"):
            await connecting
        assert len(os.listdir("/proc/self/fd")) <= before

    with listen_in(tmp_path) as (path, listener), asyncio.Runner(loop_factory=loops) as runner:
        runner.run(main(path, listener))


def test_without_a_listener_connecting_fails(loops: Loops, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=loops) as runner, pytest.raises(FileNotFoundError):
        runner.run(RoadCaller.connect(str(tmp_path / "none.sock"), ARENA))
