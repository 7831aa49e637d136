"""The supervisor's watch over engine and doors: what it does when one of them ends, or a signal
comes."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from service.processes.cells import Cells
from service.processes.handover import CANNOT_START, Child, Shared, start

LOG: Final = logging.getLogger("attnd.supervisor")
ENGINE: Final = "engine"
"""The process without which the service ends; all others are started again: doors, and in a
cluster engines, whose names begin like this."""

MAIN: Final = "main"
"""The supervisor's own name in logs and metrics."""

YOUNG_S: Final = 10.0
"""A door that dies younger than this died of its start."""

MAX_YOUNG_DEATHS: Final = 5
"""So many of them in a row, and starting the door again is no use."""

BACK_OFF_S: Final = 0.1
"""Wait before a door is started again, doubled with every young death."""

GRACE_S: Final = 5.0
"""Beyond server.drain_timeout_s, for processes to end by themselves."""

ECHO_S: Final = 0.2
"""A second signal this soon is the first one's echo: `timeout` and shells send one to the process
and one to its group."""

Status = int


@dataclass(frozen=True, slots=True)
class Running:
    """A process that was started."""

    child: Child
    process: subprocess.Popen[bytes]
    since: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """The service is on its way out: with which status, since when, and when patience ends."""

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
        self._young_deaths = dict.fromkeys((child.process for child in children), 0)
        self._due: dict[str, tuple[float, Child]] = {}
        self._stopping: Stopping | None = None
        cells = Cells(shared.metrics.get(MAIN))
        self._restarts = {
            child.process: cells.block(("process_restarts", child.process), 1)
            for child in children
            if child.process != ENGINE
        }

    def run(self) -> Status:
        """Start them all, and watch until none is left; the service's exit status."""
        with arriving_signals(self._shared.settings.reads_again) as arrived:
            try:
                for child in self._children:
                    self._start(child)
                while self._running:
                    for number in arrived(self._patience()):
                        self._heed(number)
                    self._reap()
                    self._start_again()
                    self._lose_patience()
            finally:
                self._kill()
        return self._stopping.status if self._stopping else 1

    def _start(self, child: Child) -> None:
        process = start(child, self._shared)
        self._running[child.process] = Running(child, process, time.monotonic())
        LOG.debug("%s is process %d", child.process, process.pid)

    def _patience(self) -> float | None:
        """Seconds until something is due by itself."""
        due = [at for at, _ in self._due.values()]
        if self._stopping:
            due.append(self._stopping.until)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _heed(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if number == signal.SIGHUP:
            LOG.info("SIGHUP: keys and certificates are read again")
            if self._shared.files is not None:
                self._shared.files.read_again()
            for running in self._running.values():
                running.process.send_signal(signal.SIGHUP)
            return
        name = signal.Signals(number).name
        if self._stopping is None:
            LOG.info("%s: finishing admitted work", name)
            self._stop(0)
        elif time.monotonic() - self._stopping.since > ECHO_S:
            LOG.warning("%s while stopping: ending at once", name)
            self._stopping = replace(self._stopping, status=128 + number)
            self._kill()

    def _stop(self, status: Status) -> None:
        """Ask every process to finish; the doors first, so that they take nothing new."""
        patience = self._shared.settings.server.drain_timeout_s + GRACE_S
        now = time.monotonic()
        self._stopping = Stopping(status, now, now + patience)
        self._due.clear()
        self._stop_listening()
        for running in sorted(self._running.values(), key=has_pool):
            running.process.terminate()

    def _reap(self) -> None:
        for name, running in list(self._running.items()):
            status = running.process.poll()
            if status is not None:
                del self._running[name]
                self._ended(running, status)

    def _ended(self, running: Running, status: Status) -> None:
        """Decide what the end of a process means."""
        name = running.child.process
        how = describe(status)
        if self._stopping:
            if status not in (0, -signal.SIGTERM):
                LOG.error("%s %s while it finished its work", name, how)
                self._stopping = replace(self._stopping, status=self._stopping.status or 1)
        elif status == CANNOT_START:
            self._stop(1)  # it has said why
        elif is_engine(running):
            LOG.error("%s %s: stopping, since all sequences are lost with it", name, how)
            self._stop(1)
        else:
            self._one_ended(running, how)

    def _one_ended(self, running: Running, how: str) -> None:
        """Start it again, unless it dies of its start."""
        name = running.child.process
        now = time.monotonic()
        deaths = self._young_deaths[name] + 1 if now - running.since < YOUNG_S else 0
        self._young_deaths[name] = deaths
        if deaths >= MAX_YOUNG_DEATHS:
            text = "%s %s, the %d. time in a row within %g s of its start: stopping"
            LOG.error(text, name, how, deaths, YOUNG_S)
            self._stop(1)
        else:
            LOG.warning("%s %s: starting it again", name, how)
            wait = BACK_OFF_S * 2 ** (deaths - 1) if deaths else 0.0
            self._due[name] = (now + wait, running.child)

    def _start_again(self) -> None:
        for name, (at, child) in list(self._due.items()):
            if at <= time.monotonic():
                del self._due[name]
                self._restarts[name][0] += 1.0
                self._start(child)

    def _lose_patience(self) -> None:
        if self._running and self._stopping and time.monotonic() >= self._stopping.until:
            text = "%s did not finish within server.drain_timeout_s = %g and %g s more: killed"
            drain = self._shared.settings.server.drain_timeout_s
            LOG.warning(text, ", ".join(self._running), drain, GRACE_S)
            self._kill()

    def _kill(self) -> None:
        """End every process now, and forget it."""
        for running in self._running.values():
            running.process.kill()
        for running in self._running.values():
            running.process.wait()
        self._running.clear()


def is_engine(running: Running) -> bool:
    return running.child.process == ENGINE


def has_pool(running: Running) -> bool:
    return running.child.process.startswith(ENGINE)


def describe(status: Status) -> str:
    """A process's end in words."""
    if status >= 0:
        return f"ended with exit status {status}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


@contextmanager
def arriving_signals(hang_ups: bool) -> Iterator[Callable[[float | None], bytes]]:
    """Gives a function that waits (at most so many seconds) for SIGTERM, SIGINT, with `hang_ups`
    SIGHUP, or the end of a child, and returns the numbers of the signals that came."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *[signal.SIGHUP] * hang_ups):
        signal.signal(number, lambda *_: None)  # only so that the pipe is written
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
