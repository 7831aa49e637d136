"""Connections: malformed requests, limits of many kinds, and clients that leave."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from scripted import (
    Running,
    decode_body,
    only,
    post,
    receive_all,
    replies,
    request,
    serving,
    wait_for,
)

from service.doors.http.endpoints.operation import MAX_JSON_BYTES

BODY = decode_body()
GOOD = request("/v1/decode", BODY)


# malformed requests


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\na: b\r\n folded\r\n\r\n",
        b"GET / HTTP/3.0\r\n\r\n",
        b"CONNECT other:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /v1/decode HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/decode HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/decode HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1e3\r\n\r\n",
        b"POST /v1/decode HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/decode HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_get_400_and_the_connection_closes(
    door: Running, data: bytes
) -> None:
    reply = only(door.say(data))
    assert (reply.status, reply.problem["code"]) == (400, "malformed_request")
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 1000])
def test_a_request_may_come_in_any_pieces(door: Running, pieces: int) -> None:
    data = b"\r\n\r\n" + request("/v1/decode", BODY, connection="close")
    size = -(-len(data) // pieces)
    with door.connect() as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), size):
            peer.sendall(data[at : at + size])
            if pieces < 10:
                time.sleep(0.01)
        assert only(receive_all(peer)).status == 200


def test_requests_sent_ahead_are_answered_in_their_order(door: Running) -> None:
    bodies = [decode_body(rows) for rows in (1, 20_000, 3, 4)]
    call = b"".join(request("/v1/decode", body) for body in bodies)
    found = replies(door.say(call + request("/v1/pool", method="GET", connection="close")))
    assert [reply.status for reply in found] == [200] * 5
    assert [heard.image for heard in door.engine.heard[:4]] == bodies


def test_chunks_that_are_none_end_the_connection(door: Running) -> None:
    headers = {"content_length": "", "transfer_encoding": "chunked"}
    reply = only(door.say(request("/v1/decode", b"zz\r\n", **headers)))
    assert (reply.status, reply.problem["code"]) == (400, "malformed_request")


def test_an_upgrade_is_ignored_or_refused_with_a_body(door: Running) -> None:
    asks = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMA"}
    with door.connect() as peer:
        for _ in range(2):
            peer.sendall(request("/v1/pool", method="GET", content_length="", **asks))
            assert peer.recv(2**16).startswith(b"HTTP/1.1 200")
    for length in ("10", "100000"):
        reply = only(door.say(request("/v1/decode", **{**asks, "content_length": length})))
        assert reply.status == 400 and "Upgrade" in reply.problem["detail"]


def test_a_client_of_http_1_0_is_answered_and_closed(door: Running) -> None:
    data = GOOD.replace(b"HTTP/1.1", b"HTTP/1.0")
    reply = only(door.say(data))
    assert (reply.status, reply.headers["connection"]) == (200, "close")


# limits on heads


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A door with small limits and short timeouts."""
    limits = {
        "max-header-bytes": "2048",
        "max-connections": "4",
        "idle-timeout-s": "0.6",
        "receive-timeout-s": "0.6",
        "max-body-bytes": "1048576",
    }
    given = [text for name, value in limits.items() for text in (f"--server.{name}", value)]
    with serving(tmp_path_factory.mktemp("tight"), *given) as running:
        yield running


@pytest.fixture
def quiet(tight: Running) -> Running:
    """Without the connections of the test before."""
    wait_for(lambda: not tight.door.connections, "the door to be left alone")
    tight.engine.heard.clear()
    return tight


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (
            b"GET /" + b"x" * 4000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
            "server.max_header_bytes",
        ),
        (b"GET /" + b"x" * 4000, "server.max_header_bytes"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + b"x" * 4000, "server.max_header_bytes"),
    ],
)
def test_a_head_beyond_the_limits_is_refused(quiet: Running, data: bytes, named: str) -> None:
    reply = only(quiet.say(data))
    assert (reply.status, reply.problem["code"]) == (431, "headers_too_large")
    assert named in reply.problem["detail"]


def test_a_head_as_large_as_the_limits_is_read(quiet: Running) -> None:
    start = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + b"c: "
    data = start + b"x" * (2048 - len(start) - 4) + b"\r\n\r\n"
    assert only(quiet.say(data)).status == 200


# limits on bodies


