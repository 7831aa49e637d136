"""A door's loop: memory is returned in pieces, and no request leaves garbage that only a full
collection would find, which would stall others."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from images import write_image
from scripted import JSON, Heard, Running, decode_body, request, serving, wait_for

from service.doors.kit.upstream import trim
from service.errors import AttndError, UnknownSequence
from service.keys import line_of, new_key


async def test_a_door_returns_memory_one_piece_in_a_pass_of_the_loop() -> None:
    passes: list[int] = []
    number = 0

    def trim_piece(begin: int) -> int | None:
        passes.append(number)
        return begin + 1 if begin < 4 else None

    upstream: Any = SimpleNamespace(is_pinned=False, arena=SimpleNamespace(trim=trim_piece))
    trim(asyncio.get_running_loop(), upstream)
    while number < 9:
        number += 1
        await asyncio.sleep(0)
    assert len(passes) == 5 and len(set(passes)) == 5


# garbage

KEY = new_key()
WITH_KEY = {"authorization": f"Bearer {KEY}"}
READ_ONLY = new_key()
TIMES = 20

REQUESTS = {
    "an answer": request("/v1/decode", decode_body(), **WITH_KEY),
    "an answer in JSON": request("/v1/decode", b'{"layer": 0}', **WITH_KEY, content_type=JSON),
    "the engine's error": request("/v1/sequences/absent", method="GET", **WITH_KEY),
    "no key": request("/v1/decode", decode_body()),
    "a key without the scope": request(
        "/v1/decode", decode_body(), authorization=f"Bearer {READ_ONLY}"
    ),
    "no such path": request("/v1/nothing", **WITH_KEY),
    "no such method": request("/v1/decode", method="DELETE", **WITH_KEY),
    "no JSON": request("/v1/decode", b"{", **WITH_KEY, content_type=JSON),
    "a large declared length": request(
        "/v1/decode", decode_body(), **WITH_KEY, content_length=str(2**40), connection="close"
    ),
    "a body in chunks that are none": request(
        "/v1/decode", b"zz", **WITH_KEY, content_length="", transfer_encoding="chunked"
    ),
    "no image": request("/v1/decode", b"rubbish", **WITH_KEY),
    "a wrong type": request("/v1/decode", b"x", **WITH_KEY, content_type="text/plain"),
    "a wrong deadline": request("/v1/decode", decode_body(), **WITH_KEY, attnd_deadline_s="x"),
    "a bad head": b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n",
    "a wrong parameter": request("/v1/events?no=1", method="GET", **WITH_KEY),
    "a page": request("/health/ready", method="GET"),
}


def fails(heard: Heard) -> bytes | AttndError:
    if heard.operation == "get_sequence":
        return UnknownSequence("absent")
    if heard.operation == "events":
        return write_image({"events": [], "next": 0, "too_old": False}, {}, "response")
    return b""


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = tmp_path_factory.mktemp("keys")
    lines = (line_of(KEY, "a", ("read", "append")), line_of(READ_ONLY, "b", ("read",)))
    (directory / "keys").write_text("\n".join(lines) + "\n")
    options = ("--auth.keys-file", str(directory / "keys"))
    with serving(directory, *options, script=fails) as running:
        yield running


def send(door: Running, data: bytes, times: int) -> None:
    """Send a request some times over one connection."""
    with door.connect() as peer, suppress(ConnectionError):  # some responses end it
        for _ in range(times):
            peer.sendall(data)
            if not peer.recv(2**16):
                break
    wait_for(lambda: not door.door.connections, "the connection to end")


def garbage_of(work: Callable[[], None]) -> int:
    """Objects that `work` leaves to a full collection: the fewest of ten attempts, because other
    threads may leave some now and then."""
    found = []
    while len(found) < 10 and min(found, default=TIMES) >= TIMES:
        gc.collect()
        gc.disable()
        try:
            work()
            found.append(gc.collect())
        finally:
            gc.enable()
    return min(found)


@pytest.mark.parametrize(("connections", "requests"), [(1, TIMES), (TIMES, 1)])
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_leaves_no_cycle_of_references(
    keyed: Running, kind: str, connections: int, requests: int
) -> None:
    def send_all() -> None:
        for _ in range(connections):
            send(keyed, REQUESTS[kind], requests)

    send(keyed, REQUESTS[kind], requests)
    assert garbage_of(send_all) < TIMES, f"objects are left of {TIMES} requests"


def leave_a_call(door: Running) -> None:
    with door.connect() as peer:
        peer.sendall(REQUESTS["an answer"])
        wait_for(lambda: door.engine.waiting, "the call")


def leave_a_stream(door: Running) -> None:
    with door.connect() as peer:
        peer.sendall(request("/v1/events", method="GET", **WITH_KEY))
        assert peer.recv(2**16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("leave", [leave_a_call, leave_a_stream])
def test_a_client_that_leaves_leaves_no_cycle_of_references(
    keyed: Running, leave: Callable[[Running], None]
) -> None:
    def leave_all() -> None:
        for _ in range(TIMES):
            leave(keyed)
            wait_for(lambda: not (keyed.door.connections or keyed.engine.waiting), "the end")

    if leave is leave_a_call:
        keyed.engine.close_gate()
    try:
        leave(keyed)
        assert garbage_of(leave_all) < TIMES, f"objects are left of {TIMES} requests"
    finally:
        keyed.engine.open_gate()
