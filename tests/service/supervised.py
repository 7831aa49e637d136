"""A service of stand-ins under the real supervisor, as its own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.harness.processes import ROOT, Process, running

STAND_IN: Final = ROOT / "tests/service/stand_in.py"
PROGRAM: Final = f"""
import sys
from service.__main__ import Commands, main
command = (sys.executable, {str(STAND_IN)!r})
engine, door, *arguments = sys.argv[1:]
sys.exit(main(arguments, Commands((*command, engine), (*command, door))))
"""


@contextmanager
def supervised(
    *arguments: str, engine: str = "serve", door: str = "serve", socket: Path
) -> Iterator[Process]:
    """Stand-ins with these behaviours; the engine's socket is at `socket`."""
    command = [sys.executable, "-c", PROGRAM, engine, door, "--log.format", "json"]
    command += ["--server.port", "0", "--server.socket", str(socket), *arguments]
    with running(command) as service:
        yield service


def started(service: Process, process: str, count: int = 1) -> dict[str, Any]:
    """A stand-in's log entry of its start, the one with the number `count`."""
    return service.find_entry(
        lambda entry: entry["process"] == process and entry["message"] == "up", count
    )
