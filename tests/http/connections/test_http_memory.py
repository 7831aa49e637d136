"""Memory that requests take: refused ones none, waiting ones up to the limit."""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from http_messages import (
    HEAD_DIM,
    JSON,
    KV_HEADS,
    PAGE_SIZE,
    PAGES,
    SAFETENSORS,
    WIRE_DTYPE,
    create,
    fill,
    write_body,
)
from http_secrets import bearer, both, keys_file
from http_service import Service, serving

from tests.harness.waiting import wait_for

MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process has, the shared ones included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def taken(service: Service) -> int:
    """Bytes of the door's arena that slots cover."""
    slots = service.door.link.arena.slots
    return int(slots.size) - int(slots.free())


@contextmanager
def no_collector() -> Iterator[None]:
    """Memory that only the garbage collector would give back stays taken."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_refused_tensors_are_released_at_once() -> None:
    n = 4 * MIB // (KV_HEADS * HEAD_DIM * WIRE_DTYPE.itemsize)
    kv = np.zeros((n, KV_HEADS, HEAD_DIM), WIRE_DTYPE)
    with serving() as service, service.client() as client, no_collector():
        create(client, "a")
        assert n > PAGES * PAGE_SIZE, "too many for the pool"
        everything = {"layer": 0, "sequences": ["a"], "append_indptr": [0, n]}
        refusals = {
            507: write_body(SAFETENSORS, everything, {"k": kv, "v": kv}),
            404: write_body(SAFETENSORS, everything | {"sequences": ["x"]}, {"k": kv, "v": kv}),
            422: write_body(SAFETENSORS, everything | {"layer": 99}, {"k": kv, "v": kv}),
        }
        headers = {"content-type": SAFETENSORS}
        before = None
        for _ in range(12):  # of 8 MiB each
            for status, body in refusals.items():
                response = client.post("/v1/append", content=body, headers=headers)
                assert response.status_code == status, response.text
                del response
            before = before or resident()
        grown = resident() - before
        wait_for(lambda: taken(service) < MIB, f"{taken(service)} bytes to come back")
        assert service.door.link.arena.slots.size <= 64 * MIB, "the arena never had to grow"
        assert grown < 64 * MIB, f"resident memory grew by {grown / MIB:.0f} MiB"


def head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", f"content-type: {SAFETENSORS}")
    return "\r\n".join((*lines, f"content-length: {length}", "", "")).encode()


def problem_of(peer: socket.socket) -> dict[str, object]:
    """The document of the answer that has come, before any of the body was sent."""
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
        piece = peer.recv(65536)
        assert piece, data
        data += piece
    start, _, text = data.partition(b"\r\n\r\n")
    assert b"application/problem+json" in start and b"x-request-id: " in start, start
    problem: dict[str, object] = json.loads(text)
    assert start.split()[1] == str(problem["status"]).encode()
    return problem


LIMITS = (
    *("--server.max-body-bytes", str(24 * MIB), "--server.max-answer-bytes", str(MIB)),
    *("--server.max-inflight-bytes", str(64 * MIB)),
)

UNFINISHED = bytes(24 * MIB - 1)
"""Made once: copies of it would count as the service's memory."""


def begin_body(service: Service, open_ones: ExitStack, *lines: str) -> socket.socket:
    """A request of 24 MiB on a connection of its own, all but its last byte, as far as the service
    takes it."""
    peer = open_ones.enter_context(service.connect())
    start = head("/v1/merge", 24 * MIB)[:-2]
    with suppress(OSError):
        peer.sendall(b"\r\n".join((start[:-2], *map(str.encode, lines), b"", b"")))
        peer.sendall(UNFINISHED)
    return peer


def test_unfinished_bodies_take_no_more_than_is_allowed() -> None:
    with serving(*LIMITS) as service, ExitStack() as open_ones:
        before = resident()
        first = begin_body(service, open_ones)
        wait_for(lambda: taken(service) >= 24 * MIB, "one body to have its place")
        for _ in range(8):
            problem = problem_of(begin_body(service, open_ones))
            assert (problem["code"], problem["retry_after_s"]) == ("overloaded", 1.0)
        assert taken(service) <= 64 * MIB and resident() - before < 64 * MIB
        with service.client() as client:
            assert client.get("/v1/info").status_code == 200, "small ones find room"
        first.close()
        wait_for(lambda: taken(service) < MIB, "the places to come back")


def test_one_namespace_leaves_room_for_the_bodies_of_another(tmp_path: Path) -> None:
    keys = keys_file(tmp_path, both("read", "append"))
    with serving(*LIMITS, *keys) as service, ExitStack() as open_ones:
        peers = [begin_body(service, open_ones, "authorization: Bearer red") for _ in range(6)]
        assert {problem_of(peer)["code"] for peer in peers[1:]} == {"overloaded"}
        with service.client() as client:
            states = {"o": np.zeros((400, 5, 8, 64), WIRE_DTYPE)}
            states["lse"] = np.zeros((400, 5, 8), np.float32)
            body = write_body(SAFETENSORS, {}, states)
            for name, status in (("blue", 200), ("red", 200), ("unknown", 401)):
                headers = {"content-type": SAFETENSORS} | bearer(name)
                response = client.post("/v1/merge", content=body, headers=headers)
                assert response.status_code == status, response.text
        assert service.door.shares.by_caller.keys() == {"red"}


def test_memory_that_the_system_does_not_give_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with serving() as service, service.connect() as peer:
        monkeypatch.setattr("service.road.caller_end.slots.Mapping.grow", no_memory)
        peer.sendall(head("/v1/merge", 200 * MIB))
        problem = problem_of(peer)
        assert (problem["status"], problem["code"]) == (429, "overloaded"), problem
        with service.client() as client:
            assert client.get("/health/ready").status_code == 200


@pytest.mark.parametrize(
    ("accept", "count", "peers", "mib"), [(SAFETENSORS, 80, 8, 16), (JSON, 2, 16, 16)]
)
def test_answers_that_one_namespace_does_not_read_leave_room_for_other_namespaces(
    tmp_path: Path, accept: str, count: int, peers: int, mib: int
) -> None:
    keys = keys_file(tmp_path, both("read", "append"))
    limits = {"inflight": mib, "body": 2, "answer": 4}
    given = [text for name, n in limits.items() for text in (f"--server.max-{name}-bytes", n * MIB)]
    forks = [f"fork-{number}" for number in range(80)]
    fields = {"layer": 0, "sequences": forks[:count]}
    route, body, content_type = "/v1/gather", write_body(SAFETENSORS, fields, {}), SAFETENSORS
    headers = {"content-type": content_type, "accept": accept}
    sent = {**headers, "content-length": len(body), "authorization": "Bearer red", "host": "x"}
    lines = [f"POST {route} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
    head = "\r\n".join([*lines, "", ""]).encode()

    def status(client: httpx.Client) -> int:
        return client.post(route, content=body, headers=headers).status_code

    with serving(*keys, *map(str, given)) as service, ExitStack() as stack:
        for name in ("red", "blue"):
            with service.client(name) as client:
                fill(client, np.random.default_rng(1), "a", PAGES * PAGE_SIZE // 8)
                create(client, *({"id": one, "parent": "a"} for one in forks))
        red = stack.enter_context(service.client("red"))
        assert status(red) == 200
        for _ in range(peers):
            peer = stack.enter_context(service.connect())
            peer.sendall(16 * (head + body))
        wait_for(lambda: status(red) == 429, "a full share")
        with service.client("blue") as blue:
            assert status(blue) == 200
        stack.close()
        with service.client("red") as again:
            wait_for(lambda: status(again) == 200, "its share")
