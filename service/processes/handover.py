"""The supervisor's handover to the processes that it starts.

`python -m service` starts one engine (`python -m service.engine`) and `server.http_workers` doors
(`python -m service.doors http`), with `oip.http_port` or `oip.grpc_port` a gateway, and with
`cache.zmq_endpoint` a ZeroMQ door, which bind their ports themselves. The `main` of each begins
with `receive`, and then serves on `inherited.sockets`, which listen already and do not block: the
engine's own socket for the engine, HTTP's (TCP or Unix: look at `.family`) for a door. A door finds
the engine at `inherited.engine_socket`; connecting waits for the engine to accept.

- `inherited.lifeline` becomes readable when the supervisor has ended: `os._exit(1)` at once.
- SIGINT is ignored from the start. SIGHUP is pending until `on_hang_up` sets its handler, which
  reads keys and certificates again. SIGTERM must be made "finish admitted work within
  `server.drain_timeout_s`, then exit 0"; before that is set up it ends the process, which is right.
  It may come twice, when a signal goes to the whole group: the second one changes nothing.
- Exit with `CANNOT_START` after one line of `LOG.error` with the reason: the service then stops
  with status 1. The supervisor logs any other unexpected end, and restarts the process; the doors
  of an engine that died are restarted with it.
- The supervisor says where the service listens (`inherited.url`); the engine says `ready: ...`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from config.sections import Settings
from service.doors.kit.tls import TlsError, make_tls
from service.keys import KeysError, keys_of
from service.processes.handed_files import HandedFiles, ReadFile, anonymous_memory, from_disk

LOG: Final = logging.getLogger("attnd.files")


class CheckedFiles:
    """The last usable contents of `auth.keys_file` and of the files of TLS, in the memory `fd`."""

    def __init__(self, settings: Settings) -> None:
        """Raises KeysError, TlsError."""
        self.settings = settings
        self.usable: dict[str, bytes] = {}
        warn_of_mode(settings.auth.keys_file)
        self.check_keys()
        self.check_tls()
        self.fd = anonymous_memory("attnd-files")
        HandedFiles(self.fd).write(self.usable)

    def check_keys(self) -> None:
        """Read the key file. Raises KeysError."""
        read, found = recording()
        keys_of(self.settings.auth, read)
        self.usable |= found

    def check_tls(self) -> None:
        """Read certificate and key, and at the start the authorities of clients, whose change needs
        a restart. Raises TlsError."""
        authorities = self.settings.server.tls_client_ca
        read, found = recording()
        make_tls(self.settings.server, read)
        if authorities is not None and authorities in self.usable:
            found[authorities] = self.usable[authorities]
        self.usable |= found

    def read_again(self) -> None:
        """Read the files again; an unusable one is logged."""
        try:
            self.check_keys()
        except KeysError as error:
            LOG.error("%s: the keys are unchanged", error)
        try:
            self.check_tls()
        except TlsError as error:
            LOG.error("%s: the certificate is unchanged", error)
        HandedFiles(self.fd).write(self.usable)


def warn_of_mode(path: str | None) -> None:
    """Log a warning where all users can read a key file, or its group or all can write it."""
    with suppress(OSError):  # whose reading fails, too
        mode = 0 if path is None else os.stat(path).st_mode & 0o777
        if mode & 0o026:
            text = "auth.keys_file %s has mode %04o: others can read or change it: chmod 600 it"
            LOG.warning(text, path, mode)


def recording() -> tuple[ReadFile, dict[str, bytes]]:
    """A function that reads from disk, and a dict to which it adds the contents, by path."""
    found: dict[str, bytes] = {}

    def read(path: str) -> bytes:
        found[path] = from_disk(path)
        return found[path]

    return read, found


CANNOT_START: Final = 3
"""Exit status of a process that cannot serve and has logged why; a restart would not help."""

PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Child:
    """A process to be started: its name in logs and metrics, its command, its sockets."""

    process: str
    command: tuple[str, ...]
    sockets: tuple[socket.socket, ...]
    worker: int = 0


@dataclass(frozen=True, slots=True)
class Shared:
    """The part of the handover that all processes share."""

    settings: Settings
    lifeline: int
    """Read end of a pipe whose write end only the supervisor holds."""
    engine_socket: str
    url: str
    secret: str
    """Identifies the service's own doors to the engine."""
    metrics: Mapping[str, int] = field(default_factory=dict)
    """For each process by name, the shared memory it counts in (`service/metrics.py`)."""
    files: CheckedFiles | None = None
    """Key and certificate files; None: every process reads them from disk."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All that every process inherits."""
        files = () if self.files is None else (self.files.fd,)
        return (self.lifeline, *self.metrics.values(), *files)


