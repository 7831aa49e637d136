"""The asyncio caller: the engine's states, and every way in which a session ends."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from attnd.wire import frames as f
from caller_play import ARENA, Loops, ask, play, until
from scripted_engine_end import listen_in, scripted_end

from service.errors import NotReady, Overloaded
from service.road.caller_end.caller import RoadCaller
from service.road.engine_end.calls import Call, Cancel
from service.road.engine_end.listening import turn_away
from service.road.messages import State


def test_when_the_engine_ends_all_pending_calls_fail_and_the_loss_is_reported(
    loops: Loops, tmp_path: Path
) -> None:
    reply: list[str] = []
    calls: list[Call] = []

    async def test(caller: RoadCaller) -> None:
        caller.on_lost = reply.append
        tasks = [asyncio.create_task(ask(caller, b"lost")) for _ in range(3)]
        await until(lambda: len(calls) == 3)
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

    with scripted_end(tmp_path, calls.append) as engine:  # type: ignore[arg-type]
        play(loops, engine, test)


def test_states_are_reported_as_they_arrive(loops: Loops, tmp_path: Path) -> None:
    async def test(caller: RoadCaller) -> None:
        reply: list[State] = []
        caller.on_state = reply.append
        (session,) = engine.sessions.values()
        engine.do(lambda: session.send_state(State("draining", "SIGTERM")))
        await until(lambda: bool(reply))
        assert reply == [State("draining", "SIGTERM")] and caller.state == reply[0]

    with scripted_end(tmp_path) as engine:
        play(loops, engine, test)


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
def test_an_engine_that_breaks_the_protocol_is_left(
    loops: Loops, tmp_path: Path, frame: bytes
) -> None:
    async def test(caller: RoadCaller) -> None:
        with pytest.raises(NotReady, match="the engine sent an invalid frame"):
            await ask(caller, b"hello")

    def break_it(event: Call | Cancel) -> None:
        if isinstance(event, Call):
            event.session.send(frame)

    with scripted_end(tmp_path, break_it) as engine:
        play(loops, engine, test)


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
