"""Overload, deadlines, clients that leave, interleaved clients, and a drain: over a real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from http_service import (
    HEAD_DIM,
    QO_HEADS,
    SAFETENSORS,
    Service,
    append,
    ask,
    check_problem,
    create,
    post,
    read_body,
    rows,
    serving,
    wait_for,
    write_body,
)

from config.settings import load_settings
from service.__main__ import make_server

DEPTH = 2


@pytest.fixture
def tight(rng: np.random.Generator) -> Iterator[Service]:
    """A service whose queue holds two operations, with a sequence `a` of three tokens."""
    with serving("--server.queue-depth", str(DEPTH)) as running, running.client() as client:
        create(client, "a", "x")
        append(client, 0, "a", rows(rng, 3), rows(rng, 3))
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def decode(service: Service, **headers: str) -> httpx.Response:
    with service.client() as client:
        q = np.ones((1, QO_HEADS, HEAD_DIM), np.float32)
        fields = {"layer": 0, "sequences": ["a"]}
        return post(client, "/v1/decode", fields, {"q": q}, headers=headers)


def hold(service: Service, pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """Close the gate with one decode inside: the worker is busy until the gate opens."""
    service.backend.gate.clear()
    service.backend.entered.clear()
    inside = pool.submit(decode, service)
    wait_for(service.backend.entered.is_set, "the worker to be busy")
    return inside


def test_a_full_queue_is_answered_429_while_what_was_admitted_finishes(
    tight: Service, pool: ThreadPoolExecutor
) -> None:
    admitted = [hold(tight, pool)]
    for waiting in range(DEPTH):
        admitted.append(pool.submit(decode, tight))
        wait_for(lambda n=waiting: tight.engine.num_waiting == n + 1, "a place in the queue")
    refused = decode(tight)
    problem = check_problem(refused, 429, "overloaded")
    assert problem["retry_after_s"] > 0
    assert int(refused.headers["retry-after"]) >= problem["retry_after_s"]
    with tight.client() as client:
        assert client.get("/health/ready").status_code == 200
    tight.backend.gate.set()
    for one in admitted:
        assert one.result().status_code == 200, one.result().text
    assert decode(tight).status_code == 200, "there is room again"


def test_a_deadline_that_passes_in_the_queue_means_it_did_not_run(
    tight: Service, pool: ThreadPoolExecutor, rng: np.random.Generator
) -> None:
    inside = hold(tight, pool)
    kv = {"k": rows(rng, 1), "v": rows(rng, 1)}
    fields = {"layer": 0, "sequences": ["x"]}

    def late() -> httpx.Response:
        with tight.client() as client:
            headers = {"x-attnd-deadline-ms": "20"}
            return post(client, "/v1/append", fields, kv, headers=headers)

    waiting = pool.submit(late)
    wait_for(lambda: tight.engine.num_waiting == 1, "the append to wait")
    time.sleep(0.05)
    tight.backend.gate.set()
    check_problem(waiting.result(), 504, "deadline_exceeded")
    assert inside.result().status_code == 200
    with tight.client() as client:
        assert client.get("/v1/sequences/x").json()["lengths"] == [0, 0]


def test_a_client_that_hangs_up_leaves_no_trace(
    tight: Service, pool: ThreadPoolExecutor, rng: np.random.Generator
) -> None:
    inside = hold(tight, pool)
    kv = {"k": rows(rng, 1), "v": rows(rng, 1)}
    body = write_body(SAFETENSORS, {"layer": 0, "sequences": ["x"]}, kv)
    with tight.connect() as peer:
        peer.sendall(
            b"POST /v1/append HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/vnd.safetensors\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        wait_for(lambda: tight.engine.num_waiting == 1, "the append to wait")
    wait_for(lambda: tight.engine.num_waiting == 0, "the append to be dropped")
    tight.backend.gate.set()
    assert inside.result().status_code == 200
    with tight.client() as client:
        assert client.get("/v1/sequences/x").json()["lengths"] == [0, 0]
        told = client.get("/metrics").text
        assert 'attnd_rejected_total{reason="cancelled"} 1.0' in told
        assert "attnd_inflight 0.0" in told
        assert 'attnd_requests_total{code="client_gone",op="append"} 1.0' in told
        assert client.get("/v1/pool").json()["integrity"] == "ok"


@pytest.mark.parametrize("path", ["/v1/append", "/v1/sequences"])
def test_a_client_that_hangs_up_in_the_middle_of_its_body_leaves_no_trace(
    tight: Service, path: str
) -> None:
    with tight.client() as client:
        before = client.get("/v1/pool").json()
        with tight.connect() as peer:
            peer.sendall(
                f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                "content-length: 1000\r\n\r\n{".encode()
            )
            time.sleep(0.05)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        assert client.get("/v1/pool").json() == before


def test_two_interleaved_clients_get_the_same_numbers_as_alone(
    pool: ThreadPoolExecutor,
) -> None:
    def session(service: Service, name: str, seed: int) -> list[Any]:
        """Append and decode step by step, over both layers; everything that was answered."""
        mine = np.random.default_rng(seed)
        told: list[Any] = []
        with service.client() as client:
            create(client, name)
            for step in range(12):
                for layer in (0, 1):
                    kv = {"k": rows(mine, 1), "v": rows(mine, 1), "q": rows(mine, 1, QO_HEADS)}
                    fields = {"layer": layer, "sequences": [name], "offsets": [step]}
                    _, tensors = ask(client, "/v1/decode", fields, kv)
                    told += [tensors["o"], tensors["lse"]]
        return told

    with serving() as service:
        alone = [session(service, f"alone-{seed}", seed) for seed in (1, 2)]
        together = [pool.submit(session, service, f"together-{seed}", seed) for seed in (1, 2)]
        for seed, (one, other) in enumerate(zip(alone, together, strict=True)):
            for at, (wanted, got) in enumerate(zip(one, other.result(), strict=True)):
                np.testing.assert_allclose(
                    got.astype(np.float64),
                    wanted.astype(np.float64),
                    atol=1e-5 if wanted.dtype == np.float32 else 1e-3,
                    err_msg=f"client {seed}, array {at}",
                )


def test_a_drain_finishes_what_was_admitted_and_refuses_the_rest(
    tight: Service, pool: ThreadPoolExecutor
) -> None:
    admitted = [hold(tight, pool), pool.submit(decode, tight)]
    wait_for(lambda: tight.engine.num_waiting == 1, "a decode to wait")
    tight.drain()
    wait_for(lambda: tight.engine.state == "draining", "the drain")
    with tight.client() as client:
        ready = client.get("/health/ready")
        assert "draining" in check_problem(ready, 503, "not_ready")["detail"]
        assert int(ready.headers["retry-after"]) >= 1
        assert client.get("/health/live").status_code == 200
        assert client.get("/metrics").status_code == 200
        check_problem(client.get("/v1/pool"), 503, "not_ready")
    check_problem(decode(tight), 503, "not_ready")
    tight.backend.gate.set()
    for one in admitted:
        assert one.result().status_code == 200, one.result().text
        assert read_body(one.result())[1]["o"].shape == (1, QO_HEADS, HEAD_DIM)
    tight.thread.join(20)
    assert not tight.thread.is_alive()
    assert tight.engine.state == "stopped"


def test_a_backend_that_cannot_start_leaves_the_service_live_and_not_ready() -> None:
    def broken() -> Any:
        raise RuntimeError("no such card")

    server = make_server(load_settings(["--server.port", "0"]), broken)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started and server.engine.state == "lost", "the failure")
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.get("/health/live").status_code == 200
            for path in ("/health/ready", "/v1/info", "/v1/sequences"):
                problem = check_problem(client.get(path), 503, "not_ready")
                assert "no such card" in problem["detail"], path
            check_problem(post(client, "/v1/gather", {}, {}), 503, "not_ready")
    finally:
        assert server.loop is not None
        server.loop.call_soon_threadsafe(server.begin_drain)
        thread.join(20)
