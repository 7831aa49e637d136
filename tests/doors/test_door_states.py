"""Starting, ready, draining, lost: the door's replies, and its end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from scripted import (
    WAIT_S,
    Running,
    decode_body,
    post,
    receive_all,
    replies,
    request,
    serving,
    wait_for,
)

from config.settings import load_settings
from service.doors.http.server import HttpServer
from service.doors.kit.process import Setup
from service.metrics import Metrics
from tests.harness.plain_http import http_client

BODY = decode_body()
GOOD = request("/v1/decode", BODY)
LIVE = request("/health/live", method="GET", content_length="")
READY = request("/health/ready", method="GET", content_length="")


@pytest.fixture
def running(tmp_path: Path) -> object:
    with serving(tmp_path) as one:
        yield one


def statuses(peer: socket.socket, count: int) -> list[int]:
    data = b""
    while data.count(b"HTTP/1.1 ") < count:
        piece = peer.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


def test_before_the_engine_answers_the_door_is_live_and_not_ready(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with door_before(path) as (server, url):
            try:
                wait_for(lambda: server.started, "the door")
                with http_client(url) as client:
                    assert client.get("/health/live").status_code == 200
                    assert client.get("/metrics").status_code == 200
                    for route in ("/health/ready", "/v1/pool", "/v1/sequences"):
                        response = client.get(route)
                        assert (response.status_code, response.json()["code"]) == (503, "not_ready")
                        assert "starting" in response.json()["detail"]
                    assert post(client, "/v1/decode", BODY).status_code == 503
            finally:
                assert server.loop is not None
                server.loop.call_soon_threadsafe(server.drain)


@contextmanager
def door_before(path: Path) -> Iterator[tuple[HttpServer, str]]:
    """A door before this socket and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(
            Setup(load_settings([]), Metrics(), str(path), "http-0", "", sockets=[listener])
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"  # the door may close the listener
        thread = threading.Thread(target=server.run)
        thread.start()
        yield server, url
        thread.join(WAIT_S)
        assert not thread.is_alive()


def ended(path: Path) -> str:
    """Why a door before this socket ended, which it must by itself."""
    with door_before(path) as (server, _):
        pass
    return server.failed


def test_without_an_engine_the_door_ends(tmp_path: Path) -> None:
    assert ended(tmp_path / "nothing.sock") == ""


def test_before_something_that_is_no_engine_the_door_ends_and_says_why(tmp_path: Path) -> None:
    def answer() -> None:
        peer, _ = other.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other.sock"))
        other.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        assert "other.sock cannot be called" in ended(tmp_path / "other.sock")
        thread.join()


def test_a_door_reports_its_engines_state(running: Running) -> None:
    with running.client() as client:
        for state, reason in (("draining", "its last work"), ("lost", "no such card")):
            running.engine.push_state(state, reason)
            wait_for(lambda state=state: running.door.link.state[0] == state, "the state")
            for path in ("/health/ready", "/v1/pool"):
                response = client.get(path)
                assert (response.status_code, response.json()["code"]) == (503, "not_ready")
                assert reason in response.json()["detail"]
            assert client.get("/health/live").status_code == 200
        running.engine.push_state("ready", "ready")
        wait_for(lambda: client.get("/health/ready").status_code == 200, "it to be ready again")


def test_without_an_engine_every_request_gets_503_at_once(running: Running) -> None:
    running.engine.close_gate()
    with running.connect() as peer, running.client() as client:
        peer.sendall(request("/v1/decode", BODY, connection="close"))
        wait_for(lambda: running.engine.waiting, "the call")
        running.engine.die()
        (reply,) = replies(receive_all(peer))
        assert (reply.status, reply.problem["code"]) == (503, "not_ready")
        began = time.monotonic()
        response = post(client, "/v1/decode", decode_body(100_000))
        assert (response.status_code, response.json()["code"]) == (503, "not_ready")
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200
        assert time.monotonic() - began < 5
    running.engine.waiting.clear()


def test_a_drain_finishes_accepted_requests_and_refuses_halves_and_others(running: Running) -> None:
    running.engine.close_gate()
    with ExitStack() as peers:
        admitted, open_one, *parts = (peers.enter_context(running.connect()) for _ in range(4))
        admitted.sendall(GOOD)
        for peer, sent in zip(parts, (30, -4), strict=True):
            peer.sendall(GOOD[:sent])
        open_one.sendall(LIVE)
        assert statuses(open_one, 1) == [200]
        wait_for(lambda: running.engine.waiting, "the call")
        wait_for(lambda: len(running.door.active) == 2, "the half body")
        wait_for(lambda: any(one.head_bytes for one in running.door.connections), "half a head")
        running.drain()
        half_head, half_body = parts
        (reply,) = replies(receive_all(half_body))
        assert (reply.status, reply.problem["code"]) == (503, "not_ready")
        assert reply.headers["connection"] == "close"
        with pytest.raises(OSError):
            running.connect().close()
        open_one.sendall(READY)
        (reply,) = replies(receive_all(open_one))
        assert (reply.status, reply.headers["connection"]) == (503, "close")
        assert "draining" in reply.problem["detail"]
        assert running.thread.is_alive()
        running.engine.open_gate()
        (reply,) = replies(receive_all(admitted))
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert half_head.recv(1) == b"", "it was no request yet"
        running.thread.join(5)
        assert not running.thread.is_alive()


def test_an_idle_door_drains_at_once(running: Running) -> None:
    with running.connect() as peer:
        peer.sendall(LIVE)
        assert statuses(peer, 1) == [200]
        began = time.monotonic()
        running.drain()
        running.thread.join(WAIT_S)
        assert time.monotonic() - began < 5, "far below server.drain_timeout_s"
        assert peer.recv(1) == b"", "idle connections are closed"


def test_a_large_answer_is_sent_to_its_end_before_the_door_ends(running: Running) -> None:
    body = decode_body(500_000)
    with running.connect() as peer:
        peer.sendall(request("/v1/decode", body))
        first = peer.recv(1000)
        assert first.startswith(b"HTTP/1.1 200")
        running.drain()
        time.sleep(0.3)
        rest = receive_all(peer)
    assert len(first + rest) > len(body)


def test_work_that_takes_too_long_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with serving(tmp_path, "--server.drain-timeout-s", "0.3") as running:
        running.engine.close_gate()
        with running.connect() as peer:
            peer.sendall(GOOD)
            wait_for(lambda: running.engine.waiting, "the call")
            running.drain()
            running.thread.join(5)
            assert not running.thread.is_alive()
            assert b"200" not in peer.recv(100)
        running.engine.waiting.clear()
