"""`python -m service`: settings, logs, the engine, and uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn

from config.settings import (
    ServerSettings,
    Settings,
    SettingsError,
    let_idle_threads_sleep,
    load_settings,
)
from kernels.backend import Backend
from service import __version__
from service.app import create_app
from service.engine.engine import Engine
from service.engine.pool import backend_maker
from service.logs import set_up_logs
from service.metrics import Metrics

LOG: Final = logging.getLogger("attnd")
KEEP_ALIVE_S: Final = 75
"""Longer than clients keep idle connections, so that none closes under a request."""


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit status."""
    let_idle_threads_sleep()
    try:
        settings = load_settings(argv)
    except SettingsError as error:
        print(f"attnd: {error}", file=sys.stderr)
        return 2
    set_up_logs(settings.log)
    server = make_server(settings)
    server.run()
    return 0 if server.started else 1


def make_server(settings: Settings, make: Callable[[], Backend] | None = None) -> Server:
    """Everything wired together; nothing runs yet. `make` replaces the settings' backend."""
    metrics = Metrics()
    engine = Engine(
        make or backend_maker(settings.pool, settings.backend),
        queue_depth=settings.server.queue_depth,
        metrics=metrics,
        version=__version__,
    )
    return Server(uvicorn_config(create_app(settings, engine, metrics), settings.server), engine)


def uvicorn_config(app: object, server: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=server.host,
        port=server.port,
        uds=server.uds,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(server.drain_timeout_s)),
    )


def settle() -> None:
    """Leave what the start made out of all later collections: they would pause for its size."""
    gc.collect()
    gc.freeze()


class Server(uvicorn.Server):
    """uvicorn that goes on answering while the engine drains, so that nothing admitted is lost.

    The first signal makes the service not ready: new operations are answered 503, admitted ones
    finish, and only then does the server close. A second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine
        self.settled = False
        self.draining: asyncio.Task[None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.drain_timeout_s = float(config.timeout_graceful_shutdown or 1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            LOG.info("attnd %s serves %s", __version__, self.address())

    async def on_tick(self, counter: int) -> bool:
        if not self.settled and self.engine.state == "ready":
            self.settled = True
            settle()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.config.uds is not None:
            Path(self.config.uds).unlink(missing_ok=True)

    def address(self) -> str:
        """Where the service is, for people and for tests: the port is the one that was bound."""
        if self.config.uds is not None:
            return f"unix:{self.config.uds}"
        port = self.servers[0].sockets[0].getsockname()[1]
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{port} (API at /docs)"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.loop is None or self.draining is not None:
            self.should_exit = self.force_exit = True
            return
        LOG.info("%s: finishing admitted work", signal.Signals(sig).name)
        self.loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        if self.draining is None:
            self.draining = asyncio.get_running_loop().create_task(self.drain())

    async def drain(self) -> None:
        await self.engine.drain(self.drain_timeout_s)
        self.should_exit = True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
