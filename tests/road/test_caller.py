"""The asyncio caller: answers, problems, slots, cancelling, and growth."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path

import pytest
from attnd.wire import frames as f
from caller_play import ARENA, Loops, ask, play, settled, until
from scripted_engine_end import config, echo, scripted_end

from service.errors import InvalidRequest, Overloaded
from service.road.arena import Pinning
from service.road.caller_end.caller import RoadCaller
from service.road.caller_end.slots import ArenaFull
from service.road.engine_end.calls import Call, Cancel
from service.road.messages import State


def test_an_answer_comes_back_in_its_slot(loops: Loops, tmp_path: Path) -> None:
    async def test(caller: RoadCaller) -> None:
        assert caller.welcome.instance_id == "scripted"
        assert caller.state == State("ready")
        assert caller.slots.size == ARENA
        answered = await ask(caller, b"hello")
        assert (answered.status, bytes(answered.image), answered.needed) == (200, b"hello", 0)
        assert answered.stages == f.NO_STAGES

    with scripted_end(tmp_path) as engine:
        play(loops, engine, test)


def test_the_engine_learns_deadline_and_request_id(loops: Loops, tmp_path: Path) -> None:
    seen: list[tuple[float, bytes]] = []

    def note(event: Call | Cancel) -> None:
        assert isinstance(event, Call)
        seen.append((event.deadline_s, event.request_id))
        echo(event)

    async def test(caller: RoadCaller) -> None:
        slot = caller.take(64)
        name = bytes(range(16))
        await caller.call(9, slot, 64, caller.take(64), deadline_us=2_000_000, request_id=name)
        await caller.call(9, slot, 64, caller.take(64), deadline_us=2**40)
        assert seen == [(2.0, name), (pytest.approx(4294.967295), bytes(16))]

    with scripted_end(tmp_path, note) as engine:
        play(loops, engine, test)


def test_hundreds_of_calls_at_once_get_their_own_answers(loops: Loops, tmp_path: Path) -> None:
    waiting: list[Call] = []

    def shuffle(event: Call | Cancel) -> None:
        assert isinstance(event, Call)
        waiting.append(event)
        if len(waiting) == 250:
            random.Random(1).shuffle(waiting)
            while waiting:
                echo(waiting.pop())

    async def test(caller: RoadCaller) -> None:
        texts = [b"call %d" % i for i in range(500)]
        answers = await asyncio.gather(*(ask(caller, text) for text in texts))
        assert [bytes(answer.image) for answer in answers] == texts
        del answers
        assert await settled(caller) == ARENA and not caller.pending

    with scripted_end(tmp_path, shuffle, config(max_calls=4096)) as engine:
        play(loops, engine, test)


def test_a_problem_comes_inside_the_frame(loops: Loops, tmp_path: Path) -> None:
    def refuse(event: Call | Cancel) -> None:
        assert isinstance(event, Call)
        event.session.fail(event, InvalidRequest("layer", 9, "at most 3"), needed=4096)

    async def test(caller: RoadCaller) -> None:
        answered = await ask(caller, b"hello")
        assert (answered.status, answered.needed) == (422, 4096)
        assert b"at most 3" in bytes(answered.image)

    with scripted_end(tmp_path, refuse) as engine:
        play(loops, engine, test)


def test_a_problem_larger_than_the_buffer_comes_whole(loops: Loops, tmp_path: Path) -> None:
    def refuse(event: Call | Cancel) -> None:
        assert isinstance(event, Call)
        event.session.fail(event, Overloaded("long", ids=["x" * 100] * 5000))

    async def test(caller: RoadCaller) -> None:
        for _ in range(3):
            answered = await ask(caller, b"hello")
            assert answered.status == 429 and len(answered.image) > 500_000

    with scripted_end(tmp_path, refuse) as engine:
        play(loops, engine, test)


def test_slots_of_a_cancelled_call_stay_taken_until_its_answer(
    loops: Loops, tmp_path: Path
) -> None:
    calls: list[Call] = []
    cancels: list[Cancel] = []

    def keep(event: Call | Cancel) -> None:
        (calls if isinstance(event, Call) else cancels).append(event)  # type: ignore[arg-type]

    async def test(caller: RoadCaller) -> None:
        task = asyncio.create_task(ask(caller, b"x" * 1024))
        await until(lambda: len(calls) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await until(lambda: len(cancels) == 1)
        assert cancels[0].call is calls[0] and calls[0].cancelled
        assert await settled(caller) == ARENA - 2048, "the engine may still write there"
        engine.do(lambda: echo(calls.pop()))
        await until(lambda: not caller.pending)
        assert await settled(caller) == ARENA

    with scripted_end(tmp_path, keep) as engine:
        play(loops, engine, test)


def test_freeing_a_slot_while_its_call_waits_frees_it_with_the_answer(
    loops: Loops, tmp_path: Path
) -> None:
    calls: list[Call] = []

    async def test(caller: RoadCaller) -> None:
        request, answer = caller.take(64), caller.take(64)
        task = asyncio.create_task(caller.call(9, request, 64, answer))
        await until(lambda: len(calls) == 1)
        request.free()
        answer.free()
        assert caller.slots.free() == ARENA - 128
        engine.do(lambda: echo(calls.pop()))
        await task
        assert caller.slots.free() == ARENA

    with scripted_end(tmp_path, calls.append) as engine:  # type: ignore[arg-type]
        play(loops, engine, test)


def test_an_answer_that_is_still_read_keeps_its_slot(loops: Loops, tmp_path: Path) -> None:
    async def test(caller: RoadCaller) -> None:
        image: memoryview | None = (await ask(caller, b"keep me")).image
        assert await settled(caller) == ARENA - 64
        for _ in range(100):
            await ask(caller, b"another")
        assert image is not None and bytes(image) == b"keep me"
        image = None
        assert await settled(caller) == ARENA

    with scripted_end(tmp_path) as engine:
        play(loops, engine, test)


def test_a_full_arena_says_so_and_grows(loops: Loops, tmp_path: Path) -> None:
    async def test(caller: RoadCaller) -> None:
        first = caller.take(ARENA)
        first.array[:] = 7
        with pytest.raises(ArenaFull):
            caller.take(1)
        sizes = await asyncio.gather(caller.grow(2 * ARENA), caller.grow(4 * ARENA))
        assert list(sizes) == [2 * ARENA, 4 * ARENA]
        assert bytes((await ask(caller, b"x" * ARENA)).image) == b"x" * ARENA
        assert (first.array == 7).all()
        assert await caller.grow(2**30) == 2**20

    with scripted_end(tmp_path) as engine:
        play(loops, engine, test)


def test_who_gives_up_on_growing_leaves_the_session_sound(loops: Loops, tmp_path: Path) -> None:
    calls: list[Call] = []

    async def test(caller: RoadCaller) -> None:
        assert caller.pinned_bytes == ARENA
        task = asyncio.create_task(ask(caller, b"in the way"))
        await until(lambda: len(calls) == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(caller.grow(2 * ARENA), 0.01)
        engine.do(lambda: echo(calls.pop()))
        assert await caller.grow(3 * ARENA) == 3 * ARENA
        assert caller.slots.size == 3 * ARENA and caller.pinned_bytes == 3 * ARENA
        assert bytes((await task).image) == b"in the way"

    rules = config(pinning=Pinning(lambda _: True, lambda _: None))
    with scripted_end(tmp_path, calls.append, rules) as engine:  # type: ignore[arg-type]
        play(loops, engine, test)


def test_more_frames_than_the_socket_takes_are_sent_as_it_empties(
    loops: Loops, tmp_path: Path
) -> None:
    async def test(caller: RoadCaller) -> None:
        caller.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        slot, place = caller.take(64), caller.take(64)
        answers = await asyncio.gather(*(caller.call(9, slot, 8, place) for _ in range(3000)))
        assert {answer.status for answer in answers} == {200}
        assert not caller.is_writing

    with scripted_end(tmp_path, echo, config(max_calls=4096)) as engine:
        play(loops, engine, test)
