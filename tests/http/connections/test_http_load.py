"""Overload, deadlines, clients that leave, interleaved clients, and a drain: over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from http_messages import (
    HEAD_DIM,
    QO_HEADS,
    SAFETENSORS,
    append,
    check_problem,
    create,
    post,
    rows,
    write_body,
)
from http_service import Service, serving

from tests.harness.waiting import wait_for

DEPTH = 3


@pytest.fixture
def tight(rng: np.random.Generator) -> Iterator[Service]:
    """A service whose queue holds three operations, with a sequence `a` of three tokens."""
    with serving("--server.queue-depth", str(DEPTH)) as running, running.client() as client:
        create(client, "a", "x", "barrier")
        append(client, 0, "a", rows(rng, 3), rows(rng, 3))
        yield running


def decode(service: Service, **headers: str) -> httpx.Response:
    with service.client() as client:
        q = np.ones((1, QO_HEADS, HEAD_DIM), np.float32)
        fields = {"layer": 0, "sequences": ["a"]}
        return post(client, "/v1/decode", fields, {"q": q}, headers=headers)


def hold(service: Service, pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Close the gate with one decode on the device, and a truncate behind it that has to wait for
    it: whatever comes then waits until the gate opens, while the engine listens."""
    service.backend.late = True
    service.backend.gate.clear()
    service.backend.entered.clear()
    inside = pool.submit(decode, service)
    wait_for(service.backend.entered.is_set, "the device to be busy")

    def cut() -> httpx.Response:
        with service.client() as client:
            return client.post("/v1/sequences/barrier/truncate", json={"length": 0})

    behind = pool.submit(cut)
    wait_for(lambda: service.num_waiting == 1, "the truncate to wait")
    return [inside, behind]


def test_a_full_queue_answers_429_accepts_what_frees_pages_and_finishes_what_waits(
    tight: Service, pool: ThreadPoolExecutor
) -> None:
    admitted = hold(tight, pool)
    for waiting in range(1, DEPTH):
        admitted.append(pool.submit(decode, tight))
        wait_for(lambda n=waiting: tight.num_waiting == n + 1, "a place in the queue")
    refused = decode(tight)
    problem = check_problem(refused, 429, "overloaded")
    assert problem["retry_after_s"] > 0
    assert int(refused.headers["retry-after"]) >= problem["retry_after_s"]
    with tight.client() as client, tight.client() as other:
        assert client.get("/health/ready").status_code == 200
        deleted = pool.submit(other.delete, "/v1/sequences/x")
        wait_for(lambda: tight.num_waiting == DEPTH + 1, "the delete to wait with the others")
        tight.backend.gate.set()
        assert deleted.result().status_code == 204, deleted.result().text
    for one in admitted:
        assert one.result().status_code == 200, one.result().text
    assert decode(tight).status_code == 200, "there is room again"


def test_a_client_that_hangs_up_leaves_no_trace(
    tight: Service, pool: ThreadPoolExecutor, rng: np.random.Generator
) -> None:
    before = hold(tight, pool)
    kv = {"k": rows(rng, 1), "v": rows(rng, 1)}
    body = write_body(SAFETENSORS, {"layer": 0, "sequences": ["x"]}, kv)
    with tight.connect() as peer:
        peer.sendall(
            b"POST /v1/append HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/vnd.safetensors\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        wait_for(lambda: tight.num_waiting == 2, "the append to wait")
    wait_for(lambda: tight.num_waiting == 1, "the append to be dropped")
    tight.backend.gate.set()
    assert [one.result().status_code for one in before] == [200, 200]
    with tight.client() as client:
        assert client.get("/v1/sequences/x").json()["lengths"] == [0, 0]
        reply = client.get("/metrics").text
        assert 'attnd_rejected_total{reason="cancelled"} 1.0' in reply
        assert "attnd_inflight 0.0" in reply
        assert 'attnd_requests_total{code="client_gone",op="append"} 1.0' in reply
        assert client.get("/v1/pool").json()["integrity"] == "ok"


def test_calls_wait_in_the_socket_while_the_engine_is_at_a_long_kernel(
    tight: Service, pool: ThreadPoolExecutor
) -> None:
    tight.backend.gate.clear()
    tight.backend.entered.clear()
    admitted = [pool.submit(decode, tight)]
    wait_for(tight.backend.entered.is_set, "the engine to be busy")
    admitted += [pool.submit(decode, tight) for _ in range(DEPTH)]
    with tight.client() as client:
        for _ in range(10):
            assert client.get("/health/live").status_code == 200, "the door answers by itself"
        wait_for(lambda: tight.door.active == 1 + DEPTH, "the requests to be with the door")
    assert not any(one.done() for one in admitted)
    tight.backend.gate.set()
    for one in admitted:
        assert one.result().status_code == 200, one.result().text
