"""Room for bodies: within each caller's share, received into the arena, a little in a pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from images import write_image
from scripted import Running, decode_body, only, post, receive_all, request, serving, wait_for

from service.doors.http import bodies
from service.doors.http.bodies import BodyShares
from service.errors import Overloaded

MIB = 2**20
LIMITS = (
    *("--server.max-body-bytes", str(4 * MIB), "--server.max-answer-bytes", str(4 * MIB)),
    *("--server.max-inflight-bytes", str(16 * MIB), "--server.receive-timeout-s", "60"),
)
CHUNKED = {"content_length": "", "transfer_encoding": "chunked", "connection": "close"}
LARGE = decode_body(rows=50_000)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("road"), *LIMITS) as running:
        yield running


def chunks(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"


def test_a_caller_s_large_bodies_that_do_not_come_take_half_of_the_arena(small: Running) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            peer = stack.enter_context(small.connect())
            peer.sendall(request("/v1/decode", content_length=str(4 * MIB)))
        wait_for(lambda: len(small.door.receiving) == 2, "both heads to be read")
        with small.client() as client:
            refused = post(client, "/v1/decode", LARGE)
        assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
        assert "server.max_inflight_bytes" in refused.json()["detail"]
        reply = only(small.say(request("/v1/decode", decode_body(), connection="close")))
        assert reply.status == 200, "small ones count for nothing"
    wait_for(lambda: not small.door.active, "them to close")
    assert small.door.shares.by_caller == {}
    assert only(small.say(request("/v1/decode", LARGE, connection="close"))).status == 200


@pytest.mark.parametrize("form", ["declared", "chunks", "short chunks"])
@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_a_large_body_comes_through_whole(small: Running, form: str, pieces: int) -> None:
    rng = np.random.default_rng(1)
    q = rng.integers(0, 255, 3 * MIB, np.uint8).view(np.float32).reshape(-1, 1, 8)
    body = write_image({"layer": 0, "sequences": ["a"]}, {"q": q})
    if form == "declared":
        sent = request("/v1/decode", body, connection="close")
    else:
        sent = request("/v1/decode", chunks(body, 2**20 if form == "chunks" else 999), **CHUNKED)
    small.engine.heard.clear()
    with small.connect() as peer:
        size = -(-len(sent) // pieces)
        for at in range(0, len(sent), size):
            peer.sendall(sent[at : at + size])
        assert only(receive_all(peer)).status == 200
    (heard,) = small.engine.heard
    assert hashlib.sha256(heard.image).digest() == hashlib.sha256(body).digest()


def test_a_pass_of_the_loop_receives_a_limited_number_of_bytes(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "PASS_BYTES", 2**18)
    budget = bodies.ReadBudget(small.door.loop)
    monkeypatch.setattr(small.door, "read_budget", budget)
    passes = [0]
    is_spent, renew = budget.is_spent, budget._renew
    monkeypatch.setattr(budget, "_renew", lambda: (passes.append(0), renew())[1])

    def counted(nbytes: int, one: Any) -> bool:
        passes[-1] += nbytes
        return is_spent(nbytes, one)

    monkeypatch.setattr(budget, "is_spent", counted)
    with ExitStack() as stack:
        peers = [stack.enter_context(small.connect()) for _ in range(4)]
        for peer in peers:
            peer.sendall(request("/v1/decode", LARGE, connection="close"))
        for peer in peers:
            assert only(receive_all(peer)).status == 200
    assert sum(passes) > 3 * len(LARGE)
    assert max(passes) <= 2**18 + 4 * bodies.LEAST_BYTES


def test_shares_of_the_arena() -> None:
    book = BodyShares(64 * MIB)
    book.change("a", 0, 60 * MIB)  # it is alone
    with pytest.raises(Overloaded):
        book.change("a", 0, MIB)
    book.change("b", 0, 16 * MIB)
    book.change("b", 0, 16 * MIB)
    with pytest.raises(Overloaded):
        book.change("b", 16 * MIB, 17 * MIB)
    book.change("a", 60 * MIB, 0)
    assert book.by_caller == {"b": 32 * MIB}
