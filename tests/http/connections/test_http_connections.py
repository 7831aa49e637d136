"""Connections: what they may bring, how long they may take, and how odd requests are answered."""

from __future__ import annotations

import json
import logging
import re
import select
import socket
import tracemalloc
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from http_messages import JSON, SAFETENSORS, check_problem
from http_service import Service, serving

from service.logs import ConsoleLines
from tests.harness.waiting import WAIT_S, wait_for


@dataclass(frozen=True)
class Reply:
    """One response out of a stream."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json", self
        document: dict[str, Any] = json.loads(self.body)
        assert document["status"] == self.status and document["detail"], self
        return document


def replies(data: bytes) -> list[Reply]:
    """All responses of a stream that has ended; interim ones are passed over."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        if int(first.split(" ")[1]) < 200:
            continue
        headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
        assert headers["x-request-id"] and headers["server-timing"], head
        length = int(headers.get("content-length", "0"))
        found.append(Reply(int(first.split(" ")[1]), headers, data[:length]))
        data = data[length:]
    return found


def say(service: Service, data: bytes, *, half_close: bool = False) -> list[Reply]:
    """Send bytes on a connection of their own; all that is answered until it is closed."""
    with service.connect() as peer:
        peer.sendall(data)
        if half_close:
            peer.shutdown(socket.SHUT_WR)
        return replies(receive_all(peer))


def receive_all(peer: socket.socket) -> bytes:
    data = b""
    while piece := peer.recv(65536):
        data += piece
    return data


def request(method: str, path: str, body: bytes = b"", *lines: str, close: bool = True) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "host: localhost", *lines]
    if body:
        head += [f"content-type: {JSON}", f"content-length: {len(body)}"]
    if close and not any(one.lower().startswith("connection") for one in lines):
        head.append("connection: close")
    return "\r\n".join((*head, "", "")).encode() + body


def test_a_post_that_offers_http_2_is_answered_in_http_1(
    service: Service, client: httpx.Client
) -> None:
    """As Java's HTTP client and `curl --http2` do."""
    offers = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQ")
    body = b'{"sequences": [{"id": "upgraded"}]}'
    with service.connect() as peer:
        peer.sendall(request("POST", "/v1/sequences", body, *offers))
        peer.sendall(request("GET", "/health/live"))
        made, live = replies(receive_all(peer))
    assert (made.status, live.status) == (201, 200), made
    assert client.get("/v1/sequences/upgraded").status_code == 200


def test_a_broken_request_behind_a_good_one_is_reported_and_rings_no_alarm(
    service: Service, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    before = client.get("/metrics").text.count('code="internal"')
    good = request("GET", "/v1/info", close=False)
    for broken in (b"\0\0\0\0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/merge\r\n\r\n"):
        reply = say(service, good + broken)
        assert [one.status for one in reply] == [200, 400], (broken, reply)
        assert reply[1].problem["code"] == "malformed_request"
        assert reply[1].headers["connection"] == "close"
    assert client.get("/metrics").text.count('code="internal"') == before
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR], caplog.text


@pytest.mark.parametrize(
    "data",
    [
        b"rubbish\r\n\r\n",
        b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        b"POST /v1/merge HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
        b"POST /v1/merge HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/merge HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n"
        b"transfer-encoding: chunked\r\n\r\n",
        b"POST /v1/merge HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: gzip, chunked\r\n\r\n",
    ],
)
def test_what_is_no_http_is_reported_as_a_problem(service: Service, data: bytes) -> None:
    (reply,) = say(service, data)
    assert (reply.status, reply.problem["code"]) == (400, "malformed_request"), reply


@pytest.mark.parametrize(
    "lines", [["x: " + "y" * 70_000], [f"h{i}: 1" for i in range(101)]], ids=["bytes", "lines"]
)
def test_headers_beyond_the_limits_are_refused(service: Service, lines: list[str]) -> None:
    (reply,) = say(service, request("GET", "/v1/info", b"", *lines))
    assert reply.status == 431 and reply.problem["code"] == "headers_too_large", reply


def test_endless_headers_are_cut_off_and_not_kept(service: Service) -> None:
    sent = 0
    tracemalloc.start()
    with service.connect() as peer, suppress(BrokenPipeError, ConnectionResetError):
        peer.sendall(b"GET /v1/info HTTP/1.1\r\n")
        while sent < 10_000_000:
            sent += peer.send(b"x: y\r\n" * 1000)
            if select.select([peer], [], [], 0)[0] and (answer := peer.recv(65536)):
                assert replies(answer)[0].problem["code"] == "headers_too_large"
                break
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sent < 5_000_000, "the error came only at the end"
    assert peak < 2**22, f"{peak} bytes were kept"


