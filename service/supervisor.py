"""The supervisor: starts the engine and the doors, restarts what dies, and handles signals."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from service.processes.cells import Cells
from service.processes.handover import CANNOT_START, Child, Shared, start

LOG: Final = logging.getLogger("attnd.supervisor")
ENGINE: Final = "engine"
"""The only engine, whose doors are restarted with it, for new sessions. The names of a cluster's
engines begin like this; its doors open new sessions by themselves."""

MAIN: Final = "main"
"""The supervisor's own name in logs and metrics."""

MAX_YOUNG_DEATHS: Final = 5
"""After this many failed startups in a row, the service stops."""

GRACE_S: Final = 20.0
"""Time after server.drain_timeout_s before processes are killed: the engine writes down what only
the pool has, for 10 s at most."""

RETRY_S: Final = 1.0
"""Between attempts to start a process that the system refuses."""

ECHO_S: Final = 0.2
"""A second signal this soon is ignored: `timeout` and shells signal the process and its group."""

Status = int


@dataclass(frozen=True, slots=True)
class Running:
    """A started process."""

    child: Child
    process: subprocess.Popen[bytes]
    since: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """The service is stopping: its exit status, since when, and when processes are killed."""

    status: Status
    since: float
    until: float


class Supervisor:
    """One engine and its doors, from their start until the last of them has ended."""

    def __init__(
        self, children: Sequence[Child], shared: Shared, stop_listening: Callable[[], None]
    ) -> None:
        """`stop_listening` closes the supervisor's own ends of the sockets."""
        self._children = children
        self._shared = shared
        self._stop_listening = stop_listening
        self._running: dict[str, Running] = {}
        self._deaths = {child.process: Deaths() for child in children}
        self._due: dict[str, tuple[float, Child]] = {}
        self._renewed: dict[str, float] = {}
        """Doors that end because their engine died, and when they are killed."""
        self._stopping: Stopping | None = None
        cells = Cells(shared.metrics.get(MAIN))
        self._restarts = {
            child.process: cells.block(("process_restarts", child.process), 1) for child in children
        }

    def run(self) -> Status:
        """Start them all, and watch until none is left or due; the service's exit status."""
        # a service without files ends with the terminal that started it
        hang_ups = self._shared.settings.reads_again or not os.isatty(0)
        with arriving_signals(hang_ups) as arrived:
            try:
                for child in self._children:
                    self._start(child)
                while self._running or self._due:
                    for number in arrived(self._wait_s()):
                        self._handle_signal(number)
                    self._reap()
                    self._start_again()
                    self._kill_overdue()
            finally:
                self._kill()
        status = self._stopping.status if self._stopping else 1
        LOG.info("stopped, exit status %d", status)
        return status

    def _start(self, child: Child) -> None:
        process = start(child, self._shared)
        self._running[child.process] = Running(child, process, time.monotonic())
        LOG.debug("%s is process %d", child.process, process.pid)

    def _wait_s(self) -> float | None:
        """Seconds until the next restart or kill is due."""
        due = [at for at, _ in self._due.values()]
        due += self._renewed.values()
        if self._stopping:
            due.append(self._stopping.until)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if number == signal.SIGHUP and not self._shared.settings.reads_again:
            LOG.info("SIGHUP: there are no keys and no certificate to read again")
            return
        if number == signal.SIGHUP:
            LOG.info("SIGHUP: reading keys and certificates again")
            if self._shared.files is not None:
                self._shared.files.read_again()
            for running in self._running.values():
                running.process.send_signal(signal.SIGHUP)
            return
        name = signal.Signals(number).name
        if self._stopping is None:
            LOG.info("%s: finishing accepted requests", name)
            self._stop(0)
        elif time.monotonic() - self._stopping.since > ECHO_S:
            LOG.warning("%s while stopping: ending at once", name)
            self._stopping = replace(self._stopping, status=128 + number)
            self._kill()

    def _stop(self, status: Status) -> None:
        """Terminate every process; the doors first, so that they accept no new requests."""
        now = time.monotonic()
        self._stopping = Stopping(status, now, now + self._limit_s)
        self._due.clear()
        self._renewed.clear()
        self._stop_listening()
        for running in sorted(self._running.values(), key=has_pool):
            running.process.terminate()

    @property
    def _limit_s(self) -> float:
        """Seconds in which a process must end after SIGTERM."""
        return self._shared.settings.server.drain_timeout_s + GRACE_S

    def _reap(self) -> None:
        for name, running in list(self._running.items()):
            status = running.process.poll()
            if status is not None:
                del self._running[name]
                self._ended(running, status)
        started = {running.process.pid for running in self._running.values()}
        reap_orphans(started)

    def _ended(self, running: Running, status: Status) -> None:
        """Restart a process that has ended, or stop the service."""
        name, how = running.child.process, describe(status)
        if self._stopping:
            if status not in (0, -signal.SIGTERM):
                LOG.error("%s %s while it finished requests", name, how)
                self._stopping = replace(self._stopping, status=self._stopping.status or 1)
        elif status == CANNOT_START:
            self._stop(1)  # it has logged why
        elif self._renewed.pop(name, None) is not None:
            self._due[name] = (time.monotonic(), running.child)
        elif name == ENGINE:
            self._one_ended(running, f"{how}, and all sequences are lost")
            self._renew_doors()
        else:
            self._one_ended(running, how)

    def _renew_doors(self) -> None:
        """Terminate the doors of an engine that died: they reply 503 to requests in flight."""
        if self._stopping is None:
            for name, door in self._running.items():
                door.process.terminate()
                self._renewed[name] = time.monotonic() + self._limit_s

    def _one_ended(self, running: Running, how: str) -> None:
        """Restart it, unless it failed during startup too often."""
        name = running.child.process
        now = time.monotonic()
        deaths = self._deaths[name]
        wait = deaths.add(now - running.since)
        if deaths.young >= MAX_YOUNG_DEATHS:
            text = "%s %s, %d times in a row within %g s of its start: stopping"
            LOG.error(text, name, how, deaths.young, YOUNG_S)
            self._stop(1)
        else:
            level = logging.ERROR if name == ENGINE else logging.WARNING
            LOG.log(level, "%s %s: restarting it", name, how)
            self._due[name] = (now + wait, running.child)

    def _start_again(self) -> None:
        for name, (at, child) in list(self._due.items()):
            if at <= time.monotonic():
                del self._due[name]
                self._restarts[name][0] += 1.0
                try:
                    self._start(child)
                except OSError as error:  # no process, memory or file is free: others still serve
                    LOG.error("%s cannot be restarted: %s: trying again", name, error)
                    self._due[name] = (time.monotonic() + RETRY_S, child)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for name in [name for name, until in self._renewed.items() if now >= until]:
            del self._renewed[name]
            self._running[name].process.kill()
        if self._running and self._stopping and now >= self._stopping.until:
            text = "%s did not finish within server.drain_timeout_s = %g plus %g s: killed"
            drain = self._shared.settings.server.drain_timeout_s
            LOG.warning(text, ", ".join(self._running), drain, GRACE_S)
            self._kill()

    def _kill(self) -> None:
        for running in self._running.values():
            running.process.kill()
        for running in self._running.values():
            running.process.wait()
        self._running.clear()


