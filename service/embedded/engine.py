"""`EmbeddedEngine`: an engine whose loop is a thread of its caller's process.

It is the engine of `attnd serve`, with the same settings and the same loop. It sets nothing of the
process: no signal's handler, no limit, no setting of the garbage collector.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from config.settings import Settings
from kernels import make_thread_own
from kernels.errors import DeviceLost
from service.embedded.doors import Doors
from service.embedded.settings import settings_of
from service.engine.loop.engine import Engine
from service.engine.store.setup import opened
from service.errors import without_frames
from service.logs import log_beside_others
from service.metrics import Metrics
from service.road.engine_end.inbox import Inbox, close_copy
from service.supervisor import ENGINE, GRACE_S

LOG: Final = logging.getLogger("attnd.engine")
AWAITED_S: Final = 30e-6
PAUSE_S: Final = 500e-6
"""Longest pauses between two looks where the loop would poll without any: while its own session
waits for it, and else, when polling would take the interpreter from the session's thread."""
MAX_FD: Final = 1024
"""Of `select`, the only call that waits for less than a millisecond."""
LIVING: Final[weakref.WeakSet[EmbeddedEngine]] = weakref.WeakSet()


class PausingSelector(selectors.DefaultSelector):
    """Where a poll finds nothing, pauses until something comes or it is time for another look."""

    is_awaited: Callable[[], bool] = staticmethod(lambda: True)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if not ready and timeout == 0:
            pause_s = AWAITED_S if self.is_awaited() else PAUSE_S
            if (fd := self.fileno()) < MAX_FD:
                select.select((fd,), (), (), pause_s)
            else:
                time.sleep(pause_s)
            ready = super().select(0)
        return ready


class EmbeddedEngine:
    """Made, started once and closed in one process. Only `connect` is for other threads, too."""

    lost = ""
    """Why no engine can be started in this process any more."""

    def __init__(self, given: Mapping[str, object], serve_port: int | None, has_cuda: bool) -> None:
        """Checks `given`, see `settings_of`, and binds the port of the doors, 0 for a free one.

        Raises SettingsError, KeysError, TlsError, CannotListen, OSError.
        """
        self.settings: Settings = settings_of(given, serve_port, has_cuda)
        log_beside_others(self.settings.log)
        self.error: BaseException | None = None
        """What ended it, or why it could not start."""
        self.doors = None if serve_port is None else Doors(self.settings)
        self.selector = PausingSelector()
        self._inbox = Inbox()
        self._engine: Engine | None = None
        self._pid = os.getpid()
        self._is_settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attnd-engine", daemon=True)
        LIVING.add(self)

    @property
    def url(self) -> str | None:
        """HTTP's address; None without doors."""
        return None if self.doors is None else self.doors.url

    def start(self) -> None:
        """Start the loop, and the doors once it is ready. Raises the reason where it cannot."""
        self._thread.start()
        self._is_settled.wait()
        try:
            if self.error is not None:
                raise self.error
            if self.doors is not None:
                self.doors.start()
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        """The thread: the engine's process in `service/engine/__main__.py`, but for what that sets
        of its process."""
        doors, chosen = self.doors, self.settings.backend
        try:
            _own = make_thread_own(chosen.kind, chosen.device)
            with opened(self.settings) as (settings, backend):
                self._engine = engine = Engine(
                    self._inbox,
                    settings,
                    backend,
                    Metrics(ENGINE, None if doors is None else doors.metrics),
                    "" if doors is None else doors.secret,
                    None if doors is None else doors.road,
                    selector=self.selector,
                )
                self._is_settled.set()
                engine.run()
        except Exception as error:
            self.error = without_frames(error)
            if self._is_settled.is_set() and isinstance(error, DeviceLost):
                EmbeddedEngine.lost = str(error)
        finally:
            self._engine = None
            self._inbox.close()
            if doors is not None:
                doors.drain()
            self._is_settled.set()

    def connect(self) -> socket.socket:
        """The caller's end of a new connection. Raises OSError where the engine has ended."""
        engine = self._engine
        if engine is not None and engine.state.state == "lost":
            self._thread.join(GRACE_S)  # `error` has the reason then
        return self._inbox.connect()

    def arena_at(self, address: int) -> Any:
        """The owner of a device arena's memory, which keeps it after the engine's end."""
        engine = self._engine
        return None if engine is None else engine.lanes.arena_at(address)

    def read_again(self) -> None:
        """Key and certificate files have changed."""
        if (engine := self._engine) is not None:
            engine.read_keys_again()
        if self.doors is not None:
            self.doors.read_again()

    def close(self) -> None:
        """Drain as at SIGTERM of `attnd serve`, and end; nothing in the child of a fork."""
        if os.getpid() != self._pid or self not in LIVING:
            return
        LIVING.discard(self)
        if self.doors is not None:
            self.doors.drain()
        if (engine := self._engine) is not None:
            engine.drain()
        if self._thread.ident not in (None, threading.get_ident()):
            self._thread.join(self.settings.server.drain_timeout_s + GRACE_S)
        if self._thread.is_alive():
            LOG.error("the engine has not ended within server.drain_timeout_s")
        if self.settings.backend.kind == "cuda":
            gc.collect()  # to free a device's memory later would wait for the steps of then
        if self.doors is not None:
            self.doors.close()

    def leave(self) -> None:
        """In the child of a fork: hold nothing that keeps callers or doors of the parent waiting
        once that has ended."""
        self._inbox.leave()
        if self.doors is not None:
            self.doors.leave()
        if self._engine is not None:
            for session in self._engine.callers.sessions:
                close_copy(session.sock)


def leave_all() -> None:
    for one in LIVING:
        one.leave()


os.register_at_fork(after_in_child=leave_all)
