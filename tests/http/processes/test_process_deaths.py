"""Processes that are killed, or stopped in the middle of work: who notices, and how."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import attnd
import httpx
import numpy as np
import pytest
from http_messages import (
    QO_HEADS,
    SAFETENSORS,
    ask,
    check_problem,
    endless_prefill,
    fill,
    post,
    rows,
)
from http_process import is_ready, listening
from http_service import needs_a_slow_device

from service.doors.kit.link import GRACE_S, STALE_S
from tests.harness.plain_http import http_client, status_of
from tests.harness.processes import Process, is_alive, kill, wait_until_dead
from tests.harness.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.long


MOST_CLIENTS = 100


@contextmanager
def busy(
    pool: ThreadPoolExecutor, *arguments: str
) -> Iterator[tuple[Process, str, Future[httpx.Response]]]:
    """A service that is at a ragged prefill of many minutes, and its client's reply."""

    def ask_for_it(url: str) -> httpx.Response:
        with http_client(url) as client:
            return post(client, "/v1/ragged-prefill", *endless_prefill())

    with listening(*arguments) as (running, url):
        request = pool.submit(ask_for_it, url)
        with http_client(url) as client:
            wait_for(lambda: slices(client) > 3, "the prefill to run")
        yield running, url, request


def slices(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(one for one in lines if one.startswith("attnd_slices_total")).split()[1])


@needs_a_slow_device
def test_sigterm_during_an_operation_longer_than_the_drain_ends_it_with_503(
    pool: ThreadPoolExecutor,
) -> None:
    with busy(pool, "--server.drain-timeout-s", "1") as (running, _, request):
        assert running.stop() == 0
        check_problem(request.result(WAIT_S), 503, "not_ready")
    assert not [line for line in running.lines if "Traceback" in line or "terminate" in line]
    reply = running.messages("warning", "error")
    assert reply == ["drain: 1 operations were not done in 1 s"], "nothing had to be killed"


def test_a_partial_body_does_not_hold_up_the_end() -> None:
    with listening() as (running, url):
        host, _, port = url.removeprefix("http://").partition(":")
        head = f"POST /v1/append HTTP/1.1\r\nhost: localhost\r\ncontent-type: {SAFETENSORS}\r\n"
        with socket.create_connection((host, int(port)), WAIT_S) as peer:
            peer.sendall(f"{head}content-length: 1000\r\n\r\n".encode() + bytes(500))
            with http_client(url) as client:  # by now it has been read
                client.get("/health/live")
            running.child.send_signal(signal.SIGTERM)
            reply = b""
            while piece := peer.recv(65536):
                reply += piece
        assert running.child.wait(WAIT_S) == 0, "long before the drain's 30 s are over"
    assert reply.startswith(b"HTTP/1.1 503 ") and b"application/problem+json" in reply, reply
    assert b"connection: close" in reply and reply.count(b"HTTP/1.1") == 1, reply
    assert not [line for line in running.lines if "Traceback" in line]


@needs_a_slow_device
def test_when_the_engine_is_killed_doors_answer_503_until_it_has_started_again(
    pool: ThreadPoolExecutor,
) -> None:
    with busy(pool) as (running, url, request):
        dead = running.pid("engine")
        with http_client(url) as client:
            before = client.get("/v1/info").json()["instance_id"]
        with attnd.Session(running.find(r'sessions at ([^\s"]+)')[1]) as session:
            session.create_sequence("a")
            os.kill(dead, signal.SIGKILL)
            check_problem(request.result(WAIT_S), 503, "not_ready")
            session.create_sequence("b")  # waits for the new engine at the same socket
            assert session.info().instance_id != before
            with pytest.raises(attnd.UnknownSequence):
                session.get_sequence("a")
        wait_for(lambda: is_ready(url), "the service to be ready again")
        with http_client(url) as client:
            assert client.get("/v1/info").json()["instance_id"] != before
            for process in ("engine", "http-0"):
                line = f'attnd_process_restarts_total{{process="{process}"}} 1.0'
                assert line in client.get("/metrics").text
        assert running.stop() == 0
    (reply,) = running.messages("error")
    assert "engine was killed by SIGKILL" in reply, reply


def test_when_a_door_is_killed_it_starts_again_and_no_other_process_notices(
    rng: np.random.Generator,
) -> None:
    with listening("--server.http-workers", "2") as (running, url):
        clients, doors = clients_of_both_doors(running, url)
        fill(clients[0], rng, "a", 3)
        dead = running.pid("http-0")
        os.kill(dead, signal.SIGKILL)
        fields, q = {"layer": 0, "sequences": ["a"]}, {"q": rows(rng, 1, QO_HEADS)}
        for door, client in zip(doors, clients, strict=True):
            if door == "http-1":  # over the connection that it has
                assert ask(client, "/v1/decode", fields, q)[1]["o"].shape[0] == 1
            else:
                with suppress(httpx.TransportError):
                    client.get("/v1/info")
        wait_for(lambda: came_back(running, dead), "the door to start again")
        for index, client in enumerate(clients):
            reply = client.get("/v1/info", headers={"x-request-id": f"two-{index}"})
            assert reply.status_code == 200, "over a new connection where the old one closed"
        assert ask(clients[0], "/v1/decode", fields, q)[1]["o"].shape[0] == 1
        for door, restarts in (("http-0", 1), ("http-1", 0)):
            line = f'attnd_process_restarts_total{{process="{door}"}} {restarts}.0'
            wait_for(lambda line=line: line in clients[0].get("/metrics").text, line)
        for client in clients:
            client.close()
        assert running.stop() == 0
    assert len([line for line in running.lines if "restarting it" in line]) == 1
    assert running.messages("error") == []


