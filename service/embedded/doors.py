"""The doors of an embedded engine: bound in the engine's process, served by child processes."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

from config.settings import Settings
from service.addresses import bind_addresses
from service.keys import secret_of
from service.launch import command_of
from service.processes.cells import make_shared
from service.processes.handover import CheckedFiles, Child, Shared, start
from service.road.engine_end.inbox import close_copy
from service.supervisor import ENGINE, GRACE_S, MAIN


class Doors:
    """A supervisor and its doors. They end with the process that made them, whichever thread of it
    did so: only that process holds the other end of their lifeline."""

    def __init__(self, settings: Settings) -> None:
        """Check the files, and bind. Raises KeysError, TlsError, CannotListen, OSError."""
        os.close(CheckedFiles(settings).fd)  # the supervisor reads them again
        self.secret = secret_of(settings.server.secret_file)
        self._settings = settings
        self._addresses = bind_addresses(settings.server, is_private=settings.auth.is_private)
        self.url = self._addresses.url
        (self._road,) = self._addresses.engines
        self.road = self._road.sock
        """Sessions of other processes connect to the engine here."""
        self.metrics = {ENGINE: make_shared()}
        self._lifeline, self._held = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start them; this process stops listening for HTTP itself. Raises OSError."""
        http, path = self._addresses.http, str(self._road.path)
        child = Child(MAIN, command_of("service.embedded"), http)
        self._process = start(
            child, Shared(self._settings, self._lifeline, path, self.url, self.secret, self.metrics)
        )
        for one in http:
            one.close()

    def read_again(self) -> None:
        """Keys and certificates have changed."""
        self._signal(signal.SIGHUP)

    def drain(self) -> None:
        """Accept no more requests, finish those accepted, and end."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Wait until they have drained, within the settings' limit; stop listening."""
        self._addresses.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._settings.server.drain_timeout_s + GRACE_S)
            self._process.kill()
            self._process.wait()
        for fd in (self._lifeline, self._held, *self.metrics.values()):
            os.close(fd)

    def leave(self) -> None:
        """After a fork: close the child's copies."""
        os.close(self._held)
        close_copy(self.road)
