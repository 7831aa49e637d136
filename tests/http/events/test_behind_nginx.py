"""Streams behind nginx as Debian installs it: each event arrives at once."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from http_messages import PAGE_SIZE, store, streaming
from http_service import serving

from tests.harness.plain_http import http_client
from tests.harness.waiting import WAIT_S, wait_for

INSTALLED = Path("/etc/nginx/nginx.conf")
LATE_S = 0.5
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (shutil.which("nginx") and INSTALLED.exists()), reason="nginx is not installed"
    ),
]


@contextmanager
def behind_nginx(folder: Path, upstream: str) -> Iterator[str]:
    """The URL of a proxy with the settings of the installation, and no others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = INSTALLED.read_text()
    for own in ("/run/nginx.pid", "/var/log/nginx"):
        text = text.replace(own, str(folder / Path(own).name))
    server = f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {upstream}; }} }}"
    text = text.replace("include /etc/nginx/sites-enabled/*;", server)
    assert server in text, "nginx is installed otherwise"
    (folder / "nginx").mkdir()
    (folder / "nginx.conf").write_text(text)
    command = ["nginx", "-c", folder / "nginx.conf", "-g", "daemon off;"]
    with subprocess.Popen(command) as proxy:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: proxy.poll() is not None or is_up(url), "nginx")
            yield url
        finally:
            proxy.terminate()
            proxy.wait(WAIT_S)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready").is_success
    except httpx.TransportError:
        return False


def test_every_event_arrives_at_once(tmp_path: Path) -> None:
    with (
        serving() as service,
        behind_nginx(tmp_path, service.url) as url,
        service.client() as client,
        http_client(url) as proxied,
        streaming(client, "/v1/events") as direct,
        streaming(proxied, "/v1/events", headers={"accept-encoding": "gzip"}) as late,
    ):
        for number in range(5):
            store(client, list(range(number, number + PAGE_SIZE)))
            wanted = next(direct)
            began = time.monotonic()
            assert next(late) == wanted
            assert time.monotonic() - began < LATE_S
        service.drain()


def test_the_live_page_s_pictures_arrive_at_once(tmp_path: Path) -> None:
    with (
        serving() as service,
        behind_nginx(tmp_path, service.url) as url,
        http_client(url) as proxied,
        streaming(proxied, "/live/stream") as pictures,
    ):
        assert json.loads(next(pictures)["data"])
        service.drain()
