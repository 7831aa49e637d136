"""Engines of this host as child processes, and their roster."""

from __future__ import annotations

import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from config.sections import Settings
from service.addresses import listen_tcp
from service.cluster.membership.processes import ENGINE, Processes
from service.cluster.membership.roster import RosterEntry, write_roster
from service.processes.handover import Child
from service.road.engine_end.listening import listen

HOST: Final = "127.0.0.1"


@dataclass(slots=True)
class LocalEngines:
    """The engines `engine-0`, `engine-1`, ..., and their roster."""

    settings: Settings
    folder: Path
    over_tcp: bool = False
    """Connect over TCP, as to engines of other hosts."""
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    engines: dict[str, Processes] = field(default_factory=dict)
    entries: list[RosterEntry] = field(default_factory=list)

    @property
    def roster(self) -> Path:
        return self.folder / "roster.json"

    @property
    def processes(self) -> dict[str, subprocess.Popen[bytes]]:
        """Their present processes."""
        return {name: engine.first for name, engine in self.engines.items()}

    def add(self) -> None:
        """One more engine."""
        name = f"engine-{len(self.engines)}"
        own = listen(self.folder / f"{name}.sock", private=False)
        address, more = str(own.path), list[socket.socket]()
        if self.over_tcp:
            more = list(listen_tcp(HOST, 0, False))
            address = f"tcp:{HOST}:{more[0].getsockname()[1]}"
        settings = self.settings.with_own_disk_path(name)  # as engines of different hosts
        child = Child(name, ENGINE, (own.sock, *more))
        self.engines[name] = Processes(settings, [child], str(own.path), "", self.secret)
        self.entries.append(RosterEntry(name, address))
        write_roster(self.roster, self.entries)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def start(self, name: str) -> None:
        """After its process has ended."""
        self.engines[name].check()

    def close(self) -> None:
        for name, engine in self.engines.items():
            self.kill(name)
            engine.end()


@contextmanager
def local_engines(
    count: int, settings: Settings, *, over_tcp: bool = False
) -> Iterator[LocalEngines]:
    """`count` engines with these settings, which are killed at the end."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="attnd-cluster-"))
        engines = LocalEngines(settings, Path(folder), over_tcp)
        stack.callback(engines.close)
        for _ in range(count):
            engines.add()
        yield engines
