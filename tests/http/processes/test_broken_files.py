"""Key and certificate files that break while the service runs: it keeps the last good ones,
also in processes that are started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from http_messages import create
from http_process import process
from http_secrets import Files, trusting, write_files, write_keys

from bench.driver.servers import free_port
from tests.harness.processes import START_S, Process
from tests.harness.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.long

METHOD = "/inference.GRPCInferenceService/ServerMetadata"
RED = (("authorization", "Bearer a-key-of-red"),)


def spoil_all(keys: Path, files: Files) -> None:
    """Half a line; and the key of another certificate."""
    keys.write_text("half a line")
    Path(files.key).write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())


def remove_all(keys: Path, files: Files) -> None:
    for path in (keys, files.cert, files.key, files.ca):
        Path(path).unlink()


@pytest.mark.parametrize(("engines", "spoil"), [(1, spoil_all), (2, remove_all)])
def test_a_door_that_is_started_again_has_the_last_good_files(
    tmp_path: Path, spoil: Callable[[Path, Files], None], engines: int
) -> None:
    keys, files, port = tmp_path / "keys", write_files(tmp_path, trustme.CA()), free_port()
    write_keys(keys, "a-key-of-red")
    context, authority = trusting(files), Path(files.ca).read_bytes()
    with process(
        *("--server.port", "0", "--auth.keys-file", str(keys), *files.served),
        *("--oip.grpc-port", str(port), "--cluster.engines", str(engines)),
    ) as running:
        url = running.find(r"listening on (https://[0-9.:]+)")[1]

        def is_served() -> bool:
            try:
                return page(url, context, "/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(is_served, "the start", START_S)
        with httpx.Client(base_url=url, verify=context, timeout=WAIT_S) as client:
            client.headers.update(RED)
            create(client, "a")
        spoil(keys, files)
        running.child.send_signal(signal.SIGHUP)
        running.find("(is|are) unchanged")
        for name in ("http-0", "oip-0"):
            dead = running.pid(name)
            os.kill(dead, signal.SIGKILL)
            running.find(f"{name} was killed by SIGKILL: restarting it")
            wait_for(lambda name=name, dead=dead: is_new(running, name, dead), name, START_S)
        wait_for(is_served, "the door to start again", START_S)
        assert page(url, context, "/v1/sequences/a", *RED).status_code == 200
        assert page(url, context, "/v1/sequences/a").status_code == 401
        with grpc.secure_channel(
            f"127.0.0.1:{port}", grpc.ssl_channel_credentials(authority)
        ) as channel:
            call = channel.unary_unary(METHOD)
            assert b"attnd" in call(b"", metadata=RED, wait_for_ready=True, timeout=WAIT_S)
        write_keys(keys, "a-key-of-blue")
        running.child.send_signal(signal.SIGHUP)
        wait_for(lambda: page(url, context, "/v1/info", *RED).status_code == 401, "the key to go")
        assert running.stop() == 0


def page(url: str, context: object, path: str, *headers: tuple[str, str]) -> httpx.Response:
    """On a connection of its own."""
    return httpx.get(
        f"{url}{path}",
        headers=dict(headers),
        verify=context,  # type: ignore[arg-type]
        timeout=WAIT_S,
    )


def is_new(running: Process, name: str, dead: int) -> bool:
    try:
        return running.pid(name) != dead
    except (AssertionError, FileNotFoundError):
        return False
