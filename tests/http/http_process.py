"""`python -m service` as processes of its own: started, watched, listened to, killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from http_service import ARGUMENTS, WAIT_S, wait_for

ROOT: Final = Path(__file__).resolve().parents[2]
START_S: Final = 3 * WAIT_S


@dataclass
class Process:
    """A running service: its supervisor, and what all its processes have logged so far."""

    child: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.child.stderr is not None
        self.lines.extend(line.rstrip("\n") for line in self.child.stderr)

    def find(self, pattern: str) -> re.Match[str]:
        """The first line that matches, waited for."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            time.sleep(0.01)
        raise AssertionError(f"no line matches {pattern}: {self.lines}")

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.child.send_signal(how)
        return self.child.wait(WAIT_S)

    def entries(self) -> list[dict[str, Any]]:
        """The lines as JSON; all of them must be."""
        return [json.loads(line) for line in list(self.lines)]

    def told(self, *levels: str) -> list[str]:
        """The messages of these levels, without those of watchdogs: a machine may be busy."""
        every = [one for one in self.entries() if one["logger"] != "attnd.watchdog"]
        return [entry["message"] for entry in every if entry["level"] in levels]

    def pid(self, name: str) -> int:
        """The process of that name (`engine`, `http-0`, ...), as the system has it now."""
        for pid in children(self.child.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "--process" in words and words[words.index("--process") + 1] == name:
                return pid
        raise AssertionError(f"no process {name}: {self.lines}")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


@contextmanager
def process(*arguments: str, open_files: int | None = None) -> Iterator[Process]:
    """`python -m service` with the tests' pool and a socket of its own; nothing may outlive it."""
    with tempfile.TemporaryDirectory(prefix="attnd-test-") as directory:
        own = ("--server.socket", f"{directory}/engine.sock", "--log.format", "json")
        command = [sys.executable, "-m", "service", *ARGUMENTS, *own, *arguments]
        if open_files is not None:
            command = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        ) as child:
            running = Process(child)
            reader = threading.Thread(target=running.read)
            reader.start()
            try:
                yield running
            finally:
                if child.poll() is None:
                    child.kill()
                child.wait()
                reader.join(WAIT_S)
                assert not reader.is_alive(), "a process was left behind: stderr is still open"


@contextmanager
def listening(*arguments: str, open_files: int | None = None) -> Iterator[tuple[Process, str]]:
    """The service once it is ready, and its URL."""
    with process("--server.port", "0", *arguments, open_files=open_files) as running:
        url = running.find(r"listening on (http://[0-9.:]+)")[1]
        running.find(r"ready: ")  # says the engine; its doors get to know it just then
        wait_for(lambda: is_ready(url), "the service to be ready", START_S)
        yield running, url


def is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health/ready", timeout=WAIT_S).status_code == 200
    return False
