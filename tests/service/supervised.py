"""A service of stubs under the real supervisor, as its own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.harness.processes import ROOT, Process, running

STUB: Final = ROOT / "tests/service/stub.py"
PROGRAM: Final = f"""
import sys
from service.__main__ import Commands, main
command = (sys.executable, {str(STUB)!r})
engine, door, *arguments = sys.argv[1:]
sys.exit(main(arguments, Commands((*command, engine), (*command, door))))
"""


@contextmanager
def supervised(
    *arguments: str,
    engine: str = "serve",
    door: str = "serve",
    before: str = "",
    socket: Path,
) -> Iterator[Process]:
    """Stubs with these behaviours; the engine's socket is at `socket`. `before` is run first."""
    command = [sys.executable, "-c", before + PROGRAM, engine, door, "--log.format", "json"]
    command += ["--server.port", "0", "--server.socket", str(socket), *arguments]
    with running(command) as service:
        yield service


def started(service: Process, process: str, count: int = 1) -> dict[str, Any]:
    """A stub's log entry of its start, the one with the number `count`."""
    return service.find_entry(
        lambda entry: entry["process"] == process and entry["message"] == "up", count
    )
