"""`python -m service` with the tests' pool, as processes of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
from http_service import ARGUMENTS

from tests.harness.plain_http import status_of
from tests.harness.processes import SERVICE, START_S, Process, running
from tests.harness.waiting import wait_for


@contextmanager
def process(*arguments: str, open_files: int | None = None) -> Iterator[Process]:
    """The service with an engine socket of its own."""
    with tempfile.TemporaryDirectory(prefix="attnd-test-") as directory:
        own = ("--server.socket", f"{directory}/engine.sock", "--log.format", "json")
        command = [*SERVICE, *ARGUMENTS, *own, *arguments]
        if open_files is not None:
            command = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh", *command]
        with running(command) as service:
            yield service


@contextmanager
def listening(*arguments: str, open_files: int | None = None) -> Iterator[tuple[Process, str]]:
    """The service once it is ready, and its URL."""
    with process("--server.port", "0", *arguments, open_files=open_files) as service:
        url = service.find(r"listening on (http://[0-9.:]+)")[1]
        service.find(r"ready: ")  # the engine is; its doors learn of it a moment later
        wait_for(lambda: is_ready(url), "the service to be ready", START_S)
        yield service, url


def is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return status_of(f"{url}/health/ready") == 200
    return False
