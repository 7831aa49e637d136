"""The whole service on real sockets, engine and HTTP door in threads of the test's process.

`TEST_BACKEND=cuda` runs every test of this directory on a GPU, with an fp16 pool.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import pytest
from http_messages import HEAD_DIM, KIND, KV_HEADS, LAYERS, PAGE_SIZE, PAGES, POOL_DTYPE
from http_secrets import bearer

from config.settings import Settings, load_settings
from kernels import make_backend
from kernels.backend import Backend
from service.doors.http.server import HttpServer
from service.doors.kit.process import Setup
from service.engine.loop.engine import Engine
from service.engine.store.setup import geometry
from service.metrics import Metrics
from service.processes.cells import make_shared
from tests.engine.harness import Running, running_engine
from tests.harness.plain_http import http_client
from tests.harness.waiting import WAIT_S, wait_for

SECRET: Final = "the secret of the service"
ARGUMENTS: Final = (
    *("--backend.kind", KIND),
    *("--pool.num-layers", str(LAYERS)),
    *("--pool.num-kv-heads", str(KV_HEADS)),
    *("--pool.head-dim", str(HEAD_DIM)),
    *("--pool.page-size", str(PAGE_SIZE)),
    *("--pool.num-pages", str(PAGES)),
    *("--pool.dtype", POOL_DTYPE),
)


needs_a_slow_device = pytest.mark.skipif(
    KIND != "cpu", reason="a GPU is done with the largest body in a moment"
)


class GatedBackend:
    """A real backend whose attention waits while a test has the gate closed.

    It waits on its way in, and the engine with it, as where a kernel runs on the processor; or,
    when `late`, as a launch that is not done yet, while the engine continues.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.late = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attend(self, requests: Any) -> Any:
        self.entered.set()
        if self.late:
            return Late(self.inner.attend(requests), self.gate)
        self.wait()
        return self.inner.attend(requests)

    def wait(self) -> None:
        if not self.gate.wait(WAIT_S):
            raise RuntimeError("the gate stayed closed")


@dataclass
class Late:
    """A launch that is not done while the gate is closed."""

    inner: Any
    gate: threading.Event

    @property
    def done(self) -> bool:
        return self.gate.is_set() and bool(self.inner.done)

    @property
    def seconds(self) -> Any:
        return self.inner.seconds

    def result(self) -> Any:
        if not self.gate.wait(WAIT_S):
            raise RuntimeError("the gate stayed closed of a launch")
        return self.inner.result()


@dataclass
class Service:
    """A running service: one engine and one door."""

    settings: Settings
    running: Running
    backend: GatedBackend
    doors: list[tuple[HttpServer, threading.Thread]] = field(default_factory=list)
    url: str = ""

    @property
    def engine(self) -> Engine:
        return self.running.engine

    @property
    def engine_socket(self) -> str:
        return self.running.path

    @property
    def door(self) -> Any:
        return self.doors[0][0].door

    @property
    def routes_app(self) -> Any:
        return self.doors[0][0].application.dispatcher.app

    @property
    def num_waiting(self) -> int:
        """Operations in the engine whose turn has not come."""
        return self.engine.scheduler.queue.count

    @property
    def state(self) -> str:
        return self.engine.state.state

    @property
    def is_over(self) -> bool:
        threads = [self.running.thread, *(thread for _, thread in self.doors)]
        return not any(thread.is_alive() for thread in threads)

    def client(self, key: str = "") -> httpx.Client:
        """A client that shows this key, if any."""
        headers = bearer(key) if key else {}
        return http_client(self.url, headers)

    def connect(self) -> socket.socket:
        host, _, port = self.url.partition("://")[2].partition(":")
        return socket.create_connection((host, int(port)), timeout=WAIT_S)

    @contextmanager
    def gate_closed(self) -> Iterator[None]:
        """No attention ends meanwhile."""
        self.backend.entered.clear()
        self.backend.gate.clear()
        try:
            yield
        finally:
            self.backend.gate.set()

    def read_again(self) -> None:
        """As on SIGHUP: the door reads its files again."""
        server = self.doors[0][0]
        assert server.loop is not None
        server.loop.call_soon_threadsafe(server.read_again)

    def drain(self) -> None:
        """As the supervisor does: the doors first, so that they take nothing new."""
        for server, _ in self.doors:
            if server.loop is not None and server.started and not server.should_exit:
                server.loop.call_soon_threadsafe(server.drain)
        self.engine.drain()

    def stop(self) -> None:
        """Drain, and wait for the end."""
        self.backend.gate.set()
        for server, thread in self.doors:
            if thread.is_alive() and server.loop is not None:
                server.loop.call_soon_threadsafe(server.drain)
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a door did not stop"
        self.running.stop()


@contextmanager
def engine_running(*arguments: str) -> Iterator[tuple[Service, dict[str, int]]]:
    """A ready engine with these settings on top of the tests' own, its pool poisoned, and no door;
    and the memory of the metrics."""
    settings = load_settings([*ARGUMENTS, *arguments])
    pool = geometry(settings.pool, settings.pool.num_pages or PAGES)
    backend = GatedBackend(make_backend(settings.backend.kind, pool, poison=True))
    with ExitStack() as ending:
        shared = {name: make_shared() for name in ("engine", "http-0")}
        for fd in shared.values():
            ending.callback(os.close, fd)
        metrics = Metrics("engine", shared)
        made = running_engine(backend, settings, secret=SECRET, metrics=metrics)
        service = Service(settings, ending.enter_context(made), backend)
        ending.callback(service.stop)
        yield service, shared


@contextmanager
def serving(*arguments: str) -> Iterator[Service]:
    """The whole service, ready, with these settings on top of the tests' own."""
    with engine_running(*arguments) as (service, shared), ExitStack() as ending:
        listener = ending.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        path, metrics = service.engine_socket, Metrics("http-0", shared)
        setup = Setup(service.settings, metrics, path, "http-0", SECRET, sockets=[listener])
        server = HttpServer(setup)
        thread = threading.Thread(target=server.run, name="door")
        service.doors.append((server, thread))
        scheme = "http" if server.tls is None else "https"
        service.url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        thread.start()
        ending.callback(service.stop)
        wait_for(lambda: server.started and service.door.link.state[0] == "ready", "the start")
        yield service
