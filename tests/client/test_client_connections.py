"""One connection serves many calls, of one thread or of several."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from attnd import AsyncClient, Client, ConnectionFailed, Retries
from client_stub import SEQUENCE


class Counter(ThreadingHTTPServer):
    """Answers every GET with one sequence, and counts the connections made."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        if isinstance(self.server, Counter):
            self.server.connections += 1

    def do_GET(self) -> None:
        body = json.dumps({**SEQUENCE, "id": self.path.rpartition("/")[2]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing to standard error."""


@pytest.fixture
def server() -> Iterator[Counter]:
    with Counter() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_calls_one_after_the_other_share_a_connection(server: Counter) -> None:
    with Client(server.url) as client:
        for i in range(10):
            assert client.get_sequence(f"s{i}").id == f"s{i}"
        client.with_options(deadline=5).get_sequence("view")
    assert server.connections == 1


def test_async_calls_one_after_the_other_share_a_connection(server: Counter) -> None:
    async def run() -> None:
        async with AsyncClient(server.url) as client:
            for i in range(10):
                assert (await client.get_sequence(f"s{i}")).id == f"s{i}"

    asyncio.run(run())
    assert server.connections == 1


def test_threads_may_share_a_client(server: Counter) -> None:
    names = [f"s{i}" for i in range(64)]
    with Client(server.url) as client, ThreadPoolExecutor(4) as threads:
        assert [found.id for found in threads.map(client.get_sequence, names)] == names
    assert server.connections <= 4


def test_nothing_listening_is_connection_failed() -> None:
    with (
        Client("http://127.0.0.1:1", retries=Retries(1, first_wait_s=0.001)) as client,
        pytest.raises(ConnectionFailed),
    ):
        client.create_sequence()


# httpcore 1.0 leaves a Unix socket that did not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_socket_is_connection_failed(tmp_path: Path) -> None:
    with (
        Client(uds=str(tmp_path / "none"), retries=0) as client,
        pytest.raises(ConnectionFailed, match="No such file"),
    ):
        client.info()
    del client
    gc.collect()
