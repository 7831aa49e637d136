"""The door as a process of its own: signals, the supervisor's death, imports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from road.scripted_engine_end import scripted_end
from scripted import (
    RULES,
    SECRET,
    WAIT_S,
    Engine,
    decode_body,
    receive_all,
    replies,
    request,
    wait_for,
)

from config.settings import load_settings
from service.processes.handover import Child, Shared, start
from tests.harness.processes import python

GOOD = request("/v1/decode", decode_body())
READY = request("/health/ready", method="GET", content_length="", connection="close")


@dataclass
class Process:
    """A door's process before a scripted engine."""

    child: subprocess.Popen[bytes]
    engine: Engine
    port: int
    lifeline: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def is_ready(self) -> bool:
        with self.connect() as peer:
            peer.sendall(READY)
            return replies(receive_all(peer))[0].status == 200


@contextmanager
def process(directory: Path) -> Iterator[Process]:
    engine = Engine()
    reading, writing = os.pipe()
    with (
        scripted_end(directory, engine.behave, RULES) as engine.end,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        port = listener.getsockname()[1]
        path, url = str(engine.end.path), f"http://:{port}"
        shared = Shared(load_settings([]), reading, path, url, SECRET)
        command = (sys.executable, "-m", "service.doors", "http")
        child = start(Child("http-0", command, (listener,)), shared)
        running = Process(child, engine, port, writing)
        try:
            wait_for(running.is_ready, "the door")
            yield running
        finally:
            child.kill()
            child.wait()
            os.close(reading)
            with open(running.lifeline, "wb"):
                pass


def test_sigterm_finishes_accepted_requests_despite_further_signals(tmp_path: Path) -> None:
    with process(tmp_path) as door, door.connect() as peer:
        door.engine.close_gate()
        peer.sendall(GOOD)
        wait_for(lambda: door.engine.waiting, "the call")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            door.child.send_signal(number)
            time.sleep(0.1)
        assert door.child.poll() is None
        door.engine.open_gate()
        (reply,) = replies(receive_all(peer))
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert door.child.wait(WAIT_S) == 0


@pytest.mark.long
@pytest.mark.parametrize("form", ["declared", "chunks"])
def test_a_body_of_64_mib_grows_the_door_by_no_more_than_twice_its_size(
    tmp_path: Path, form: str
) -> None:
    body = decode_body(2_000_000)
    given = {"content_length": str(len(body))} if form == "declared" else CHUNKED
    parts = [body] if form == "declared" else [b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n"]
    with process(tmp_path) as door, door.connect() as peer:
        door.engine.close_gate()
        before = peak_bytes(door.child.pid)
        for part in (request("/v1/decode", **given), *parts):
            peer.sendall(part)
        wait_for(lambda: door.engine.waiting, "the call")
        assert door.engine.heard[-1].image == body
        assert peak_bytes(door.child.pid) - before < 2 * len(body) + 8 * 2**20
        door.engine.open_gate()


CHUNKED = {"content_length": "", "transfer_encoding": "chunked"}


def peak_bytes(pid: int) -> int:
    """Most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_sigint_alone_is_for_others(tmp_path: Path) -> None:
    with process(tmp_path) as door:
        door.child.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert door.is_ready()


def test_without_its_supervisor_it_ends_at_once(tmp_path: Path) -> None:
    with process(tmp_path) as door:
        os.close(door.lifeline)
        door.lifeline = os.open(os.devnull, os.O_WRONLY)
        assert door.child.wait(WAIT_S) == 1


def test_it_imports_nothing_of_the_engine_but_the_errors_of_the_core() -> None:
    program = (
        "import sys, service.doors.__main__, service.doors.http.server\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "inner = {name for name in sys.modules if name.startswith(('service.engine', "
        "'service.core', 'kernels'))}\n"
        "print(sorted(names & {'torch', 'cupy', 'yaml', 'pydantic_settings'}), sorted(inner))"
    )
    assert python(program) == "[] ['service.core', 'service.core.errors']\n"