@dataclass(frozen=True, slots=True)
class Inherited:
    """A process's handover as received, with open file descriptors."""

    settings: Settings
    process: str
    """`engine`, `http-0`, `oip-0`, ...: its name in logs and metrics."""
    worker: int
    """Which door of several; 0 for the engine."""
    sockets: tuple[socket.socket, ...]
    lifeline: int
    engine_socket: str
    url: str
    secret: str
    metrics: Mapping[str, int]
    read_file: ReadFile
    """Returns the contents of key and certificate files."""


def start(child: Child, shared: Shared) -> subprocess.Popen[bytes]:
    """Start a process; it inherits the environment, standard error and the descriptors."""
    sockets = [one.fileno() for one in child.sockets]
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(hand_over(child, shared, sockets))  # far below a pipe's capacity
        with interrupts_waiting():
            return subprocess.Popen(
                (*child.command, "--process", child.process, "--handover", str(reading)),
                stdin=subprocess.DEVNULL,
                pass_fds=(reading, *shared.descriptors, *sockets),
            )
    finally:
        os.close(reading)


def hand_over(child: Child, shared: Shared, sockets: Sequence[int]) -> bytes:
    handed: dict[str, Any] = {
        "settings": shared.settings.model_dump(mode="json"),
        "process": child.process,
        "worker": child.worker,
        "sockets": sockets,
        "lifeline": shared.lifeline,
        "engine_socket": shared.engine_socket,
        "url": shared.url,
        "secret": shared.secret,
        "metrics": dict(shared.metrics),
        "files": None if shared.files is None else shared.files.fd,
        "supervisor": os.getpid(),
        "thread": threading.get_native_id(),
    }
    return json.dumps(handed).encode()


@contextmanager
def interrupts_waiting() -> Iterator[None]:
    """Start a process with SIGINT and SIGHUP blocked. Ctrl-C goes to the whole foreground group: a
    process that does not ignore it yet would end with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def receive(argv: Sequence[str] | None = None) -> Inherited:
    """Read the handover; called first in a process's `__main__`.

    Exits in a process that was started by hand, or whose supervisor has ended.
    """
    parser = argparse.ArgumentParser(description="started by `python -m service`, not by hand")
    parser.add_argument("--process", required=True)
    parser.add_argument("--handover", required=True, type=int)
    handover = parser.parse_args(argv).handover
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with os.fdopen(handover, "rb") as pipe:
        handed = json.loads(pipe.read())
    # end with the supervisor, even while busy; the system takes its thread for it
    if sys.platform == "linux" and handed["thread"] == handed["supervisor"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != handed["supervisor"]:  # elsewhere this and the lifeline have to suffice
        sys.exit(1)
    return Inherited(
        settings=Settings.model_validate(handed["settings"]),
        process=handed["process"],
        worker=handed["worker"],
        sockets=tuple(listening(own(fd)) for fd in handed["sockets"]),
        lifeline=own(handed["lifeline"]),
        engine_socket=handed["engine_socket"],
        url=handed["url"],
        secret=handed["secret"],
        metrics={name: own(fd) for name, fd in handed["metrics"].items()},
        read_file=from_disk if handed["files"] is None else HandedFiles(own(handed["files"])).read,
    )


def on_hang_up(act: Callable[[], object]) -> None:
    """Call `act` on SIGHUP, also on one that is pending since the start."""
    signal.signal(signal.SIGHUP, lambda *_: act())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def listening(fd: int) -> socket.socket:
    """The non-blocking socket of a file descriptor."""
    found = socket.socket(fileno=fd)
    found.setblocking(False)
    return found


def own(fd: int) -> int:
    """A descriptor of the handover, not inherited by further processes."""
    os.set_inheritable(fd, False)
    return fd