def clients_of_both_doors(running: Process, url: str) -> tuple[list[httpx.Client], list[str]]:
    """Connections, and the doors that took them: the system gives them to whichever is awake."""
    clients: list[httpx.Client] = []
    doors: list[str] = []
    while set(doors) != {"http-0", "http-1"} and len(clients) < MOST_CLIENTS:
        client = http_client(url)
        name = f"one-{len(clients)}"
        client.get("/v1/info", headers={"x-request-id": name})
        clients.append(client)
        running.find(name)
        (process,) = [one["process"] for one in running.entries() if one.get("id") == name]
        doors.append(process)
    assert set(doors) == {"http-0", "http-1"}, doors
    return clients, doors


def came_back(running: Process, dead: int) -> bool:
    try:
        return running.pid("http-0") != dead
    except (AssertionError, FileNotFoundError):
        return False


@needs_a_slow_device
def test_when_the_supervisor_is_killed_nothing_is_left_behind(pool: ThreadPoolExecutor) -> None:
    with busy(pool) as (running, url, request):
        others = [running.pid(name) for name in ("engine", "http-0")]
        running.child.kill()
        wait_for(lambda: not any(map(is_alive, others)), "engine and door to end")
        with pytest.raises(httpx.TransportError):
            request.result(WAIT_S)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, timeout=WAIT_S)


def test_a_door_that_runs_out_of_file_descriptors_says_so_and_comes_back() -> None:
    with listening(open_files=128) as (running, url):
        host, _, port = url.removeprefix("http://").partition(":")
        with ExitStack() as open_ones:
            peers = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(150)]
            for peer in peers:
                open_ones.enter_context(peer)
            logged = running.find(r"idle connections are closed for new ones: (\d+) connections")
            assert 32 < int(logged[1]) < 128
            for _ in range(3):
                assert is_ready(url), "new connections are accepted"
        assert running.stop() == 0


@needs_a_slow_device
def test_ctrl_c_reaches_every_process_and_admitted_work_is_still_answered(
    pool: ThreadPoolExecutor, rng: np.random.Generator
) -> None:
    some_seconds = {name: rng.standard_normal((2500, 8, 64), np.float32) for name in "qkv"}
    fields = {"qo_indptr": [0, 2500], "kv_indptr": [0, 2500]}
    with listening() as (running, url), http_client(url) as client:
        request = pool.submit(post, client, "/v1/ragged-prefill", fields, some_seconds)
        with http_client(url) as other:
            wait_for(lambda: slices(other) > 3, "the prefill to run")
        everyone = [running.pid("http-0"), running.pid("engine"), running.child.pid]
        for pid in everyone:  # as a terminal does
            os.kill(pid, signal.SIGINT)
        assert request.result(WAIT_S).status_code == 200
        assert running.child.wait(WAIT_S) == 0
    assert not [line for line in running.lines if "Traceback" in line]


def test_a_stopped_engine_leaves_no_client_waiting_and_is_not_ready() -> None:
    with listening() as (running, url), http_client(url) as client:
        engine = running.pid("engine")
        os.kill(engine, signal.SIGSTOP)
        try:
            started = time.monotonic()
            headers = {"X-Attnd-Deadline-Ms": "500"}
            reply = client.get("/v1/sequences", headers=headers)
            assert reply.status_code == 504, reply.text
            assert time.monotonic() - started < 0.5 + GRACE_S + WAIT_S / 2
            wait_for(
                lambda: client.get("/health/ready").status_code == 503,
                "the door to miss the engine",
                2 * STALE_S,
            )
            assert client.get("/health/live").status_code == 200
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for(lambda: client.get("/health/ready").status_code == 200, "the engine", WAIT_S)
        assert client.get("/v1/sequences").status_code == 200


def test_a_router_that_starts_is_ready_once_it_has_met_all_engines() -> None:
    with listening("--cluster.engines", "2") as (running, url):
        stopped, router = running.pid("engine-1"), running.pid("http-0")
        os.kill(stopped, signal.SIGSTOP)
        try:
            kill(router)
            wait_until_dead(router)
            wait_for(lambda: answers(url), "the next router")
            with http_client(url) as client:
                reply = client.get("/health/ready")
                assert reply.status_code == 503 and "engine-1" in reply.text, reply.text
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_for(lambda: is_ready(url), "all engines")


def answers(url: str) -> bool:
    """Whether a router serves engines, if not all of them yet."""
    with suppress(httpx.TransportError):
        return status_of(f"{url}/v1/engines") == 200
    return False
