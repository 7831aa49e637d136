"""The road over TCP: authentication, images after their frames, and broken sessions."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from attnd.wire import frames as f

from service.errors import NotReady
from service.road.caller_end.caller import RoadCaller
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import Call, SessionConfig
from service.road.engine_end.session import Session
from service.road.messages import State
from service.road.tcp import host_and_port, proof

SECRET = "s" * 32
CONFIG = SessionConfig(
    instance_id="there",
    routes={"echo": 1},
    limits={},
    max_arena_bytes=2**22,
    default_deadline_s=5.0,
    admission=Admission(None, SECRET),
)


class Echo:
    """An engine that answers every call with its own request, on the test's loop."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.listener, self.accept)
        self.sessions: list[Session] = []

    @property
    def address(self) -> str:
        return f"tcp:127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self) -> None:
        sock, _ = self.listener.accept()
        session = Session(sock, 1, CONFIG, State("ready"), is_remote=True)
        self.sessions.append(session)
        self.loop.add_reader(sock, self.ready, session)
        self.loop.add_writer(sock, session.flush)

    def ready(self, session: Session) -> None:
        for event in session.read():
            assert isinstance(event, Call)
            length = len(event.request)
            if length > len(event.answer):
                session.fail(event, NotReady("no room"), needed=length)
                continue
            event.answer[:length] = event.request
            session.answer(event, 200, length, f.NO_STAGES)
        if session.ended:
            self.leave(session)

    def leave(self, session: Session) -> None:
        self.loop.remove_reader(session.sock)
        self.loop.remove_writer(session.sock)
        session.close()
        self.sessions.remove(session)

    def close(self) -> None:
        for session in list(self.sessions):
            self.leave(session)
        self.loop.remove_reader(self.listener)
        self.listener.close()


def run(test: Callable[[Echo], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        echo = Echo()
        try:
            async with asyncio.timeout(30):
                await test(echo)
        finally:
            echo.close()

    asyncio.run(main())


@pytest.mark.parametrize("length", [1, 64, 60_000, 66_000, 2**20, 3 * 2**20 // 2])
def test_images_cross_whole_in_both_directions(length: int) -> None:
    async def check(echo: Echo) -> None:
        caller = await RoadCaller.connect(echo.address, 2**16, name="door", secret=SECRET)
        assert caller.welcome.instance_id == "there"
        if length > 2**14:
            assert await caller.grow(2**22) == 2**22
        sent = [os.urandom(length) for _ in range(3 if length < 2**20 else 1)]

        async def one(data: bytes) -> bytes:
            request, answer = caller.take(length), caller.take(length)
            request.view(length)[:] = data
            answered = await caller.call(1, request, length, answer)
            assert answered.status == 200
            return bytes(answered.image)

        assert await asyncio.gather(*map(one, sent)) == sent
        caller.close()

    run(check)


def test_an_error_comes_in_its_frame_and_the_session_continues() -> None:
    async def check(echo: Echo) -> None:
        caller = await RoadCaller.connect(echo.address, 2**16, name="door", secret=SECRET)
        request, small, large = caller.take(1000), caller.take(64), caller.take(1000)
        answered = await caller.call(1, request, 1000, small)
        assert (answered.status, answered.needed) == (503, 1000)
        refused = await caller.call(9, request, 1000, large)
        assert refused.status == 404, "a route that is not there; its image is passed over"
        assert (await caller.call(1, request, 1000, large)).status == 200
        caller.close()

    run(check)


@pytest.mark.parametrize("secret", ["", "t" * 32])
def test_who_does_not_know_the_secret_is_refused(secret: str) -> None:
    async def check(echo: Echo) -> None:
        with pytest.raises(NotReady, match="refused"):
            await RoadCaller.connect(echo.address, 2**16, name="x", secret=secret)
        assert not any(session.greeted for session in echo.sessions)

    run(check)


def test_the_secret_itself_is_never_sent() -> None:
    async def check(echo: Echo) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(echo.address[14:]))
        frame = await reader.readexactly(f.HEADER_BYTES)
        assert f.HEADER.unpack(frame)[0] == f.CHALLENGE
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        assert proof(SECRET, "a") != proof(SECRET, "b") != SECRET

    run(check)


def test_calls_that_wait_fail_when_the_engine_leaves_in_the_middle_of_an_image() -> None:
    async def check(echo: Echo) -> None:
        caller = await RoadCaller.connect(echo.address, 2**20, name="door", secret=SECRET)
        request, answer = caller.take(2**18), caller.take(2**18)
        waiting = asyncio.ensure_future(caller.call(1, request, 2**18, answer))
        await asyncio.sleep(0)
        echo.leave(echo.sessions[0])
        with pytest.raises(NotReady):
            await waiting
        assert caller.lost
        del request, answer

    run(check)


def test_a_step_is_for_callers_on_the_same_host() -> None:
    async def check(echo: Echo) -> None:
        caller = await RoadCaller.connect(echo.address, 2**16, name="door", secret=SECRET)
        caller.send(f.frame(f.DEVICE, b'{"arena_bytes":4096}'))
        while not caller.lost:
            await asyncio.sleep(0.001)
        assert "same host" in caller.lost

    run(check)


@pytest.mark.parametrize(
    ("address", "found"),
    [("tcp:10.0.0.2:9080", ("10.0.0.2", 9080)), ("tcp:[::1]:9080", ("::1", 9080))],
)
def test_addresses_are_read(address: str, found: tuple[str, int]) -> None:
    assert host_and_port(address) == found


async def met_by(challenge: bytes, welcome: bytes) -> tuple[BaseException, bytes]:
    """A door's error for an engine with these replies, and the bytes that the door sent."""
    sent = bytearray()

    async def rogue(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(challenge)
        with suppress(ConnectionError):
            sent.extend(await reader.read(2**16))
            writer.write(welcome)
            sent.extend(await reader.read(2**16))
        writer.close()

    server = await asyncio.start_server(rogue, "127.0.0.1", 0)
    address = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        await RoadCaller.connect(address, 2**16, name="door", secret=SECRET)
    except (NotReady, f.FrameError) as error:
        await asyncio.sleep(0.05)
        return error, bytes(sent)
    finally:
        server.close()
    raise AssertionError("the door talks to an engine that does not know the secret")


@pytest.mark.parametrize("shown", [None, "", "é" * 64, "0" * 64, proof(SECRET, "0" * 64)])
def test_a_door_does_not_talk_to_an_engine_that_does_not_know_the_secret(shown: str | None) -> None:
    welcome = {
        "version": 1,
        "session": 1,
        "instance_id": "x",
        "arena_bytes": 2**16,
        "max_arena_bytes": 2**16,
        "pinned_bytes": 0,
        "routes": {},
        "limits": {},
        "state": "ready",
        "reason": "",
    }
    if shown is not None:
        welcome["proof"] = shown
    challenge = f.frame(f.CHALLENGE, json.dumps({"nonce": "0" * 64}).encode())
    answer = f.frame(f.WELCOME, json.dumps(welcome).encode())
    error, sent = asyncio.run(met_by(challenge, answer))
    assert "proof" in str(error) or "does not know the secret" in str(error)
    assert SECRET.encode() not in sent


@pytest.mark.parametrize("nonce", ["engine " + "0" * 64, "0" * 63, "", 7, "G" * 64])
def test_a_door_proves_nothing_for_a_nonce_that_might_be_its_own(nonce: object) -> None:
    challenge = f.frame(f.CHALLENGE, json.dumps({"nonce": nonce}).encode())
    error, sent = asyncio.run(met_by(challenge, b""))
    assert "nonce in CHALLENGE" in str(error) and not sent
