"""The arena that a door brings: one for several engines, whose slots are free when no engine may
touch them any more."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from attnd.wire import frames as f
from attnd.wire.frames import VERSION
from caller_play import Loops, ask, road_test, settled, until
from plain_caller import PlainCaller
from scripted_engine_end import SECRET, ScriptedEnd, config, echo, scripted_end

from service.errors import NotReady
from service.road.arena import PAGE, anonymous_file, seal
from service.road.caller_end.caller import RoadCaller
from service.road.caller_end.slots import Mapping, OwnArena
from service.road.engine_end.admission import Admission
from service.road.engine_end.session import Session
from service.road.messages import Hello, State, message

RULES = config(admission=Admission(None, SECRET))
SIZE = 2**16


@pytest.fixture
def own() -> Iterator[OwnArena]:
    fd, sealable = anonymous_file()
    os.ftruncate(fd, SIZE)
    if sealable:
        seal(fd)
    arena = OwnArena(Mapping(fd, SIZE))
    yield arena
    arena.close()


def test_engines_read_and_write_the_one_arena_of_their_door(
    loops: Loops, tmp_path: Path, own: OwnArena
) -> None:
    async def main(engines: list[ScriptedEnd]) -> None:
        door: dict[str, Any] = {"name": "door", "secret": SECRET, "own": own}
        first, second = [await RoadCaller.connect(one.path, SIZE, **door) for one in engines]
        assert first.reach == second.reach == SIZE
        request, answer = own.slots.take(5), own.slots.take(5)
        request.view(5)[:] = b"hello"
        reply = await first.call(9, request, 5, answer)
        assert bytes(reply.image) == bytes(answer.view(5)) == b"hello"
        again = own.slots.take(5)
        assert bytes((await second.call(9, answer, 5, again)).image) == b"hello"
        for caller in (first, second):
            caller.close()
        assert own.mapping.size, "the arena outlives its sessions"

    with ExitStack() as stack, asyncio.Runner(loop_factory=loops) as runner:
        engines = [stack.enter_context(scripted_end(tmp_path / n, echo, RULES)) for n in "ab"]
        runner.run(asyncio.wait_for(main(engines), 20))


@road_test(echo, RULES)
async def test_a_grown_arena_is_reachable_after_a_grow(
    caller: RoadCaller, engine: ScriptedEnd, own: OwnArena
) -> None:
    os.ftruncate(own.mapping.fd, 4 * SIZE)
    own.mapping.grow(4 * SIZE)
    own.slots.grow(4 * SIZE)
    request, answer = own.slots.take(2 * SIZE), own.slots.take(64)
    request.view(5)[:] = b"hello"
    refused = await caller.call(9, request, 5, answer)
    assert refused.status == 422, "it does not reach there yet"
    assert await caller.grow(2**24) == caller.reach == 4 * SIZE
    assert bytes((await caller.call(9, request, 5, answer)).image) == b"hello"


@road_test(None, RULES)
async def test_slots_of_a_session_that_was_given_up_are_free_when_its_engine_is_done(
    caller: RoadCaller, engine: ScriptedEnd, own: OwnArena
) -> None:
    free = own.slots.free()
    asked = asyncio.create_task(ask(caller, b"hello"))
    await until(lambda: len(engine.calls) == 1)
    caller.close()
    with pytest.raises(NotReady):
        await asked
    del asked
    await asyncio.sleep(0.05)
    assert await settled(caller) < free, "the engine may still write the answer"
    assert own.leaving
    engine.do(lambda: echo(engine.calls.pop()))
    await until(lambda: not own.leaving)
    assert await settled(caller) == free


@road_test(None, RULES)
async def test_slots_of_an_engine_that_died_are_free(
    caller: RoadCaller, engine: ScriptedEnd, own: OwnArena
) -> None:
    free = own.slots.free()
    (session,) = engine.sessions.values()
    asked = asyncio.create_task(ask(caller, b"hello"))
    await until(lambda: bool(session.live))
    engine.do(lambda: session.sock.shutdown(socket.SHUT_RDWR))  # as the system does
    with pytest.raises(NotReady, match="the engine closed the connection"):
        await asked
    del asked
    await until(lambda: not own.leaving)
    assert await settled(caller) == free
    engine.do(lambda: session.done(session.live[1]))  # it has not died here: let it go


def greeted(own_fd: int | None, **how: Any) -> tuple[int, Any]:
    """The engine's reply to a HELLO with an arena, with these values and this descriptor."""
    reply: dict[str, Any] = {"door": True, "secret": SECRET, "brings_arena": True} | how
    data = message(f.HELLO, Hello(VERSION, SIZE, "door", **reply))
    ours, theirs = socket.socketpair()
    with ours:
        session = Session(theirs, 1, RULES, State("ready"))
        if own_fd is None:
            ours.sendall(data)
        else:
            socket.send_fds(ours, [data], [own_fd])
        session.read()
        caller = PlainCaller(ours)
        answer = caller.one()
        assert not caller.descriptors, "the door's own arena is not sent back"
        session.close()
    return answer


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "it could shrink: seal it"),
        ({"door": False, "secret": ""}, "from a caller that is no door"),
        ({"secret": "wrong"}, "only processes that the service has started"),
    ],
)
def test_an_arena_that_may_not_be_brought_is_refused_and_closed(
    how: dict[str, Any], words: str
) -> None:
    fd, sealable = anonymous_file()
    if not sealable:
        pytest.skip("this system seals no files")
    os.ftruncate(fd, SIZE)
    before = num_descriptors()
    kind, problem = greeted(fd, **how)
    assert kind == f.REFUSED
    assert words in problem["detail"]
    assert num_descriptors() == before
    os.close(fd)


def test_a_descriptor_that_is_not_an_arena_is_refused_and_closed() -> None:
    with open(os.devnull, "rb") as null:
        before = num_descriptors()
        kind, problem = greeted(null.fileno())
        assert kind == f.REFUSED, problem
        kind, problem = greeted(None)
        assert (kind, "send it with HELLO" in problem["detail"]) == (f.REFUSED, True)
        assert num_descriptors() == before


def test_an_unexpected_descriptor_is_closed() -> None:
    with open(os.devnull, "rb") as null:
        before = num_descriptors()
        ours, theirs = socket.socketpair()
        with ours:
            session = Session(theirs, 1, RULES, State("ready"))
            for byte in (b"\x10", b"\0"):
                socket.send_fds(ours, [byte], [null.fileno()])
                session.read()
            session.close()
        assert num_descriptors() == before


def test_a_brought_arena_is_at_least_a_page_and_no_more_than_the_engine_takes(
    own: OwnArena,
) -> None:
    os.ftruncate(own.mapping.fd, RULES.max_arena_bytes + 5 * PAGE)
    kind, welcome = greeted(own.mapping.fd)
    assert (kind, welcome["arena_bytes"]) == (f.WELCOME, RULES.max_arena_bytes)
