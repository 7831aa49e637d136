"""The road over TCP: authentication, images after their frames, and broken sessions."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from attnd.wire import frames as f
from caller_play import road_test, until
from scripted_engine_end import SECRET, ScriptedEnd, config, echo, scripted_end

from service.errors import NotReady
from service.road.caller_end.caller import RoadCaller
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import Call, Cancel
from service.road.tcp import host_and_port, proof

RULES = config(max_arena_bytes=2**22, admission=Admission(None, SECRET))


@pytest.mark.parametrize("length", [1, 64, 60_000, 66_000, 2**20, 3 * 2**20 // 2])
@road_test(echo, RULES, is_remote=True)
async def test_images_cross_whole_in_both_directions(
    caller: RoadCaller, engine: ScriptedEnd, length: int
) -> None:
    assert caller.welcome.instance_id == "scripted"
    if length > 2**14:
        assert await caller.grow(2**22) == 2**22
    sent = [os.urandom(length) for _ in range(3 if length < 2**20 else 1)]

    async def one(data: bytes) -> bytes:
        request, answer = caller.take(length), caller.take(length)
        request.view(length)[:] = data
        answered = await caller.call(9, request, length, answer)
        assert answered.status == 200
        return bytes(answered.image)

    assert await asyncio.gather(*map(one, sent)) == sent


def echo_whole(event: Call | Cancel) -> None:
    """Fails where the answer's place is too small."""
    assert isinstance(event, Call)
    if len(event.request) > len(event.answer):
        event.session.fail(event, NotReady("no room"), needed=len(event.request))
    else:
        echo(event)


@road_test(echo_whole, RULES, is_remote=True)
async def test_an_error_comes_in_its_frame_and_the_session_continues(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    request, small, large = caller.take(1000), caller.take(64), caller.take(1000)
    answered = await caller.call(9, request, 1000, small)
    assert (answered.status, answered.needed) == (503, 1000)
    refused = await caller.call(99, request, 1000, large)
    assert refused.status == 404, "a route that is not there; its image is passed over"
    assert (await caller.call(9, request, 1000, large)).status == 200


@pytest.mark.parametrize("secret", ["", "t" * 32])
def test_who_does_not_know_the_secret_is_refused(tmp_path: Path, secret: str) -> None:
    with scripted_end(tmp_path, echo, RULES, is_remote=True) as engine:
        with pytest.raises(NotReady, match="refused"):
            asyncio.run(RoadCaller.connect(engine.path, 2**16, name="x", secret=secret))
        assert not any(session.greeted for session in engine.sessions.values())


def test_the_secret_itself_is_never_sent(tmp_path: Path) -> None:
    with (
        scripted_end(tmp_path, echo, RULES, is_remote=True) as engine,
        socket.create_connection(host_and_port(engine.path)) as peer,
    ):
        frame = peer.recv(2**16)
        assert f.HEADER.unpack_from(frame)[0] == f.CHALLENGE and SECRET.encode() not in frame
        assert proof(SECRET, "a") != proof(SECRET, "b") != SECRET


@road_test(None, RULES, is_remote=True)
async def test_calls_that_wait_fail_when_the_engine_leaves_in_the_middle_of_an_image(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    await caller.grow(2**20)
    leaves = threading.Event()
    engine.do(lambda: leaves.wait() and None)
    waiting = asyncio.ensure_future(caller.call(9, caller.take(2**18), 2**18, caller.take(2**18)))
    await asyncio.sleep(0)
    engine.stopping = True
    leaves.set()
    with pytest.raises(NotReady):
        await waiting
    assert caller.lost


@road_test(echo, RULES, is_remote=True)
async def test_a_step_is_for_callers_on_the_same_host(
    caller: RoadCaller, engine: ScriptedEnd
) -> None:
    caller.send(f.frame(f.DEVICE, b'{"arena_bytes":4096}'))
    await until(lambda: bool(caller.lost))
    assert "same host" in caller.lost


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
    assert "proof" in str(error) or "the secret of another cluster" in str(error)
    assert SECRET.encode() not in sent


@pytest.mark.parametrize("nonce", ["engine " + "0" * 64, "0" * 63, "", 7, "G" * 64])
def test_a_door_proves_nothing_for_a_nonce_that_might_be_its_own(nonce: object) -> None:
    challenge = f.frame(f.CHALLENGE, json.dumps({"nonce": nonce}).encode())
    error, sent = asyncio.run(met_by(challenge, b""))
    assert "nonce in CHALLENGE" in str(error) and not sent
