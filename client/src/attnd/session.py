"""`Session`: the methods of `Client` for callers on the service's host, over shared memory."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from attnd import moving
from attnd.calls import attention, control, prefix, transfer
from attnd.calls.call import Call, Reply
from attnd.calls.prefix import FROM_NOW
from attnd.dependents import Users
from attnd.errors import NotFound, NotSupported
from attnd.methods import (
    POLL_S,
    carry_out,
    checked,
    every_event,
    every_sequence,
    manner,
    repeating,
    wait_until_ready,
    with_self,
)
from attnd.replay import Args, Kwargs, Places, Repeats
from attnd.results import CacheEvent, Info, Meta, SequenceInfo
from attnd.retries import Retries, Send
from attnd.road.attempts import HEALTH, attempt, health
from attnd.road.connection import Connection
from attnd.road.replay import RoadRepeat, add_array
from attnd.steps.host import NUMPY, HostArena, numpy_view
from attnd.steps.lane import Lane
from attnd.steps.layout import A, Dtypes
from attnd.steps.slots import Arena
from attnd.steps.stepper import Stepper, stepping

P = ParamSpec("P")
T = TypeVar("T")


def blocking(build: Callable[P, Call[T]]) -> Callable[Concatenate[Session, P], T]:
    """A method of `Session` that makes a call and sends it."""

    @wraps(build)
    def method(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(build(*args, **kwargs))

    return with_self(method, build)


@dataclass(slots=True, eq=False)
class Road:
    """Where the engine is, and the connection to it while there is one; views share it."""

    path: str
    arena_bytes: int
    own: bool
    key: str = field(default="", repr=False)
    connection: Connection | None = None
    closed: bool = False
    stepper: Stepper[NDArray[Any]] | None = None
    repeats: Repeats[RoadRepeat[Any]] = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: Users = field(default_factory=Users)

    def __post_init__(self) -> None:
        self.repeats = Repeats(add_array, self._repeat)

    def connected(self, ends: float) -> Connection:
        """The connection, made anew when it is broken or another process's."""
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
                connection = Connection(
                    self.path, self.arena_bytes, ends, own=self.own, key=self.key
                )
                self.connection = connection
                self.repeats.known.clear()
            return connection

    def _repeat(self, call: Call[Any], places: Places) -> RoadRepeat[Any] | None:
        connection = self.connection
        if connection is None or not connection.is_usable:
            return None
        return RoadRepeat(connection, call, places)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            if self.stepper is not None:
                self.stepper.close()
                self.stepper = None
            if self.connection is not None:
                self.connection.close()
                self.connection = None
                self.repeats.known.clear()


