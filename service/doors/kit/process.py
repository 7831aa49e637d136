"""The process of a door or the gateway: everything that they have in common."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from socket import socket
from typing import Final, Protocol

from attnd.wire.frames import FrameError

from config.sections import Settings
from service.doors.kit.ledger import TracingError
from service.doors.kit.link import Link
from service.doors.kit.tls import TlsError
from service.doors.kit.upstream import MakeUpstream
from service.errors import NotReady
from service.extras import how_to_install
from service.keys import KeysError
from service.logs import count_dropped, set_up_logs
from service.metrics import Metrics
from service.processes.handed_files import ReadFile, from_disk
from service.processes.handover import CANNOT_START, on_hang_up, receive
from service.processes.watchdog import LoopWatchdog

LOG: Final = logging.getLogger("attnd.doors")
DRAINING: Final = "draining: finishing accepted requests, accepting no new ones"
ENGINE_LATER_S: Final = 2.0
"""After its own drain the engine still replies to unfinished calls, once its slice is done."""
YOUNGER_PER_FULL_COLLECTION: Final = 100
"""Python's default is 10. A full collection beside a request of 30,000 sequences takes 25 ms."""

NEEDS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "oip": (("grpc", "google.protobuf"), "oip.http_port or oip.grpc_port"),
    "zmq": (("zmq", "msgspec"), "cache.zmq_endpoint"),
}
"""Modules of an extra that a door of the same name imports, and the setting that requires them."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts of a door's server."""

    settings: Settings
    metrics: Metrics
    engine_socket: str
    name: str
    """The process's name in logs and metrics, and for the engine."""
    secret: str
    """Informs the engine that this is a door of its service."""
    make_upstream: MakeUpstream = Link
    read_file: ReadFile = from_disk
    """Returns the contents of key and certificate files."""
    sockets: Sequence[socket] = ()
    """HTTP's listening sockets."""
    on_loop: Callable[[asyncio.AbstractEventLoop, DoorServer], object] = lambda loop, server: None
    """Called when the server's event loop runs."""
    on_ready: Callable[[], object] = lambda: None
    """Called in the loop's thread when the engine is connected."""


class DoorServer(Protocol):
    """A door's server. `failed` says why it could not serve."""

    @property
    def failed(self) -> str: ...

    def run(self) -> None:
        """Serve until drained."""

    def drain(self) -> None:
        """Accept no more requests, respond to the accepted ones, then end; in the loop's thread."""

    def read_again(self) -> None:
        """Read keys and certificate again; in the loop's thread."""


def run_door(
    kind: str, load: Callable[[], Callable[[Setup], DoorServer]], make_upstream: MakeUpstream = Link
) -> int:
    """Run a door, `http` or `zmq`, or the gateway `oip`, until it is drained; returns the process's
    exit status. `load` imports its server."""
    inherited = receive()
    set_up_logs(inherited.settings.log, inherited.process)
    modules, setting = NEEDS.get(kind, ((), ""))
    if not all(is_installed(name) for name in modules):
        LOG.error("cannot start: %s needs %s: %s", setting, modules[0], how_to_install(kind))
        return CANNOT_START
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every connection is an open file

    def on_loop(loop: asyncio.AbstractEventLoop, server: DoorServer) -> None:
        loop.add_reader(inherited.lifeline, os._exit, 1)
        loop.add_signal_handler(signal.SIGTERM, server.drain)
        on_hang_up(lambda: loop.call_soon_threadsafe(server.read_again))

    metrics = Metrics(inherited.process, inherited.metrics)
    count_dropped(metrics.log_lines_dropped)
    setup = Setup(
        settings=inherited.settings,
        metrics=metrics,
        engine_socket=inherited.engine_socket,
        name=inherited.process,
        secret=inherited.secret,
        make_upstream=make_upstream,
        read_file=inherited.read_file,
        sockets=inherited.sockets,
        on_loop=on_loop,
        on_ready=lambda: LoopWatchdog(inherited.process, metrics),
    )
    try:
        server = load()(setup)
    except (KeysError, TlsError, TracingError) as error:
        LOG.error("cannot start: %s", error)
        return CANNOT_START
    server.run()
    if server.failed:
        LOG.error("cannot start: %s", server.failed)
        return CANNOT_START
    return 0


class Connects(Protocol):
    """A door's way to the engine."""

    async def connect(self, path: str, name: str, secret: str) -> None: ...


async def connect(setup: Setup, link: Connects) -> str | None:
    """Connect to the engine, which replies when it accepts calls.

    Returns None when connected, else why the door cannot serve; empty if the engine has ended, and
    has logged why.
    """
    where = f"the engine at {setup.engine_socket}"
    try:
        await link.connect(setup.engine_socket, setup.name, setup.secret)
    except (ConnectionError, FileNotFoundError) as error:
        LOG.debug("%s has ended: %s", where, error)
        return ""
    except (OSError, NotReady, FrameError) as error:
        return f"{where} cannot be called: {error}"
    gc.collect()
    gc.freeze()  # the start's objects would make every later collection longer
    gc.set_threshold(*gc.get_threshold()[:2], YOUNGER_PER_FULL_COLLECTION)
    setup.on_ready()
    return None


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


SPARE_DESCRIPTORS: Final = 128
"""Half of them are for the road, logs and listening sockets, half for connections being refused."""


def descriptors() -> tuple[int, int]:
    """The limit of open files, and how many of them are not for connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = sys.maxsize
    return soft, min(SPARE_DESCRIPTORS, soft // 2)