def test_a_body_declared_too_large_is_refused_before_it_is_sent(quiet: Running) -> None:
    with quiet.connect() as peer:
        peer.sendall(request("/v1/decode", content_length="1000000000"))
        reply = only(receive_all(peer))
    assert (reply.status, reply.problem["code"]) == (413, "body_too_large")
    assert (reply.problem["size"], reply.problem["limit"]) == (1_000_000_000, 2**20)


def test_a_client_that_sends_a_whole_refused_body_still_gets_to_read_why(quiet: Running) -> None:
    with quiet.client() as client:
        response = post(client, "/v1/decode", bytes(20 * 2**20))
        assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
        assert client.get("/health/live").status_code == 200


def test_the_rest_of_a_short_refused_body_does_not_cost_the_connection(quiet: Running) -> None:
    refused = request("/v1/decode", bytes(100_000), content_type="text/plain")
    found = replies(quiet.say(refused + request("/v1/decode", BODY, connection="close")))
    assert [reply.status for reply in found] == [415, 200]


def test_a_body_on_a_get_is_passed_over(quiet: Running) -> None:
    first = request("/v1/pool", bytes(100_000), method="GET")
    found = replies(quiet.say(first + request("/v1/decode", BODY, connection="close")))
    assert [reply.status for reply in found] == [200, 200]


def test_json_has_a_limit_of_its_own(quiet: Running) -> None:
    with quiet.client() as client:
        text = b'{"sequences": [' + b" " * 600_000 + b"{}]}"
        headers = {"content-type": "application/json"}
        problem = client.post("/v1/sequences", content=text, headers=headers).json()
        assert (problem["code"], problem["limit"]) == ("body_too_large", MAX_JSON_BYTES)


@pytest.mark.parametrize("rows", [1, 20_000])
def test_a_client_that_waits_for_100_continue_gets_it_when_its_head_is_right(
    quiet: Running, rows: int
) -> None:
    body = decode_body(rows)
    with quiet.connect() as peer:
        peer.sendall(request("/v1/decode", expect="100-Continue", content_length=str(len(body))))
        assert peer.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.sendall(body + request("/v1/pool", method="GET", connection="close"))
        assert [reply.status for reply in replies(receive_all(peer))] == [200, 200]


def test_a_client_that_waits_for_100_continue_is_refused_instead(quiet: Running) -> None:
    data = request("/v1/nothing", expect="100-continue", content_length="100")
    assert quiet.say(data).startswith(b"HTTP/1.1 404"), "no interim answer"


# limits on time


@pytest.mark.parametrize("begun", [b"", GOOD[:40]], ids=["silent", "half a head"])
def test_a_connection_without_a_request_ends_when_it_is_silent(
    quiet: Running, begun: bytes
) -> None:
    began = time.monotonic()
    assert quiet.say(begun) == b""
    assert 0.3 < time.monotonic() - began < 5


def test_an_unfinished_body_times_out_with_408_and_is_counted(quiet: Running) -> None:
    before = quiet.counted("request_timeout", "decode")
    reply = only(quiet.say(GOOD[:-10]))
    assert (reply.status, reply.problem["code"]) == (408, "request_timeout")
    assert "server.receive_timeout_s" in reply.problem["detail"]
    wait_for(lambda: quiet.counted("request_timeout", "decode") == before + 1, "the count")
    assert quiet.engine.heard == []


@pytest.mark.parametrize("length", [500, 200_000])
def test_a_body_that_drips_is_no_excuse(quiet: Running, length: int) -> None:
    with quiet.connect() as peer:
        peer.sendall(request("/v1/decode", b"x", content_length=str(length)))
        began = time.monotonic()
        peer.settimeout(0.05)
        data = b""
        while not data and time.monotonic() < began + 10:
            with suppress(TimeoutError):
                data = peer.recv(2**16)
            peer.sendall(b"x")
    assert data.startswith(b"HTTP/1.1 408") and time.monotonic() - began < 8


def test_an_idle_connection_is_closed_without_a_word(quiet: Running) -> None:
    assert quiet.say(b"") == b""
    (reply,) = replies(quiet.say(GOOD))
    assert reply.status == 200 and "connection" not in reply.headers