class Session:
    """A blocking client over the road; may be shared by threads. Close it, or use it with `with`.

    `path` is the engine's socket (`server.socket`); without one the service's `port` tells where
    it is. `api_key` is the caller's key, where the service has keys. `timeout` and `retries` are as
    in `Client`. `arena_bytes` of shared memory are asked for; the arena grows when calls need more.

    Arrays of a result lie in the arena: keep those that are needed, and their memory is used again
    when they are gone. A connection that breaks is made again by the next call; if the engine was
    started anew its sequences are gone.
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
        self._manner = manner(timeout, retries)
        found = default_path(port) if path is None else os.fspath(path)
        self._road = Road(found, arena_bytes, path is None, api_key or "")

    create_sequences = blocking(control.create_sequences)
    create_sequence = blocking(control.create_sequence)
    get_sequence = blocking(control.get_sequence)
    sequence_page = blocking(control.sequence_page)
    delete_sequence = blocking(control.delete_sequence)
    truncate = blocking(control.truncate)
    truncate_sequences = blocking(control.truncate_sequences)
    page_table = blocking(control.page_table)
    append = repeating(attention.append)
    decode = repeating(attention.decode)
    prefill = repeating(attention.prefill)
    ragged_prefill = blocking(attention.ragged_prefill)
    cascade = blocking(attention.cascade)
    merge = blocking(attention.merge)
    gather = blocking(attention.gather)
    delete_sequences = blocking(control.delete_sequences)
    match_prefix = blocking(prefix.match_prefix)
    commit = blocking(prefix.commit)
    commit_sequences = blocking(prefix.commit_sequences)
    renew_lease = blocking(prefix.renew_lease)
    release_lease = blocking(prefix.release_lease)
    pin = blocking(prefix.pin)
    unpin = blocking(prefix.unpin)
    holds = blocking(prefix.holds)
    evict = blocking(prefix.evict)
    clear = blocking(prefix.clear)
    get_namespace = blocking(prefix.get_namespace)
    set_namespace = blocking(prefix.set_namespace)
    event_page = blocking(prefix.event_page)
    export_header = blocking(transfer.export_header)
    export_part = blocking(transfer.export_part)
    begin_import = blocking(transfer.begin_import)
    import_part = blocking(transfer.import_part)
    end_import = blocking(transfer.end_import)
    get_import = blocking(transfer.get_import)
    cancel_import = blocking(transfer.cancel_import)
    export = moving.export
    import_ = moving.import_
    info = blocking(control.info)
    pool = blocking(control.pool)
    engines = blocking(control.engines)
    drain_engine = blocking(control.drain_engine)
    snapshot = blocking(control.snapshot)
    live = blocking(control.live)
    ready = blocking(control.ready)

    def metrics(self) -> str:
        """Always raises `NotFound`: metrics are served over HTTP only, by `Client.metrics`."""
        detail = "metrics are served over HTTP only: attnd.Client has them"
        problem = {"status": 404, "code": "not_found", "title": "No such route", "detail": detail}
        raise NotFound(problem, Meta())

    slots = stepping(Stepper[NDArray[Any]].slots)
    step = stepping(Stepper[NDArray[Any]].step)

    def _stepper(self) -> Stepper[NDArray[Any]]:
        """One thread's. Raises `NotSupported` where the engine's arenas are device memory."""
        found = self._road.stepper
        if found is None or not found.is_usable:
            info = self.info()
            if info.backend == "cuda":
                raise NotSupported(
                    {
                        "status": 422,
                        "code": "not_supported",
                        "title": "Not supported",
                        "detail": "steps with numpy arrays need an engine with backend.kind = cpu; "
                        "this one's slots lie in device memory: use attnd.torch.TorchSession, or "
                        "decode and prefill layer by layer",
                    },
                    Meta(),
                )
            if found is not None:
                found.close()
            found = self._road.stepper = stepper_of(self, info, host_arena, NUMPY)
        return found

    def empty(self, name: str, shape: Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An array in the arena, for the input `name` of calls to come; its values are undefined.

        Arrays made in turn in the order of a call's inputs (`q`, `k`, `v`; `k`, `v`; `o`, `lse`)
        lie back to back, and a call with just these sends them without a copy. Fill them, call,
        and fill them again. Raises `ArenaFull`.
        """
        connection = self._road.connected(time.monotonic() + self._manner.timeout_s)
        return connection.areas.empty(name, tuple(shape), np.dtype(dtype))

    def list_sequences(self, *, page_size: int | None = None) -> Iterator[SequenceInfo]:
        """Every sequence by id, fetched `page_size` at a time (None: the service's default)."""
        return every_sequence(self.sequence_page, page_size)

    def events(self, after: int = FROM_NOW, *, poll_s: float = POLL_S) -> Iterator[CacheEvent]:
        """What becomes of cached pages, without end; see `event_page` for `after`.

        Asks every `poll_s` seconds while there is nothing new. Raises what a call raises.
        """
        return every_event(self.event_page, after, poll_s)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the service is ready; raises `NeverReady` with its own reason."""
        wait_until_ready(self.ready, timeout)

    def with_options(self, *, deadline: float | None = None, request_id: str | None = None) -> Self:
        """The same session, for calls that differ; see `Client.with_options`."""
        view = object.__new__(type(self))
        view._road = self._road
        view._manner = replace(self._manner, deadline_s=deadline, request_id=checked(request_id))
        return view

    def send(self, call: Call[T]) -> T:
        """Carry out one call."""
        return carry_out(call, self._manner, self._attempt)

    @property
    def _repeats(self) -> Repeats[RoadRepeat[Any]]:
        return self._road.repeats

    def _again(self, repeat: RoadRepeat[T], args: Args, kwargs: Kwargs, name: bytes) -> T | None:
        """A call that was made before, under the request id `name`; None where it has to go like
        any other."""
        if not repeat.is_usable:
            return None
        return repeat.send(args, kwargs, name, time.monotonic() + self._manner.timeout_s)

    def _attempt(self, step: Send[Any]) -> Reply:
        ends = time.monotonic() + step.timeout_s
        connection = self._road.connected(ends)
        if step.call.operation not in HEALTH:
            return attempt(connection, step, ends)
        if not connection.is_open():
            connection = self._road.connected(ends)
        return health(connection, step)

    @property
    def users(self) -> Users:
        """What ends before the session does."""
        return self._road.users

    def close(self) -> None:
        """End the session, of every `with_options` view too. Arrays stay what they are.

        Caches of transformers on it delete their sequences first.
        """
        self._road.users.end()
        self._road.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def stepper_of(
    session: Session,
    info: Info,
    make_arena: Callable[[Lane[A], int], Arena[A]],
    dtypes: Dtypes,
    arena_bytes: int = 2**20,
) -> Stepper[A]:
    """Steps over the session's connection, and over others to the same engine beside it."""
    road, timeout_s = session._road, session._manner.timeout_s

    def beside(size: int) -> Connection:
        ends = time.monotonic() + timeout_s
        return Connection(road.path, size, ends, own=road.own, key=road.key)

    first = road.connected(time.monotonic() + timeout_s)
    return Stepper(first, beside, make_arena, dtypes, info, timeout_s, arena_bytes)


def host_arena(lane: Lane[NDArray[Any]], size: int) -> HostArena[NDArray[Any]]:
    return HostArena(lane, size, numpy_view)


def default_path(port: int) -> str:
    """Where the service on this port has its engine's socket, for its own user."""
    return os.path.join(tempfile.gettempdir(), f"attnd-{os.getuid()}", f"{port}.sock")