def reap_orphans(started: Set[int]) -> None:
    """Reap the dead children of processes that have died: the first process of a container gets
    them. The end of a process of `started` is left to its owner."""
    with suppress(ChildProcessError):  # there are no children
        while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if dead.si_pid in started:  # it has just ended: another signal comes
                return
            os.waitpid(dead.si_pid, os.WNOHANG)


def has_pool(running: Running) -> bool:
    return running.child.process.startswith(ENGINE)


def describe(status: Status) -> str:
    """The end of a process, for the log."""
    if status >= 0:
        return f"ended with exit status {status}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


@contextmanager
def arriving_signals(hang_ups: bool) -> Iterator[Callable[[float | None], bytes]]:
    """Yields a function that waits up to some seconds for SIGTERM, SIGINT, the end of a child, and
    with `hang_ups` SIGHUP. It returns the numbers of the signals that came."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *[signal.SIGHUP] * hang_ups):
        signal.signal(number, lambda *_: None)  # only so that the pipe is written
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # one may wait since the start
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)

        def wait(seconds: float | None) -> bytes:
            return os.read(reading, 4096) if selector.select(seconds) else b""

        try:
            yield wait
        finally:
            signal.set_wakeup_fd(-1)
            os.close(reading)
            os.close(writing)


YOUNG_S: Final = 10.0
"""A process that ends sooner than this after its start failed during startup."""

EARLY_S: Final = 60.0
BACK_OFF_S: Final = 0.1
MAX_DOUBLINGS: Final = 7
"""Wait before a restart after a death earlier than `EARLY_S`. Each further one in a row doubles it,
up to `MAX_DOUBLINGS` times."""


@dataclass(slots=True)
class Deaths:
    """A process's latest deaths in a row: how many were `early`, and how many during startup."""

    early: int = 0
    young: int = 0

    def add(self, lived_s: float) -> float:
        """Count a death; the seconds to wait before the restart."""
        self.early = self.early + 1 if lived_s < EARLY_S else 0
        self.young = self.young + 1 if lived_s < YOUNG_S else 0
        return BACK_OFF_S * 2 ** min(self.early - 1, MAX_DOUBLINGS) if self.early else 0.0
