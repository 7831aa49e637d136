"""Starts a service for an example on a Unix socket, and stops it at the end."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from attnd import Client

ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
STOP_S = 30.0

Settings = Mapping[str, object]
"""Command-line settings of the service by name: `{"pool.num-layers": 4}`."""


@contextmanager
def open_client(url: str | None, settings: Settings) -> Iterator[Client]:
    """A client of the service at `url`, or of a new one with `settings` if `url` is None."""
    if url is not None:
        with Client(url) as client:
            yield client
        return
    with serve(settings) as uds, Client(uds=uds) as client:
        yield client


@contextmanager
def serve(settings: Settings) -> Iterator[str]:
    """Run `python -m service` with `settings`; yields the path of its socket once it is ready."""
    with tempfile.TemporaryDirectory(prefix="attnd-") as folder:
        uds = f"{folder}/socket"
        with running({"server.uds": uds, **settings}, Client(uds=uds, retries=0)):
            yield uds


@contextmanager
def serve_tcp(settings: Settings) -> Iterator[str]:
    """The same on the TCP port that `settings` name; yields its URL.

    Raises ValueError if another program listens there: it may be a service for another model.
    """
    port = int(str(settings["server.port"]))
    check_free(port)
    url = f"http://127.0.0.1:{port}"
    with running(settings, Client(url, retries=0)):
        yield url


def check_free(port: int) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ValueError(f"another program listens on port {port}: end it, or take another")


@contextmanager
def running(settings: Settings, probe: Client) -> Iterator[None]:
    """Run the service until the end of the block, which starts when `probe` finds it ready."""
    command = [sys.executable, "-m", "service"]
    for name, value in {"log.level": "warning", **settings}.items():
        command += [f"--{name}", str(value)]
    # In a session of its own: Ctrl-C is for the example, which ends the service after its work.
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        with probe:
            wait_ready(process, probe)
        yield
    finally:
        process.terminate()
        process.wait(timeout=STOP_S)


def wait_ready(process: subprocess.Popen[bytes], probe: Client) -> None:
    """Wait until the service is ready; RuntimeError if it ends before."""
    for _ in range(int(START_S)):
        try:
            return probe.wait_ready(1.0)
        except TimeoutError:
            if process.poll() is not None:
                status = process.returncode
                raise RuntimeError(f"the service failed to start: exit status {status}") from None
    probe.wait_ready(0.0)


def metric(client: Client, name: str) -> float:
    """The value of one unlabelled metric, from /metrics; 0 before it first moves."""
    for line in client.metrics().splitlines():
        if line.startswith(f"{name} "):
            return float(line.removeprefix(name))
    return 0.0
