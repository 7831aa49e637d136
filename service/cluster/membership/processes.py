"""Engines and doors of this host as child processes, for Ray, tests and measurements."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from config.sections import Settings
from service.addresses import Addresses, listen_tcp
from service.cluster.membership.members_file import MemberEntry, write_members
from service.launch import command_of
from service.processes.cells import make_shared
from service.processes.handover import CheckedFiles, Child, Shared, start
from service.road.engine_end.listening import Listening, listen

LOST_AFTER_S: Final = 1.0
ENGINE: Final = command_of("service.engine")


@dataclass(slots=True)
class LocalEngines:
    """The engines `engine-0`, `engine-1`, ..., and their members file."""

    settings: Settings
    folder: Path
    lifeline: int
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    over_tcp: bool = False
    """Connect over TCP, as to engines of other hosts."""
    host: str = "127.0.0.1"
    """The address to listen at over TCP."""
    listening: dict[str, Listening] = field(default_factory=dict)
    entries: dict[str, socket.socket] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    files: CheckedFiles | None = None
    """None before the first start."""

    @property
    def members(self) -> Path:
        return self.folder / "members.json"

    def add(self, listening: Listening | None = None) -> str:
        """Starts one more engine, with a socket in the folder by default; returns its name."""
        name = f"engine-{len(self.listening)}"
        own = listening or listen(self.folder / f"{name}.sock", private=False)
        self.listening[name] = own
        if self.over_tcp:
            (self.entries[name],) = listen_tcp(self.host, 0, False)
        self.start(name)
        self.write_members()
        return name

    def start(self, name: str) -> None:
        """Starts an engine's process, or restarts it."""
        if self.files is None:
            self.files = CheckedFiles(self.settings)
        else:
            self.files.read_again()
        cells = make_shared()
        try:
            shared = Shared(
                settings=self.settings,
                lifeline=self.lifeline,
                engine_socket=str(self.listening[name].path),
                url="",
                secret=self.secret,
                metrics={name: cells},
                files=self.files,
            )
            entry = [self.entries[name]] if self.over_tcp else []
            child = Child(name, ENGINE, (self.listening[name].sock, *entry))
            self.processes[name] = start(child, shared)
        finally:
            os.close(cells)

    def kill(self, name: str) -> None:
        """Kills an engine's process."""
        self.processes[name].kill()
        self.processes[name].wait()

    def remove(self, name: str) -> None:
        listening = self.listening.pop(name)
        self.write_members()
        self.kill(name)
        listening.close()

    def write_members(self) -> None:
        lost_after_s = LOST_AFTER_S if self.over_tcp else 0.0
        entries = [MemberEntry(name, self.address(name), lost_after_s) for name in self.listening]
        write_members(self.members, entries)

    def address(self, name: str) -> str:
        if self.over_tcp:
            return f"tcp:{self.host}:{self.entries[name].getsockname()[1]}"
        return str(self.listening[name].path)

    def close(self) -> None:
        if self.files is not None:
            os.close(self.files.fd)
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        for one in self.listening.values():
            one.close()
        for entry in self.entries.values():
            entry.close()


@contextmanager
def local_engines(
    count: int, settings: Settings, *, over_tcp: bool = False
) -> Iterator[LocalEngines]:
    """`count` engines with these settings, which are killed at the end."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="attnd-cluster-"))
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        stack.callback(os.close, writing)
        engines = LocalEngines(settings, Path(folder), reading, over_tcp=over_tcp)
        stack.callback(engines.close)
        for _ in range(count):
            engines.add()
        yield engines


COMMAND: Final = command_of("service.cluster")


@dataclass(slots=True)
class Doors:
    """The doors' processes, by name."""

    children: tuple[Child, ...]
    shared: Shared
    processes: dict[str, subprocess.Popen[bytes]]

    def check(self) -> None:
        """Restarts processes that have ended. Raises RuntimeError for one that cannot start."""
        for child in self.children:
            status = self.processes[child.process].poll()
            if status is not None:
                if self.shared.settings.server.port and status == 3:
                    raise RuntimeError(f"{child.process} cannot serve: its log says why")
                if self.shared.files is not None:  # nothing sends SIGHUP here
                    self.shared.files.read_again()
                self.processes[child.process] = start(child, self.shared)

    def end(self, seconds: float) -> None:
        """Stops all doors; kills doors that have not finished after `seconds`."""
        for process in self.processes.values():
            process.terminate()
        ends = time.monotonic() + seconds
        for process in self.processes.values():
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_doors(settings: Settings, addresses: Addresses, secret: str, lifeline: int) -> Doors:
    """The HTTP doors, and the gRPC door if configured, for the engines in the members file."""
    children = [
        Child(f"http-{worker}", (*COMMAND, "http"), addresses.http, worker)
        for worker in range(settings.server.http_workers)
    ]
    if settings.server.grpc_port is not None:
        children.append(Child("grpc-0", (*COMMAND, "grpc"), ()))
    shared = Shared(
        settings=settings,
        lifeline=lifeline,
        engine_socket=str(addresses.members),
        url=addresses.url,
        secret=secret,
        metrics={child.process: make_shared() for child in children},
        files=CheckedFiles(settings),
    )
    processes = {child.process: start(child, shared) for child in children}
    return Doors(tuple(children), shared, processes)
