"""Child processes of an actor of Ray: an engine, or the router."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from config.sections import Settings
from service.addresses import Addresses
from service.launch import command_of
from service.processes.cells import make_shared
from service.processes.handover import CANNOT_START, CheckedFiles, Child, Shared, start

ENGINE: Final = command_of("service.engine")
ROUTER: Final = (*command_of("service.cluster"), "http")
ZMQ: Final = (*command_of("service.cluster"), "zmq")
GATEWAY: Final = command_of("service.gateway")


def router_children(settings: Settings, addresses: Addresses) -> list[Child]:
    """The router, and the gateway and the ZeroMQ door if configured."""
    children = [Child("http-0", ROUTER, addresses.http)]
    if settings.oip.is_on:
        children.append(Child("oip-0", (*GATEWAY, "--attnd", addresses.url), ()))
    if settings.cache.zmq_endpoint is not None:
        children.append(Child("zmq-0", ZMQ, ()))
    return children


class Processes:
    """Processes that share a handover, and end with this one."""

    def __init__(
        self,
        settings: Settings,
        children: Sequence[Child],
        engine_socket: str,
        url: str,
        secret: str,
    ) -> None:
        """Starts them."""
        self.children = children
        lifeline, self.held = os.pipe()
        self.files = CheckedFiles(settings)
        self.shared = Shared(
            settings=settings,
            lifeline=lifeline,
            engine_socket=engine_socket,
            url=url,
            secret=secret,
            metrics={child.process: make_shared() for child in children},
            files=self.files,
        )
        self.running = [start(child, self.shared) for child in children]

    @property
    def first(self) -> subprocess.Popen[bytes]:
        return self.running[0]

    def check(self) -> None:
        """Starts again what has ended, with counters of its own: those of a dead engine are known.
        Raises RuntimeError for one that cannot start."""
        for at, child in enumerate(self.children):
            if (status := self.running[at].poll()) is None:
                continue
            if status == CANNOT_START:
                raise RuntimeError(f"{child.process} cannot serve: its log says why")
            self.files.read_again()  # nothing sends SIGHUP here
            os.close(self.shared.metrics[child.process])
            metrics = {**self.shared.metrics, child.process: make_shared()}
            self.shared = replace(self.shared, metrics=metrics)
            self.running[at] = start(child, self.shared)

    def end(self, seconds: float = 0.0) -> None:
        """Stops all; kills those that have not finished after `seconds`."""
        for process in self.running:
            process.terminate()
        ends = time.monotonic() + seconds
        for process in self.running:
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for fd in (self.held, *self.shared.descriptors):
            os.close(fd)
        for child in self.children:
            for sock in child.sockets:
                sock.close()
