"""Room for bodies that are declared and do not come: none of it is taken from others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from typing import Any

import numpy as np
import pytest
from images import write_image
from scripted import Running, decode_body, only, receive_all, request, serving, wait_for

from service.doors.http.protocol import intake
from service.doors.http.protocol.bodies import FIRST_BYTES, BodyShares
from service.doors.http.protocol.chunks import LINES_AT_ONCE, Chunks
from service.errors import Overloaded

MIB = 2**20
LIMIT = 16 * MIB
LIMITS = (
    *("--server.max-body-bytes", str(4 * MIB), "--server.max-answer-bytes", str(4 * MIB)),
    *("--server.max-inflight-bytes", str(LIMIT), "--server.receive-timeout-s", "60"),
)
BODY = decode_body()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("road"), *LIMITS) as running:
        yield running


def test_heads_without_bodies_cost_no_other_client_a_429(small: Running) -> None:
    with ExitStack() as stack:
        for _ in range(98):
            peer = stack.enter_context(small.connect())
            peer.sendall(request("/v1/decode", content_length=str(4 * MIB)))
        wait_for(lambda: small.door.active == 98, "all heads to be read")
        for _ in range(3):
            reply = only(small.say(request("/v1/decode", BODY, connection="close")))
            assert reply.status == 200, reply.body
        large = decode_body(rows=80_000)
        assert len(large) > 2 * MIB
        assert only(small.say(request("/v1/decode", large, connection="close"))).status == 200
    wait_for(lambda: not small.door.active, "them to close")
    assert (small.door.shares.total, small.door.shares.by_caller) == (0, {})


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_pass_of_the_loop_receives_a_limited_number_of_bytes(
    small: Running, monkeypatch: pytest.MonkeyPatch, is_chunked: bool
) -> None:
    monkeypatch.setattr(intake, "PASS_BYTES", 2**18)
    budget = intake.ReadBudget(small.door.loop)
    monkeypatch.setattr(small.door, "read_budget", budget)
    passes = [0]
    is_spent, renew = budget.is_spent, budget._renew
    monkeypatch.setattr(budget, "_renew", lambda: (passes.append(0), renew())[1])

    def counted(nbytes: int, connection: Any) -> bool:
        passes[-1] += nbytes
        return is_spent(nbytes, connection)

    monkeypatch.setattr(budget, "is_spent", counted)
    large = decode_body(rows=50_000)
    sent = request("/v1/decode", large, connection="close")
    if is_chunked:
        headers = {"content_length": "", "transfer_encoding": "chunked", "connection": "close"}
        sent = request("/v1/decode", b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large), **headers)
    with ThreadPoolExecutor(4) as pool:
        for reply in pool.map(small.say, [sent] * 4):
            assert only(reply).status == 200, only(reply).body
    assert sum(passes) > 3 * len(large)
    assert max(passes) <= 2**18 + 4 * 2**16, (
        "a read before the limit, and one of each of the others"
    )


def test_a_pass_of_the_loop_reads_a_limited_number_of_chunks(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, has_ended = [0], Event()
    on_line = Chunks.on_line

    def count_passes() -> None:
        passes.append(0)
        if not has_ended.is_set():
            small.door.loop.call_soon(count_passes)

    def counted(chunks: Chunks, line: bytes) -> None:
        passes[-1] += 1
        on_line(chunks, line)

    monkeypatch.setattr(Chunks, "on_line", counted)
    small.on_loop(count_passes)
    body = decode_body(rows=500)
    headers = {"content_length": "", "transfer_encoding": "chunked", "connection": "close"}
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    small.engine.heard.clear()
    with ThreadPoolExecutor(4) as pool:
        for reply in pool.map(small.say, [request("/v1/decode", chunked, **headers)] * 4):
            assert only(reply).status == 200, only(reply).body
    has_ended.set()
    assert [heard.image for heard in small.engine.heard] == [body] * 4
    assert sum(passes) == 4 * (2 * len(body) + 2)
    assert max(passes) <= 4 * 2 * LINES_AT_ONCE, "bytes that waited, and bytes that just came"


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_a_body_whose_room_grows_comes_through_whole(small: Running, pieces: int) -> None:
    rng = np.random.default_rng(1)
    q = rng.integers(0, 255, 3 * MIB, np.uint8).view(np.float32).reshape(-1, 1, 8)
    body = write_image({"layer": 0, "sequences": ["a"]}, {"q": q})
    sent = request("/v1/decode", body, connection="close")
    with ExitStack() as stack:
        for _ in range(8):  # so that there is none for declared lengths
            peer = stack.enter_context(small.connect())
            peer.sendall(request("/v1/decode", content_length=str(2 * MIB)))
        wait_for(lambda: small.door.active == 8, "all heads to be read")
        small.engine.heard.clear()
        with small.connect() as peer:
            size = -(-len(sent) // pieces)
            for at in range(0, len(sent), size):
                peer.sendall(sent[at : at + size])
            assert only(receive_all(peer)).status == 200
        (heard,) = small.engine.heard
        assert hashlib.sha256(heard.image).digest() == hashlib.sha256(body).digest()
    wait_for(lambda: not small.door.active, "them to close")


def test_room_for_declared_lengths_is_shared() -> None:
    book = BodyShares(64 * MIB)
    assert book.first_room("a", 32 * MIB) == 32 * MIB, "alone"
    book.change("a", 0, 8 * MIB)
    assert book.first_room("a", MIB) == FIRST_BYTES, "a has its eighth"
    assert book.first_room("b", 8 * MIB) == 8 * MIB
    assert book.first_room("b", 9 * MIB) == FIRST_BYTES
    assert book.first_room("b", 100) == 100
    book.change("a", 8 * MIB, 60 * MIB)  # it has come, and there is no other of a's
    with pytest.raises(Overloaded):
        book.change("a", 0, MIB)
    book.change("a", 0, FIRST_BYTES)
    assert book.total == 60 * MIB, "small ones count for nothing"
    book.change("a", FIRST_BYTES, 0)
    book.change("a", 60 * MIB, 0)
    assert (book.total, book.by_caller) == (0, {})
