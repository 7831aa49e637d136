"""The transports against a server that cuts, delays and ends its bytes as the tests say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attnd
import numpy as np
import pytest
from attnd import AsyncClient, Client, Retries
from attnd.http import async_transport as awaiting
from attnd.http import blocking_transport as blocking
from attnd.http.responses import ResponseReader
from scripted_server import BODY, HEAD, WHOLE, Peer, ScriptedServer, answer_of, answering, once

from tests.client.client_stub import SEQUENCE, Kind, client_of

LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
END = b"\r\n0\r\n\r\n"
OLD = b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n"


def ask(
    kind: Kind,
    server: ScriptedServer | str,
    *steps: Callable[[Any], Any],
    timeout: float = 10.0,
    retries: int = 0,
    uds: str | None = None,
) -> list[Any]:
    """Make calls one after the other with one client of that kind; what each gives."""
    url = server if isinstance(server, str) else server.url
    retry = Retries(retries, 0.001)
    with client_of(kind, url, timeout=timeout, retries=retry, uds=uds) as client:
        return [step(client) for step in steps]


@contextmanager
def stalling(script: Callable[[Peer], Any]) -> Iterator[ScriptedServer]:
    """A server whose connections stay open and silent once the script has run."""
    done = threading.Event()

    def stall(peer: Peer) -> None:
        script(peer)
        done.wait(10)

    with ScriptedServer(stall) as server:
        yield server
        done.set()


def get(client: Any) -> Any:
    return client.get_sequence("a")


def append(client: Any) -> Any:
    k = np.zeros((4, 1, 8), np.float32)
    return client.append(0, ["a"], k, k, append_indptr=[0, 4])


def append_much(client: Any) -> Any:
    k = np.zeros((1 << 12, 8, 64), np.float32)
    return client.append(0, ["a"], k, k, append_indptr=[0, 1 << 12])


def test_calls_one_after_the_other_share_a_connection(kind: Kind) -> None:
    with ScriptedServer(answering(WHOLE)) as server:
        view = [lambda client: get(client.with_options(deadline=5))]
        assert [found.id for found in ask(kind, server, *[get] * 9, *view)] == ["a"] * 10
        assert len(server.peers) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_fork_uses_no_connection_of_its_parent() -> None:
    with ScriptedServer(answering(WHOLE)) as server, Client(server.url) as client:
        get(client)
        child = os.fork()
        if child == 0:
            try:
                os._exit(get(client).id != "a")
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        get(client)
        assert len(server.peers) == 2


def test_thousands_of_interim_answers_are_passed_over() -> None:
    reader, response = ResponseReader(), None
    left = b"HTTP/1.1 103 Early Hints\r\nx: " + b"y" * 40_000 + b"\r\n\r\n"
    left += b"HTTP/1.1 100 Continue\r\n\r\n" * 2500 + WHOLE
    while left:
        room = reader.buffer()
        count = min(len(room), len(left))
        room[:count], left = left[:count], left[count:]
        response = reader.received(count)
    assert response is not None and response.content.tobytes() == BODY


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + LENGTH + b"\r\n" + BODY,),
        (HEAD, LENGTH, b"\r", b"\n", BODY[:5], BODY[5:]),
        tuple(bytes([byte]) for byte in WHOLE),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE,),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", WHOLE),
        (
            CHUNKED + b"5\r\n" + BODY[:5] + b"\r\n",
            b"%x\r\n" % (len(BODY) - 5),
            BODY[5:],
            b"\r\n0\r\n\r\n",
        ),
        (HEAD + b"x-long: " + b"y" * 40_000 + b"\r\n" + LENGTH + b"\r\n" + BODY,),
    ],
    ids=["whole", "cut", "bytes", "continue", "hints", "chunks", "long head"],
)
def test_an_answer_is_read_however_it_is_cut_and_the_connection_stays(
    kind: Kind, pieces: tuple[bytes, ...]
) -> None:
    with ScriptedServer(answering(*pieces)) as server:
        assert [found.id for found in ask(kind, server, get, get)] == ["a", "a"]
        assert len(server.peers) == 1


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"connection: close\r\n" + LENGTH + b"\r\n" + BODY,
        HEAD + b"\r\n" + BODY,
        OLD + LENGTH + b"\r\n" + BODY,
        OLD + b"\r\n" + BODY,
    ],
    ids=["close", "until the end", "1.0", "1.0 until the end"],
)
def test_a_connection_that_the_server_ends_is_followed_by_another(
    kind: Kind, answer: bytes
) -> None:
    with ScriptedServer(once(answer)) as server:
        assert [found.id for found in ask(kind, server, get, get)] == ["a", "a"]
        assert len(server.peers) == 2


def test_an_answer_without_a_body_leaves_the_connection_usable(kind: Kind) -> None:
    with ScriptedServer(answering(b"HTTP/1.1 204 No Content\r\n\r\n")) as server:
        delete = [lambda c: c.delete_sequence("a")] * 3
        assert ask(kind, server, *delete) == [None] * 3
        assert len(server.peers) == 1


@pytest.mark.parametrize(
    "pieces",
    [(), (HEAD,), (HEAD + LENGTH + b"\r\n", BODY[:5]), (CHUNKED + b"5\r\nabcde\r\n",)],
    ids=["nothing", "half a head", "half a body", "half the chunks"],
)
def test_a_connection_that_breaks_within_an_answer_is_a_lost_reply(
    kind: Kind, pieces: tuple[bytes, ...]
) -> None:
    with ScriptedServer(once(*pieces)) as server:
        with pytest.raises(attnd.ReplyLost):
            ask(kind, server, append)
        assert len(server.peers) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 1\r\n\r\n{}",
        HEAD + b"bad header\x00: x\r\n\r\n",
        HEAD + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=["ssh", "two lengths", "negative", "too much", "bad header", "endless head", "upgrade"],
)
def test_an_answer_that_is_not_http_is_a_protocol_error_and_ends_the_connection(
    kind: Kind, answer: bytes
) -> None:
    with ScriptedServer(answering(answer)) as server:
        with pytest.raises(attnd.ProtocolError):
            ask(kind, server, get, retries=3)
        assert len(server.peers) == 1


def test_an_idle_connection_that_was_closed_is_not_used_even_by_calls_that_must_not_repeat(
    kind: Kind,
) -> None:
    closed = threading.Event()

    def script(peer: Peer) -> None:
        if peer.request() is not None:
            peer.send(WHOLE if peer is server.peers[0] else appended)
        if peer is server.peers[0]:
            peer.socket.close()
            closed.set()

    appended = answer_of({"lengths": [4]})

    def wait_and_append(client: Any) -> Any:
        closed.wait(10)
        return append(client)

    with ScriptedServer(script) as server:
        _, result = ask(kind, server, get, wait_and_append)
        assert result.lengths == (4,)
        assert len(server.peers) == 2


@pytest.mark.parametrize("module", [blocking, awaiting])
def test_an_idle_connection_expires_before_the_service_closes_it(
    kind: Kind, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.KEEP_IDLE_S < 75
    monkeypatch.setattr(module, "KEEP_IDLE_S", 0.0)
    with ScriptedServer(answering(WHOLE)) as server:
        ask(kind, server, get, get)
        assert len(server.peers) == (2 if (module is blocking) == (kind == "sync") else 1)


def test_connections_that_only_a_burst_needed_expire_while_others_are_in_use(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    for transport in (awaiting, blocking):
        monkeypatch.setattr(transport, "KEEP_IDLE_S", 0.1)
    together = threading.Barrier(4)

    def script(peer: Peer) -> None:
        if peer.request() is not None:
            together.wait(10)
            peer.send(WHOLE)
            echo_name(peer)

    def ask(client: Any) -> None:
        client.get_sequence("a")

    with ScriptedServer(script) as server, client_of(kind, server.url) as client:
        if kind == "sync":
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(lambda _: ask(client), range(4)))
        else:

            async def burst() -> None:
                await asyncio.gather(*[client.client.get_sequence("a") for _ in range(4)])

            client.runner.run(burst())
        idle = (client if kind == "sync" else client.client)._transport._idle
        assert len(idle) == 4
        ends = time.monotonic() + 5
        while len(idle) > 1 and time.monotonic() < ends:
            ask(client)
            time.sleep(0.01)
        assert len(idle) == 1


def test_an_interrupt_as_an_answer_is_read_is_no_error_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with ScriptedServer(answering(WHOLE)) as server, Client(server.url) as client:
        monkeypatch.setattr("attnd.http.responses.Parsing.on_header", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.get_sequence("a")
        monkeypatch.undo()
        assert client.get_sequence("a").id == "a"


def test_a_large_body_arrives_whole_and_a_large_answer_too(kind: Kind) -> None:
    bodies = []
    text = "x" * (5 << 20)

    def script(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            bodies.append(request[1])
            peer.send(answer_of({"lengths": [1], "text": text}))

    with ScriptedServer(script) as server:
        ask(kind, server, append_much)
    header = int.from_bytes(bodies[0][:8], "little")
    assert len(bodies[0]) == 8 + header + 2 * (1 << 12) * 8 * 64 * 4


@pytest.mark.parametrize("close", [True, False])
def test_a_refusal_that_comes_before_the_body_was_sent_is_read(kind: Kind, close: bool) -> None:
    document = {"code": "body_too_large", "status": 413, "size": 9, "limit": 8}
    body = json.dumps(document).encode()
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-type: application/problem+json\r\n"
    refusal += b"content-length: %d\r\n\r\n" % len(body) + body

    def refuse(peer: Peer) -> None:
        peer.head()
        peer.send(refusal)
        if close:
            peer.socket.shutdown(1)

    with stalling(refuse) as server, pytest.raises(attnd.BodyTooLarge) as caught:
        ask(kind, server, append_much)
    assert (caught.value.size, caught.value.limit) == (9, 8)


@pytest.mark.parametrize("pieces", [(), (HEAD,), (HEAD + LENGTH + b"\r\n" + BODY[:3],)])
def test_a_server_that_stops_answering_is_timed_out(kind: Kind, pieces: tuple[bytes, ...]) -> None:
    with stalling(lambda peer: (peer.request(), peer.send(*pieces))) as server:
        began = time.monotonic()
        with pytest.raises(attnd.TimedOut):
            ask(kind, server, get, timeout=0.2, retries=3)
        assert 0.2 <= time.monotonic() - began < 10
    assert len(server.peers) == 1


def test_a_trickle_does_not_outlast_the_timeout(kind: Kind) -> None:
    def trickle(peer: Peer) -> None:
        peer.request()
        for byte in WHOLE:
            peer.send(bytes([byte]))
            time.sleep(0.2)  # more than 15 s for all

    with stalling(trickle) as server:
        began = time.monotonic()
        with pytest.raises(attnd.TimedOut):
            ask(kind, server, get, timeout=0.3)
        assert time.monotonic() - began < 10


def test_a_server_that_does_not_read_is_timed_out(kind: Kind) -> None:
    with stalling(lambda peer: None) as server, pytest.raises(attnd.TimedOut):
        ask(kind, server, append_much, timeout=0.3)


def test_requests_are_plain_http(kind: Kind) -> None:
    heads = []

    def script(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            heads.append(request[0].decode())
            peer.send(WHOLE)

    with ScriptedServer(script) as server:
        named = [lambda c: c.with_options(request_id="step-7").get_sequence("a b")]
        ask(kind, server, *named)
        ask(kind, server.url + "/behind/a/proxy/", get)
    line, *headers = heads[0].split("\r\n")
    reply = dict(header.split(": ") for header in headers)
    assert line == "GET /v1/sequences/a%20b HTTP/1.1"
    assert reply["host"] == server.url.removeprefix("http://")
    assert reply["x-request-id"] == "step-7"
    assert heads[1].startswith("GET /behind/a/proxy/v1/sequences/a HTTP/1.1")


def test_a_request_id_cannot_smuggle_headers(kind: Kind) -> None:
    for bad in ("a\r\nx: y", "a\nb", "ü", "\x7f"):
        with pytest.raises(ValueError, match="request_id"):
            (Client if kind == "sync" else AsyncClient)().with_options(request_id=bad)


def test_a_unix_socket_serves_as_well(kind: Kind, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with ScriptedServer(answering(WHOLE), path) as server:
        assert ask(kind, "http://localhost", get, uds=path)[0].id == "a"
        assert len(server.peers) == 1


def test_nothing_listening_is_connection_failed(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(attnd.ConnectionFailed) as caught:
        ask(kind, "http://127.0.0.1:1", lambda c: c.create_sequence(), retries=1)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(attnd.ConnectionFailed, match="No such file"):
        ask(kind, "http://x", lambda c: c.info(), uds=str(tmp_path / "none"))


@pytest.mark.parametrize("base_url", ["127.0.0.1:8080", "ftp://x", "http://", "http://a:b@x/"])
def test_a_base_url_of_another_kind_is_refused(base_url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(base_url))):
        Client(base_url)


def test_a_closed_client_says_so(kind: Kind) -> None:
    with (
        ScriptedServer(answering(WHOLE)) as server,
        pytest.raises(RuntimeError, match="closed"),
        client_of(kind, server.url) as client,
    ):
        client.aclose() if kind == "async" else client.close()
        client.info()


def echo_name(peer: Peer) -> None:
    """Answer with the id that was asked for."""
    while (request := peer.request()) is not None:
        name = request[0].split()[1].rpartition(b"/")[2].decode()
        peer.send(answer_of({**SEQUENCE, "id": name}))


@pytest.mark.parametrize("most", [100, 2], ids=["as many as it likes", "two connections"])
def test_threads_share_a_client_and_wait_for_a_connection_beyond_the_most(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(blocking, "MAX_CONNECTIONS", most)
    names = [f"s{i}" for i in range(200)]
    with (
        ScriptedServer(echo_name) as server,
        Client(server.url) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        assert [found.id for found in threads.map(client.get_sequence, names)] == names
        assert len(server.peers) <= min(8, most)


def test_tasks_may_share_a_client_and_no_more_than_the_limit_are_under_way() -> None:
    names = [f"s{i}" for i in range(400)]

    async def run(url: str) -> list[str]:
        async with AsyncClient(url) as client:
            found = await asyncio.gather(*[client.get_sequence(name) for name in names])
            return [one.id for one in found]

    with ScriptedServer(echo_name) as server:
        assert asyncio.run(run(server.url)) == names
        assert len(server.peers) <= 100


def test_a_cancelled_call_takes_its_connection_with_it() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        if peer is not server.peers[0]:
            peer.send(WHOLE)

    async def run() -> str:
        async with AsyncClient(server.url) as client:
            task = asyncio.create_task(client.get_sequence("a"))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            found: str = (await client.get_sequence("a")).id
            return found

    with stalling(script) as server:
        assert asyncio.run(run()) == "a"
        assert len(server.peers) == 2


def test_a_call_that_is_cancelled_as_its_turn_comes_leaves_the_turn_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wake = awaiting.LoopTransport._wake_one

    async def run() -> str:
        async with AsyncClient(server.url, timeout=2.0, retries=0) as client:
            first, second, third = (
                asyncio.create_task(client.get_sequence(name)) for name in ("a", "b", "c")
            )

            def wake_and_cancel(transport: awaiting.LoopTransport) -> None:
                wake(transport)
                second.cancel()

            monkeypatch.setattr(awaiting.LoopTransport, "_wake_one", wake_and_cancel)
            await first
            found: str = (await third).id
            return found

    monkeypatch.setattr(awaiting, "MAX_CONNECTIONS", 1)
    with ScriptedServer(echo_name) as server:
        assert asyncio.run(run()) == "c"


def test_an_async_client_may_be_used_by_one_loop_after_another() -> None:
    with ScriptedServer(answering(WHOLE)) as server:
        client = AsyncClient(server.url)

        async def ask() -> str:
            found: str = (await client.get_sequence("a")).id
            return found

        async def end() -> None:
            await client.aclose()

        with asyncio.Runner() as first, asyncio.Runner() as second:
            assert [first.run(ask()), second.run(ask())] == ["a", "a"]
            second.run(end())


def test_the_async_client_runs_under_uvloop_too() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def run(url: str) -> list[str]:
        async with AsyncClient(url, retries=0) as client:
            await append_much(client)
            found = await asyncio.gather(*[get(client) for _ in range(150)])
            return [one.id for one in found]

    with ScriptedServer(answering(WHOLE)) as server:
        assert uvloop.run(run(server.url)) == ["a"] * 150
        assert len(server.peers) <= 100