def test_connections_that_send_nothing_or_too_slowly_end() -> None:
    arguments = ("--server.idle-timeout-s", "0.6", "--server.receive-timeout-s", "0.6")
    with serving(*arguments) as service, ExitStack() as open_ones:
        silent, slow, cut = (open_ones.enter_context(service.connect()) for _ in range(3))
        slow.sendall(b"GET /v1/info HTTP/1.1\r\nhost:")
        cut.sendall(request("POST", "/v1/sequences", b'{"sequences": [{}]}')[:-5])
        assert receive_all(silent) == b"", "nothing was asked"
        for peer in (slow, cut):
            (reply,) = replies(receive_all(peer))
            assert (reply.status, reply.problem["code"]) == (408, "request_timeout"), reply
        wait_for(lambda: not service.door.connections, "all of them to go")


def test_a_client_that_closes_its_side_gets_its_answer(service: Service) -> None:
    body = b'{"sequences": [{"id": "half"}]}'
    made = say(service, request("POST", "/v1/sequences", body, close=False), half_close=True)
    deleted = say(service, request("DELETE", "/v1/sequences/half", close=False), half_close=True)
    assert [one.status for one in (*made, *deleted)] == [201, 204]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/v1/info", "/metrics"])
def test_head_is_answered_as_get_without_a_body(
    service: Service, client: httpx.Client, path: str
) -> None:
    whole, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    (reply,) = say(service, request("HEAD", path))
    assert reply.status == 200


def test_the_page_of_the_api_needs_no_other_host(client: httpx.Client) -> None:
    page = client.get("/docs").text
    needed = re.findall(r"""(?:src|href)=["']([^"']+)["']""", page)
    assert len(needed) >= 3, page
    for asset in needed:
        assert "//" not in asset, f"{asset} is of another host"
        reply = client.get(f"/{asset.lstrip('/')}")
        assert reply.status_code == 200 and len(reply.content) > 500, asset
    assert "https://" not in re.sub(r"<!--.*?-->", "", page, flags=re.S), page


def test_the_log_names_the_peer_and_cannot_be_forged(
    service: Service, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "attnd.access")
    path = "/v1/nothing%20status=200%20code=ok%2212:00:00.000%20info"
    reply = client.get(path, headers={"x-request-id": "forged"})
    check_problem(reply, 404, "not_found")
    say(service, b"rubbish\r\n\r\n")
    wait_for(lambda: len(access(caplog)) >= 2, "the log")
    forged, rubbish = access(caplog)[:2]
    record = logging.makeLogRecord({"msg": "request", "each": [forged]})
    lines = ConsoleLines("http-0").format(record).splitlines()
    assert len(lines) == 1, lines
    outside = re.sub(r'"[^"]*"', '""', lines[0])
    assert re.findall(r" status=(\S+)", outside) == ["404"], lines
    assert re.findall(r" code=(\S+)", outside) == ["not_found"], lines
    for fields in (forged, rubbish):
        assert re.fullmatch(r"127\.0\.0\.1:\d+", fields["peer"]), fields


def access(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [one for one in caplog.records if one.name == "attnd.access"]
    return [fields for record in records for fields in record.__dict__["each"]]


def test_a_body_in_chunks_is_read_as_one(service: Service, client: httpx.Client) -> None:
    body = b'{"sequences": [{"id": "chunky"}]}'

    def chunks() -> Any:
        for at in range(0, len(body), 5):
            yield body[at : at + 5]

    reply = client.post("/v1/sequences", content=chunks(), headers={"content-type": JSON})
    assert reply.status_code == 201, reply.text


def test_a_client_that_waits_for_continue_is_asked_to_go_on_or_why_not(service: Service) -> None:
    expect = "expect: 100-continue"
    with service.connect() as peer:
        peer.settimeout(WAIT_S)
        body = b'{"sequences": [{"id": "patient"}]}'
        head = request("POST", "/v1/sequences", body, expect)
        peer.sendall(head[: -len(body)])
        assert peer.recv(100).startswith(b"HTTP/1.1 100 ")
        peer.sendall(body)
        (reply,) = replies(receive_all(peer))
        assert reply.status == 201
    lines = (expect, f"content-type: {SAFETENSORS}", "content-length: 1000000000")
    (reply,) = say(service, request("POST", "/v1/merge", b"", *lines))
    assert reply.status == 413, "before a byte of the body was sent"
    with service.client() as client:
        assert client.delete("/v1/sequences/patient").status_code == 204
