"""An engine and doors of this host as child processes, for Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from config.sections import Settings
from service.addresses import Addresses
from service.launch import command_of
from service.processes.cells import make_shared
from service.processes.handover import CANNOT_START, CheckedFiles, Child, Shared, start
from service.road.engine_end.listening import Listening

ENGINE: Final = command_of("service.engine")


class EngineProcess:
    """An engine's process, which can be restarted with the same sockets: its own, and `more`."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        listening: Listening,
        more: Sequence[socket.socket],
        lifeline: int,
        secret: str,
    ) -> None:
        """Starts it."""
        self.settings = settings
        self.listening = listening
        self.lifeline = lifeline
        self.secret = secret
        self.files = CheckedFiles(settings)
        self.child = Child(name, ENGINE, (listening.sock, *more))
        self.running = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        cells = make_shared()
        try:
            shared = Shared(
                settings=self.settings,
                lifeline=self.lifeline,
                engine_socket=str(self.listening.path),
                url="",
                secret=self.secret,
                metrics={self.child.process: cells},
                files=self.files,
            )
            return start(self.child, shared)
        finally:
            os.close(cells)

    def restart(self) -> None:
        self.files.read_again()
        self.running = self.start()

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()

    def close(self) -> None:
        self.kill()
        os.close(self.files.fd)
        self.listening.unlink()
        for sock in self.child.sockets:
            sock.close()


COMMAND: Final = command_of("service.cluster")
GATEWAY: Final = command_of("service.gateway")


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
                if self.shared.settings.server.port and status == CANNOT_START:
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
    """The HTTP doors, and the gateway if configured, for the engines in the members file."""
    children = [
        Child(f"http-{worker}", (*COMMAND, "http"), addresses.http, worker)
        for worker in range(settings.server.http_workers)
    ]
    if settings.oip.is_on:
        children.append(Child("oip-0", (*GATEWAY, "--attnd", addresses.url), ()))
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
