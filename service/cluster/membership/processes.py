"""An engine or the router of this host as a child process, for Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
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


ROUTER: Final = (*command_of("service.cluster"), "http")
GATEWAY: Final = command_of("service.gateway")


class RouterProcess:
    """The router's process: the HTTP door over the engines of the roster; and the gateway's, if
    configured."""

    def __init__(
        self, settings: Settings, addresses: Addresses, secret: str, lifeline: int
    ) -> None:
        """Starts them."""
        self.settings = settings
        self.files = CheckedFiles(settings)
        self.children = [Child("http-0", ROUTER, addresses.http)]
        if settings.oip.is_on:
            self.children.append(Child("oip-0", (*GATEWAY, "--attnd", addresses.url), ()))
        self.shared = Shared(
            settings=settings,
            lifeline=lifeline,
            engine_socket=str(addresses.roster),
            url=addresses.url,
            secret=secret,
            metrics={child.process: make_shared() for child in self.children},
            files=self.files,
        )
        self.processes = [start(child, self.shared) for child in self.children]

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """The router."""
        return self.processes[0]

    def check(self) -> None:
        """Restarts what has ended. Raises RuntimeError for one that cannot start."""
        for at, child in enumerate(self.children):
            if (status := self.processes[at].poll()) is None:
                continue
            if self.settings.server.port and status == CANNOT_START:
                raise RuntimeError(f"{child.process} cannot serve: its log says why")
            self.files.read_again()  # nothing sends SIGHUP here
            self.processes[at] = start(child, self.shared)

    def end(self, seconds: float) -> None:
        """Stops all; kills those that have not finished after `seconds`."""
        for process in self.processes:
            process.terminate()
        ends = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
