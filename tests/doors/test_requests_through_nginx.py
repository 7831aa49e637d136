"""Slow, silent and huge requests end at nginx with `deploy/nginx.conf`; events pass at once."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from scripted import WAIT_S, Running, decode_body, post, receive_all, request, wait_for
from test_streams import Events

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed"),
]


@pytest.fixture(scope="module")
def proxy(shared: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of nginx before the module's door, without TLS and with a shorter timeout."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONFIGURATION.read_text()
    for written, ours in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{port};"),
        ("ssl_certificate /etc/nginx/attnd.pem;", ""),
        ("ssl_certificate_key /etc/nginx/attnd.key;", ""),
        ("server 127.0.0.1:8080;", f"server 127.0.0.1:{shared.port};"),
        ("client_header_timeout 10s;", "client_header_timeout 1s;"),
        ("client_body_timeout 30s;", "client_body_timeout 1s;"),
        ("http {", f"pid {folder}/pid;\nerror_log {folder}/errors;\nhttp {{\naccess_log off;"),
        ("limit_conn_zone", f"client_body_temp_path {folder}/bodies;\nlimit_conn_zone"),
    ):
        assert text.count(written) == 1, written
        text = text.replace(written, ours)
    workers = "" if os.geteuid() else "user root;\n"  # others may not write to the folder
    (folder / "nginx.conf").write_text(workers + text)
    command = ["nginx", "-c", folder / "nginx.conf", "-e", folder / "errors", "-g", "daemon off;"]
    with subprocess.Popen(command) as running:
        try:
            wait_for(lambda: running.poll() is not None or is_up(port), "nginx")
            yield port
        finally:
            running.terminate()
            running.wait(WAIT_S)


def is_up(port: int) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health/live").is_success
    return False


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def test_requests_of_all_sizes_pass(door: Running, proxy: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{proxy}") as client:
        for rows in (1, 10_000, 200_000):
            body = decode_body(rows)
            assert post(client, "/v1/decode", body).content[-32:] == body[-32:]


@pytest.mark.parametrize("drips", [b"", b"x"], ids=["silent", "slow"])
def test_a_head_that_does_not_come_ends_at_nginx(door: Running, proxy: int, drips: bytes) -> None:
    before = len(door.door.connections)
    began = time.monotonic()
    with connect(proxy) as peer:
        peer.settimeout(0.05)
        peer.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n" if drips else b"")
        while time.monotonic() < began + 10:
            with suppress(TimeoutError):
                try:
                    peer.sendall(drips)
                    assert not peer.recv(1)
                except ConnectionError:
                    pass
                break
    assert time.monotonic() - began < 5
    assert len(door.door.connections) <= before


def test_a_body_that_does_not_come_reaches_no_door(door: Running, proxy: int) -> None:
    with connect(proxy) as peer:
        peer.sendall(request("/v1/decode", b"x", content_length="100000"))
        time.sleep(0.3)
        assert not door.door.active
        assert receive_all(peer)[:12] in (b"", b"HTTP/1.1 408")
    assert not door.engine.heard


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request("/v1/decode", content_length=str(2**40)), b"413"),
        (request("/v1/decode", x_long="x" * 70_000), b"400"),
        (b"no HTTP\r\n\r\n", b"400"),
    ],
)
def test_huge_and_broken_requests_end_at_nginx(
    door: Running, proxy: int, data: bytes, status: bytes
) -> None:
    with connect(proxy) as peer:
        peer.sendall(data)
        assert peer.recv(2**16).split(b" ")[1] == status
    assert not door.engine.heard and not door.door.active


def test_events_pass_at_once(door: Running, proxy: int) -> None:
    door.engine.script = events = Events()
    url = f"http://127.0.0.1:{proxy}/v1/events"
    with httpx.stream("GET", url, headers={"accept-encoding": "gzip"}) as response:
        lines = response.iter_lines()
        for number in (1, 2, 3):
            began = time.monotonic()
            events.newest = number
            while next(lines) != "event: cleared":
                pass
            assert time.monotonic() - began < 5
