"""A service of stand-ins under the real supervisor, as its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
STAND_IN: Final = ROOT / "tests/service/stand_in.py"
WAIT_S: Final = 60.0
PROGRAM: Final = f"""
import sys
from service.__main__ import Commands, main
command = (sys.executable, {str(STAND_IN)!r})
engine, door, *arguments = sys.argv[1:]
real = Commands()
sys.exit(main(arguments, Commands(
    real.engine if engine == "real" else (*command, engine),
    real.door if door == "real" else (*command, door),
)))
"""


@dataclass
class Service:
    """The supervisor, and what all its processes have logged so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stderr)

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def find(self, wanted: Callable[[dict[str, Any]], bool], count: int = 1) -> dict[str, Any]:
        """The `count`-th log entry that is wanted, waited for."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found = [entry for entry in self.entries() if wanted(entry)]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.01)
        raise AssertionError(f"waited {WAIT_S} s in vain: {self.lines}")

    def up(self, process: str, count: int = 1) -> dict[str, Any]:
        """What a process said of itself when it was up, for the `count`-th time."""
        return self.find(
            lambda entry: entry["process"] == process and entry["message"] == "up", count
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def status(self) -> int:
        """The exit status, waited for."""
        return self.process.wait(WAIT_S)

    def messages(self, *levels: str) -> list[str]:
        """Those of these levels, without those of watchdogs: a machine may be busy."""
        every = [one for one in self.entries() if one["logger"] != "attnd.watchdog"]
        return [entry["message"] for entry in every if entry["level"] in levels]


@contextmanager
def supervised(
    *arguments: str, engine: str = "serve", door: str = "serve", socket: Path
) -> Iterator[Service]:
    """Stand-ins that behave so, or the `real` process; the engine's socket is at `socket`. Killed
    in the end."""
    command = [sys.executable, "-c", PROGRAM, engine, door, "--log.format", "json"]
    command += ["--server.port", "0", "--server.socket", str(socket), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        service = Service(process)
        reader = threading.Thread(target=service.read)
        reader.start()
        try:
            yield service
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            reader.join(WAIT_S)
            assert not reader.is_alive(), "a process was left behind: standard error is still open"


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.01)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
