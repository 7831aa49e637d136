"""A service as processes of its own: started, read, signalled, killed; none outlives its test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.harness.waiting import WAIT_S, wait_for

ROOT: Final = Path(__file__).resolve().parents[2]
START_S: Final = 3 * WAIT_S
SERVICE: Final = (sys.executable, "-m", "service")


@dataclass
class Process:
    """A running service: its supervisor, and the log lines of all its processes so far."""

    child: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        assert self.child.stderr is not None
        self.lines.extend(line.rstrip("\n") for line in self.child.stderr)

    def find(self, pattern: str) -> re.Match[str]:
        """Waits for a line that matches; returns the first."""
        found: list[re.Match[str]] = []

        def is_found() -> bool:
            found.extend(filter(None, (re.search(pattern, line) for line in list(self.lines))))
            return bool(found)

        self.wait_for(is_found, pattern)
        return found[0]

    def find_entry(
        self, is_wanted: Callable[[dict[str, Any]], bool], count: int = 1
    ) -> dict[str, Any]:
        """Waits for log entries; returns the one with the number `count`, from 1."""
        self.wait_for(lambda: len(list(filter(is_wanted, self.entries()))) >= count, "an entry")
        return list(filter(is_wanted, self.entries()))[count - 1]

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Gives up after three minutes, or when the service and all its processes have ended."""
        wait_for(lambda: condition() or not self.reader.is_alive(), what, START_S)
        assert condition(), f"no {what}: {self.lines}"

    def entries(self) -> list[dict[str, Any]]:
        """The lines that are JSON."""
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def messages(self, *levels: str) -> list[str]:
        """Messages of these levels, without watchdogs': a busy machine may trigger those."""
        entries = [entry for entry in self.entries() if entry["logger"] != "attnd.watchdog"]
        return [entry["message"] for entry in entries if entry["level"] in levels]

    def send_signal(self, number: int) -> None:
        self.child.send_signal(number)

    def status(self) -> int:
        """Waits for the end; returns the exit status."""
        return self.child.wait(WAIT_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.send_signal(number)
        return self.status()

    def pid(self, name: str) -> int:
        """The process of that name (`engine`, `http-0`, ...), as the system has it now."""
        for pid in children(self.child.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "--process" in words and words[words.index("--process") + 1] == name:
                return pid
        raise AssertionError(f"no process {name}: {self.lines}")


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """A command from the repository's root, its standard error read all the time; killed at the
    end, when no process may be left that still has standard error open."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=given,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        process = Process(child)
        try:
            yield process
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            process.reader.join(WAIT_S)
            assert not process.reader.is_alive(), "a process was left behind: stderr is still open"


def run(*command: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command from the repository's root to its end; `how` goes to `subprocess.run`."""
    given = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": START_S} | how
    return subprocess.run(list(map(str, command)), **given)


def python(program: str, *arguments: str, **how: Any) -> str:
    """What a Python program prints, which must succeed."""
    return run(sys.executable, "-c", program, *arguments, check=True, **how).stdout


def start(program: str, *arguments: str, **how: Any) -> subprocess.Popen[str]:
    """A Python program, with pipes to its input and from its output."""
    command, pipe = [sys.executable, "-c", program, *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, **how)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_until_dead(*pids: int) -> None:
    wait_for(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