def test_a_long_wait_for_the_engine_is_no_idleness(quiet: Running) -> None:
    quiet.engine.close_gate()
    with quiet.connect() as peer:
        peer.sendall(request("/v1/decode", BODY, connection="close"))
        time.sleep(1.5)
        quiet.engine.open_gate()
        assert only(receive_all(peer)).status == 200


def test_a_client_that_does_not_read_its_answer_is_dropped(quiet: Running) -> None:
    with quiet.connect() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with suppress(ConnectionError):
            for _ in range(30):
                peer.sendall(request("/v1/decode", decode_body(20_000)))
        wait_for(lambda: not quiet.door.connections, "the door to close it")


# limits on number


def test_a_connection_beyond_the_limit_gets_429_if_none_is_idle(quiet: Running) -> None:
    quiet.engine.close_gate()
    peers = [quiet.connect() for _ in range(4)]
    try:
        for peer in peers:
            peer.sendall(GOOD)
        wait_for(lambda: len(quiet.door.active) == 4, "all to wait for their answers")
        reply = only(quiet.say(b""))
        assert (reply.status, reply.problem["code"]) == (429, "overloaded")
        assert reply.headers["retry-after"] == "1"
        assert "server.max_connections" in reply.problem["detail"]
        quiet.engine.open_gate()
        for peer in peers:
            assert peer.recv(12) == b"HTTP/1.1 200", "open ones are still served"
    finally:
        quiet.engine.open_gate()
        for peer in peers:
            peer.close()
    wait_for(lambda: not quiet.door.connections, "them to close")
    with quiet.client() as client:
        assert client.get("/health/live").status_code == 200


ASK = request("/health/live", method="GET", content_length="")
FEW = ("--server.max-connections", "4")


def is_open(peer: socket.socket) -> bool:
    """Whether the door answers on a connection."""
    try:
        peer.sendall(ASK)
        return peer.recv(4096).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False


BEGUN = {
    "silent": b"",
    "slow head": b"GET / HTTP/1.1\r\nx: y",
}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_connections_without_a_request_give_place_to_new_ones(tmp_path: Path, begun: bytes) -> None:
    with serving(tmp_path, *FEW) as running, ExitStack() as stack:
        served = stack.enter_context(running.connect())
        assert is_open(served)
        for _ in range(20):
            stack.enter_context(running.connect()).sendall(begun)
        assert is_open(stack.enter_context(running.connect()))
        assert len(running.door.connections) <= 4


def test_idle_connections_of_the_host_with_the_most_give_place_first(tmp_path: Path) -> None:
    with serving(tmp_path, *FEW) as running, ExitStack() as stack:
        near = ("127.0.0.1", running.port)
        alone = stack.enter_context(
            socket.create_connection(near, 5, source_address=("127.0.0.2", 0))
        )
        assert is_open(alone)
        many = [stack.enter_context(running.connect()) for _ in range(8)]
        assert is_open(many[-1]) and is_open(alone)
        assert not all(is_open(one) for one in many)  # those accepted at once are equally idle


# clients that leave


@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_leaves_takes_its_call_back(door: Running, resets: bool) -> None:
    before = door.counted("client_gone", "decode")
    door.engine.close_gate()
    with door.connect() as peer:
        peer.sendall(GOOD)
        wait_for(lambda: door.engine.waiting, "the call")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", resets, 0))
    wait_for(lambda: door.engine.cancelled, "the call to be taken back")
    wait_for(lambda: door.counted("client_gone", "decode") == before + 1, "the count")


def test_a_client_that_hangs_up_in_the_middle_of_its_body_leaves_nothing(door: Running) -> None:
    before = door.counted("client_gone", "decode")
    free = door.door.link.arena.slots.free()
    with door.connect() as peer:
        peer.sendall(request("/v1/decode", bytes(1000), content_length="10000000"))
        wait_for(lambda: door.door.link.arena.slots.free() < free, "its slot")
    wait_for(lambda: door.door.link.arena.slots.free() >= free, "its slot to be free again")
    wait_for(lambda: door.counted("client_gone", "decode") == before + 1, "the count")


def test_it_serves_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with serving(tmp_path, uds=path) as running:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://attnd") as client:
            assert post(client, "/v1/decode", BODY).status_code == 200
        running.engine.close_gate()
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(path))
            peer.sendall(GOOD)
            wait_for(lambda: running.engine.waiting, "the call")
        wait_for(lambda: running.engine.cancelled, "the call to be taken back")
