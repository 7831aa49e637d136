"""`Session`: the methods of `Client` for callers on the service's host, over shared memory."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import DTypeLike, NDArray

from attnd.calls.call import Call, Reply
from attnd.dependents import Dependents
from attnd.errors import AttndError, NotFound, NotSupported
from attnd.http.origin import PORTS
from attnd.methods import Calls
from attnd.results import Info
from attnd.retries import Attempt, Retries, execute, options_of
from attnd.road.attempts import HEALTH, health, send_attempt
from attnd.road.connection import Connection
from attnd.road.greeting import Dial, dial_path
from attnd.steps.host import NUMPY, HostArena, numpy_view
from attnd.steps.lane import Lane
from attnd.steps.layout import A, Dtypes
from attnd.steps.slots import Arena
from attnd.steps.stepper import Stepper, stepping
from attnd.wire.meta import Meta

T = TypeVar("T")

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Road:
    """The way to the engine, and the connection to it while there is one; views share it."""

    dial: Dial
    arena_bytes: int
    key: str = field(default="", repr=False)
    connection: Connection | None = None
    closed: bool = False
    stepper: Stepper[Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    dependents: Dependents = field(default_factory=Dependents)

    def connected(self, ends: float) -> Connection:
        """The connection; a new one where it broke, or belongs to the process before a fork."""
        connection = self.connection
        if connection is not None and connection.is_usable:
            return connection
        with self.lock:
            if self.closed:
                raise RuntimeError("the session is closed")
            connection = self.connection
            if connection is None or not connection.is_usable:
                if connection is not None and connection.pid == os.getpid():
                    connection.close()
                connection = self.connect(self.arena_bytes, ends)
                self.connection = connection
            return connection

    def connect(self, arena_bytes: int, ends: float) -> Connection:
        """A connection of its own, with an arena of `arena_bytes`."""
        return Connection(self.dial, arena_bytes, ends, key=self.key)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            if self.stepper is not None:
                self.stepper.close()
                self.stepper = None
            if self.connection is not None:
                self.connection.close()
                self.connection = None


class Session(Calls):
    """A blocking client over shared memory; threads may share it. Close it, or use it with `with`.

    `path` is the engine's socket (`server.socket`), or the URL of a service of the same user on
    this host; by default that on `port`. ValueError for a URL of another host.
    `api_key` is the caller's key, where the service has keys. `timeout` and `retries` are as in
    `Client`. `arena_bytes` is the initial size of the shared memory; it grows when calls need more.

    Arrays of a result are views of the arena, whose bytes are reused once they are deleted. The
    next call after a broken connection connects again; after a restart of the engine its sequences
    are lost.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        port: int = 8080,
        api_key: str | None = None,
        timeout: float = 30.0,
        retries: int | Retries = 2,
        arena_bytes: int = 64 * 2**20,
    ) -> None:
        self._options = options_of(timeout, retries)
        self._road = Road(self._dial_of(path, port), arena_bytes, api_key or "")

    def _dial_of(self, path: str | os.PathLike[str] | None, port: int) -> Dial:
        """Raises ValueError for a URL of another host."""
        given = f"http://127.0.0.1:{port}" if path is None else os.fspath(path)
        found = socket_path(given)
        return partial(dial_path, found, found != given)

    def metrics(self) -> str:
        """Always raises `NotFound`: only `Client.metrics` has metrics, which HTTP serves."""
        raise refusal(NotFound, "metrics are served over HTTP only: use attnd.Client")

    slots = stepping(Stepper[Any].slots)
    step = stepping(Stepper[Any].step)

    def _stepper(self) -> Stepper[Any]:
        """The session's steps; new ones where a connection broke: slots made before are invalid."""
        found = self._road.stepper
        if found is None or not found.is_usable:
            made = self._new_stepper(self.info())
            if found is not None:
                found.close()
            found = self._road.stepper = made
        return found

    def _new_stepper(self, info: Info) -> Stepper[Any]:
        """Raises `NotSupported` where the engine's slots are device memory."""
        if info.backend == "cuda":
            raise refusal(
                NotSupported,
                "steps with numpy arrays need an engine with backend.kind = cpu; this one's "
                "slots are in device memory: use attnd.torch.TorchSession, or decode and "
                "prefill layer by layer",
            )
        return stepper_of(self, info, partial(HostArena, view=numpy_view), NUMPY)

    def empty(self, name: str, shape: Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An uninitialised array in the arena, for the input `name` of later calls.

        Arrays made one after another in the order of a call's inputs (`q`, `k`, `v`; `k`, `v`; `o`,
        `lse`) are placed back to back, and a call with exactly these sends them without a copy.
        Fill them, call, and fill them again. One array given as both `k` and `v` is copied, because
        an image holds each of them. Raises `ArenaFull`.
        """
        connection = self._road.connected(time.monotonic() + self._options.timeout_s)
        return connection.areas.empty(name, tuple(shape), np.dtype(dtype))

    def send(self, call: Call[T]) -> T:
        """Execute one call, retries included; raises `AttndError`."""
        return execute(call, self._options, self._send_attempt)

    def _send_attempt(self, attempt: Attempt[Any]) -> Reply:
        ends = time.monotonic() + attempt.timeout_s
        connection = self._road.connected(ends)
        if attempt.call.operation not in HEALTH:
            return send_attempt(connection, attempt, ends)
        if not connection.is_open():
            connection = self._road.connected(ends)
        return health(connection, attempt)

    @property
    def dependents(self) -> Dependents:
        """Objects to close before the session."""
        return self._road.dependents

    def close(self) -> None:
        """End the session, of every `with_options` view too. Arrays keep their values.

        Caches of transformers that use it delete their sequences first.
        """
        self._road.dependents.close()
        self._road.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refusal(error: type[NotFound] | type[NotSupported], detail: str) -> AttndError:
    """An error that the session raises by itself, as the service would."""
    return error({**asdict(error.kind), "detail": detail}, Meta())


def stepper_of(
    session: Session,
    info: Info,
    make_arena: Callable[[Lane[A], int], Arena[A]],
    dtypes: Dtypes,
    arena_bytes: int = 2**20,
) -> Stepper[A]:
    """Steps over the session's connection, and over further connections to the same engine."""
    road, timeout_s = session._road, session._options.timeout_s

    def connect(size: int) -> Connection:
        return road.connect(size, time.monotonic() + timeout_s)

    first = road.connected(time.monotonic() + timeout_s)
    return Stepper(first, connect, make_arena, dtypes, info, timeout_s, arena_bytes)


def socket_path(place: str) -> str:
    """A path as it is; of a URL, the default path of its engine's socket."""
    url = urlsplit(place)
    if url.scheme not in PORTS:
        return place
    if url.hostname not in LOOPBACK:
        raise ValueError(
            f"{place} is another host, and a session shares memory with its engine: use "
            "attnd.Client, or a service on this host"
        )
    return default_path(url.port or PORTS[url.scheme])


def default_path(port: int) -> str:
    """The engine's socket of the service on this port that runs as the caller's user."""
    return os.path.join(tempfile.gettempdir(), f"attnd-{os.getuid()}", f"{port}.sock")
