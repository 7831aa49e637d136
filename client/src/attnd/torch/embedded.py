"""`EmbeddedSession`: a `TorchSession` with an engine in its process. The only module of the client
that imports the service."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from importlib import import_module
from typing import Any, Final, Self, TypeVar

import torch

from attnd.calls.call import Call
from attnd.errors import ConnectionFailed, DeviceLost, EngineFailed
from attnd.road.greeting import Dial
from attnd.session import Road
from attnd.steps.lane import Lane
from attnd.steps.stepper import Stepper
from attnd.torch import driver
from attnd.torch.arena import DeviceArena
from attnd.torch.session import TorchSession

T = TypeVar("T")
REMEDY: Final = "an embedded engine needs the service: pip install attnd, in place of attnd-client"
try:
    import_module("attnd_service.service.launch").import_beside_others()
    service: Final[Any] = import_module("attnd_service.service.embedded.engine")
    settings_module: Final[Any] = import_module("attnd_service.config.settings")
except ModuleNotFoundError as error:
    raise ImportError(f"{REMEDY} ({error})") from error
if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # the driver reads them once
    settings_module.set_environment("cuda")


class EmbeddedSession(TorchSession):
    """A `TorchSession` whose engine is a thread of this process; for the thread that made it.

    `settings` are those of `attnd serve` by name, `{"pool.num-layers": 32}`, over those of the
    environment; `backend.device` is the session's device, too. With `serve_port` (0: a free one,
    see `url`) the engine has doors, in child processes: HTTP callers and sessions of other
    processes share it with this one. Without it nothing else reaches the engine, and there is no
    child. `api_key`, `timeout` and `arena_bytes` are as in `TorchSession`.

    Raises ValueError for settings that it cannot have, `EngineFailed` where the engine cannot
    start, and `DeviceLost` where an earlier one lost the process's CUDA context. An error that ends
    the engine later raises as `EngineFailed` or `DeviceLost` in the next call. Calls after `close`,
    in another thread, and in the child of a fork raise RuntimeError.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        serve_port: int | None = None,
        *,
        timeout: float = 30.0,
        api_key: str | None = None,
        arena_bytes: int = 64 * 2**20,
    ) -> None:
        if service.EmbeddedEngine.lost:
            raise DeviceLost(service.EmbeddedEngine.lost)
        self._owner, self._pid = threading.get_ident(), os.getpid()
        try:
            made = service.EmbeddedEngine(settings, serve_port, torch.cuda.is_available())
        except ValueError:
            raise
        except Exception as error:
            raise EngineFailed(f"the engine cannot start: {error}") from error
        self._engine: Any = made
        try:
            backend = made.settings.backend
            if backend.kind == "cuda":
                use_device(torch.device("cuda", backend.device))
            try:
                made.start()
            except Exception as error:
                raise EngineFailed(f"the engine cannot start: {error}") from error
            super().__init__(
                timeout=timeout, api_key=api_key, device=backend.device, arena_bytes=arena_bytes
            )
            weakref.finalize(self._road, made.close)
            made.selector.is_awaited = partial(is_awaited, weakref.ref(self._road))
        except BaseException:
            made.close()
            raise

    @property
    def url(self) -> str | None:
        """HTTP's address; None without `serve_port`."""
        found: str | None = self._engine.url
        return found

    def read_keys_again(self) -> None:
        """The key and certificate files have changed: as SIGHUP of `attnd serve`."""
        self._check()
        self._engine.read_again()

    def take_over(self) -> None:
        self._check_process()
        self._owner = threading.get_ident()

    def close(self) -> None:
        """End the session, then drain the engine and its doors, as SIGTERM of `attnd serve`. Does
        nothing in the child of a fork."""
        if os.getpid() == self._pid:
            super().close()
            self._engine.close()

    def send(self, call: Call[T]) -> T:
        self._check()
        return super().send(call)

    def empty(self, name: str, shape: Sequence[int], dtype: Any = "float32") -> Any:
        self._check()
        return super().empty(name, shape, dtype)

    def _stepper(self) -> Stepper[torch.Tensor]:
        self._check()
        return super()._stepper()

    def _for_thread(self) -> Self:
        view = copy(self)
        view._owner = threading.get_ident()
        return view

    def _dial_of(self, path: object, port: int) -> Dial:
        engine = self._engine

        def dial(ends: float) -> socket.socket:
            try:
                connected: socket.socket = engine.connect()
            except OSError as error:
                check_engine(engine)
                raise ConnectionFailed("the engine has ended") from error
            return connected

        return dial

    def _make_arena(self, lane: Lane[torch.Tensor], size: int) -> Any:
        arena = super()._make_arena(lane, size)
        if isinstance(arena, DeviceArena):
            arena.memory = self._engine.arena_at(arena.address)
        return arena

    def _check(self) -> None:
        """Raises RuntimeError in another thread, or in the child of a fork, and what ended the
        engine."""
        if self._owner != threading.get_ident():
            self._check_process()
            raise RuntimeError(
                "an EmbeddedSession is for the thread that made it: call take_over() in this one, "
                "or give it a TorchSession of its own, at serve_port"
            )
        self._check_process()
        check_engine(self._engine)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"the engine is in process {self._pid}, this is a fork of it: give this one a "
                "TorchSession at serve_port"
            )


def is_awaited(road: weakref.ref[Road]) -> bool:
    """Whether the session's thread waits for the engine, and so leaves it the interpreter."""
    found = road()
    return found is not None and found.connection is not None and found.connection.is_awaited


def check_engine(engine: Any) -> None:
    """Raises the error that ended an engine: `DeviceLost`, or else `EngineFailed`."""
    if service.EmbeddedEngine.lost:
        raise DeviceLost(service.EmbeddedEngine.lost)
    if engine.error is not None:
        raise EngineFailed(f"the engine has ended: {engine.error}") from engine.error


def use_device(device: torch.device) -> None:
    """Make torch's context, and its library of matrices, before the engine. What the driver loads
    later waits for the streams of open steps, and so may wait for ever: raises EngineFailed where
    it loads kernels at their first launch."""
    one = torch.zeros((16, 16), dtype=torch.float16, device=device)
    torch.mm(one, one)
    torch.cuda.synchronize(device)
    if driver.loads_lazily():
        raise EngineFailed(
            "CUDA started with lazy loading, where a kernel's first launch in an open step waits "
            "for ever: import EmbeddedSession before torch uses the GPU, or set "
            "CUDA_MODULE_LOADING=EAGER in the environment"
        )
