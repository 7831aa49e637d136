"""A door's loop: long work has one piece in a pass, calls without an answer end in time, and no
request leaves garbage that only a full collection would find, which would stall others."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from images import write_image
from scripted import JSON, Heard, Running, decode_body, request, serving, wait_for

from service.doors.kit.pieces import FairLock, OneByOne
from service.doors.kit.upstream import trim
from service.errors import AttndError, UnknownSequence
from service.keys import line_of, new_key


async def test_requests_that_arrive_together_do_not_share_a_pass_of_the_loop() -> None:
    passes: list[int] = []
    number = 0

    def work(pieces: int) -> Generator[None, None, int]:
        for _ in range(pieces):
            passes.append(number)
            yield
        return pieces

    turns = OneByOne()
    tasks = [asyncio.create_task(turns.do(work(3))) for _ in range(4)]
    while not all(task.done() for task in tasks):
        number += 1
        await asyncio.sleep(0)
    assert [task.result() for task in tasks] == [3] * 4
    assert len(passes) == 12 and len(set(passes)) == 12


async def hold(lock: FairLock, caller: str, number: int, held: list[int]) -> None:
    async with lock.turn(caller):
        held.append(number)
        await asyncio.sleep(0)


async def test_callers_take_turns_in_holding_a_lock() -> None:
    lock, held = FairLock(), list[int]()
    async with asyncio.timeout(10):
        await asyncio.gather(*(hold(lock, "aaab"[n], n, held) for n in range(4)))
    assert (held, lock.is_held) == ([0, 1, 3, 2], False)


@pytest.mark.parametrize("passes", range(8))
@pytest.mark.parametrize("number", range(3))
async def test_a_task_that_is_cancelled_keeps_no_other_from_a_lock(
    number: int, passes: int
) -> None:
    lock, held = FairLock(), list[int]()
    tasks = [asyncio.create_task(hold(lock, "a", n, held)) for n in range(3)]
    for _ in range(passes):
        await asyncio.sleep(0)
    tasks[number].cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert {0, 1, 2} - {number} <= set(held)
    assert not lock.is_held


async def test_callers_take_turns_in_long_work_and_each_gets_its_own_result_or_error() -> None:
    done: list[str] = []

    def work(name: str, pieces: int) -> Generator[None, None, str]:
        for _ in range(pieces):
            yield
        done.append(name)
        if name == "fails":
            raise ValueError(name)
        return name

    turns = OneByOne()

    async def of(caller: str, name: str, pieces: int) -> str:
        return await turns.do(work(name, pieces), caller)

    tasks = [asyncio.create_task(of("many", f"long {n}", 100)) for n in range(5)]
    single = asyncio.create_task(of("one", "single", 10))
    fails = asyncio.create_task(of("one", "fails", 1))
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert await single == "single" and done[0] == "single"
    with pytest.raises(ValueError, match="fails"):
        await fails
    assert done == ["single", "fails"], "they wait for none of the many"
    left = [tasks[0], *tasks[2:]]
    assert await asyncio.gather(*left) == ["long 0", "long 2", "long 3", "long 4"]
    assert "long 1" not in done, "its caller has left"
    assert await turns.do(work("short", 0)) == "short"


def test_an_error_of_long_work_is_in_no_cycle_of_references() -> None:
    class Failed(Exception):
        pass

    errors: list[weakref.ref[Failed]] = []

    def failing(pieces: int) -> Generator[None, None, None]:
        for _ in range(pieces):
            yield
        error = Failed()
        errors.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    async def main() -> None:
        turns = OneByOne()
        for pieces in (0, 3):
            with suppress(Failed):
                await turns.do(failing(pieces))
        await asyncio.sleep(0)

    gc.disable()
    try:
        asyncio.run(main())
        assert len(errors) == 2
        assert not any(ref() for ref in errors)
    finally:
        gc.enable()


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
        "/v1/decode", decode_body(), **WITH_KEY, content_length=str(2**40)
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
    "too many connections": request("/v1/decode", decode_body(), **WITH_KEY),
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
    with door.connect() as peer:
        peer.sendall(data * times)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(2**16):
            pass
    wait_for(lambda: not door.door.connections, "the connection to end")


@pytest.mark.parametrize(("connections", "requests"), [(1, TIMES), (TIMES, 1)])
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_leaves_no_cycle_of_references(
    keyed: Running, kind: str, connections: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "too many connections":
        monkeypatch.setattr(keyed.door.busy, "limit", 0)
    send(keyed, REQUESTS[kind], requests)
    gc.collect()
    gc.disable()
    try:
        for _ in range(connections):
            send(keyed, REQUESTS[kind], requests)
        found = gc.collect()
    finally:
        gc.enable()
    assert found < TIMES, f"{found} objects are left of {TIMES} requests"


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
    if leave is leave_a_call:
        keyed.engine.close_gate()
    try:
        for number in range(TIMES + 1):
            leave(keyed)
            wait_for(lambda: not (keyed.door.connections or keyed.engine.waiting), "the end")
            if not number:
                gc.collect()
                gc.disable()
        found = gc.collect()
    finally:
        gc.enable()
        keyed.engine.open_gate()
    assert found < TIMES, f"{found} objects are left of {TIMES} requests"
